"""The engine of `pointwise`: which tensors are dropped, when they are recomputed and freed, and what it refuses."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_models import build, gradients, loss_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import standin
from ckpt_ft.checkpointing.pointwise import install as pointwise
from ckpt_ft.checkpointing.pointwise.engine import MAX_CHAIN, Discarded, DiscardedOutput, Pass, claim_on
from ckpt_ft.errors import UserError


class Model(nn.Module):
    """Runs a function of itself and its input, so that a test defines the forward."""

    def __init__(self, body: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def handles() -> list[Discarded]:
    """Returns all handles that are alive."""
    return [o for o in gc.get_objects() if type(o) in (Discarded, DiscardedOutput)]


def treat(model: nn.Module) -> pointwise.Installed:
    return pointwise.install(model, {"": model})


def pair(body: Any, **layers: nn.Module) -> tuple[Model, Model]:
    plain = Model(body, **layers)
    treated = copy.deepcopy(plain)
    treat(treated)
    return plain, treated


def check_same(plain: nn.Module, treated: nn.Module, x: torch.Tensor) -> None:
    """Asserts that output and gradients, also the input's, are bit-equal."""
    results = []
    for model in (plain, treated):
        value = x.clone().requires_grad_()
        torch.manual_seed(1)
        output = model(value)
        output.square().sum().backward()
        results.append([output, value.grad, *gradients(model).values()])
    for a, b in zip(*results, strict=True):
        assert a is b is None or a.equal(b)


def count_calls(module: nn.Module) -> list[int]:
    """Counts the calls of `module`'s own forward."""
    calls = [0]
    inner = module.forward

    def forward(*args: Any) -> Any:
        calls[0] += 1
        return inner(*args)

    module.forward = forward
    return calls


def test_output_is_recomputed_once_for_all_consumers() -> None:
    model = Model(
        lambda m, x: m.q(h := m.norm(m.first(x))) + m.k(h) * m.v(h),
        first=nn.Linear(8, 8), norm=nn.LayerNorm(8), q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8),
    )  # fmt: skip
    calls = count_calls(model.norm)
    treat(model)
    loss = model(torch.randn(4, 8)).sum()
    assert calls == [1]
    loss.backward()
    assert calls == [2]


def test_output_is_freed_after_its_last_consumer() -> None:
    """The norm's output is freed after forward, recomputed for the next layer, and freed before its own backward."""
    alive: list[tuple[str, bool]] = []
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        first = m.first(x)
        first.register_hook(lambda grad: alive.append(("in front", recomputed())))
        h = m.norm(first)
        h.register_hook(lambda grad: alive.append(("behind", recomputed())))
        seen.append(weakref.ref(h.untyped_storage()))
        return m.last(h)

    def recomputed() -> bool:
        return any(isinstance(h.source, torch.Tensor) or any(t is not None for t in h.source.saved) for h in handles())

    model = Model(body, first=nn.Linear(8, 8), norm=nn.LayerNorm(8), last=nn.Linear(8, 8))
    treat(model)
    loss = model(torch.randn(4, 8)).sum()
    assert seen[0]() is None
    loss.backward()
    assert alive == [("behind", True), ("in front", False)]


def test_rebuilt_result_does_not_keep_its_input() -> None:
    """A ReLU saves its result, whose node refers to the norm's output: it is freed before the next layer runs."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[bool] = []

    class SeenLayerNorm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append(weakref.ref(out.untyped_storage()))
            return out

    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = m.act(m.norm(m.first(x)))
        h.register_hook(lambda grad: alive.append(seen[-1]() is not None))
        return m.last(h)

    model = Model(body, first=nn.Linear(8, 8), norm=SeenLayerNorm(8), act=nn.ReLU(), last=nn.Linear(8, 8))
    treat(model)
    model(torch.randn(4, 8)).sum().backward()
    assert len(seen) == 2
    assert alive == [False]


@pytest.mark.parametrize("name", ["llama", "resnet", "unet"])
def test_live_bytes_do_not_grow(name: str) -> None:
    model, inputs = build(name)
    treat(model)

    counts = []
    for step in range(12):
        loss_of(model(**inputs)).backward()
        if step in (2, 11):
            tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
            nbytes = sum({id(s := t.untyped_storage()): s.nbytes() for t in tensors}.values())
            counts.append((len(handles()), nbytes))
    assert counts[0] == counts[1]
    assert counts[0][0] == 0


def test_forward_without_backward_leaves_nothing() -> None:
    model, inputs = build("llama")
    treat(model)
    output = model(**inputs)
    del output
    assert handles() == []


def test_chain_of_modules_is_recomputed() -> None:
    plain, treated = pair(
        lambda m, x: m.conv(m.act(m.norm(x))), norm=nn.GroupNorm(2, 4), act=nn.SiLU(), conv=nn.Conv2d(4, 4, 3)
    )
    check_same(plain, treated, torch.randn(2, 4, 6, 6))


def test_long_chain_is_split() -> None:
    layers = {f"l{i}": nn.SiLU() for i in range(200)}

    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        for name in layers:
            x = getattr(m, name)(x)
        return x

    plain, treated = pair(body, **layers)
    check_same(plain, treated, torch.randn(3, 5))
    running = Pass(False)
    x = torch.randn(2, requires_grad=True)
    for _ in range(MAX_CHAIN + 5):
        x = running.run(treated.l0.forward, (x,), {})
    claim = claim_on(x)
    assert claim is not None
    assert claim.run.depth == (MAX_CHAIN + 4) % (MAX_CHAIN + 1)


def test_new_storage_at_a_freed_address_is_not_taken_for_the_old_one() -> None:
    """Memory of freed storages is used again, so an address does not identify a storage (DoRA frees such)."""
    running, held = Pass(True), torch.randn(3)
    for _ in range(50):
        running.pack(torch.randn(3))
        assert not running.is_free(torch.randn(3))
    running.pack(held)
    assert running.is_free(held.view(3, 1))
    assert not Pass(True).is_free(held)


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h.add_(1),
        lambda h: h.view(-1)[:3].mul_(2),
        lambda h: torch.sigmoid_(h),
        lambda h: F.relu(h, inplace=True),
        lambda h: h.detach().copy_(torch.zeros_like(h)),
    ],
    ids=["add", "view", "saved result", "relu", "detached"],
)
def test_output_changed_in_place_is_kept(edit: Any) -> None:
    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = m.norm(m.first(x))
        edit(h)
        return m.last(h)

    plain, treated = pair(body, first=nn.Linear(8, 8), norm=nn.RMSNorm(8), last=nn.Linear(8, 8))
    check_same(plain, treated, torch.randn(4, 8))


def test_output_changed_after_saving_is_recomputed() -> None:
    """Plain autograd raises here, because it saved the changed tensor; a recomputed one has the correct values."""

    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = m.norm(x)
        y = m.last(h)
        h.zero_()
        return y

    plain, treated = pair(body, norm=nn.LayerNorm(8), last=nn.Linear(8, 8))
    reference = Model(lambda m, x: m.last(m.norm(x)), norm=plain.norm, last=plain.last)
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="inplace"):
        plain(x).sum().backward()
    check_same(reference, treated, x)


def test_input_changed_after_saving_is_an_error() -> None:
    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        y = m.last(m.act(h))
        h.add_(1)
        return y

    _, treated = pair(body, first=nn.Linear(8, 8), act=nn.SiLU(), last=nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match="inplace"):
        treated(torch.randn(4, 8)).sum().backward()


def test_kept_tensor_changed_is_an_error() -> None:
    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = m.first(m.norm(x))
        y = m.last(h)
        h.add_(1)
        return y

    _, treated = pair(body, norm=nn.LayerNorm(8), first=nn.Linear(8, 8), last=nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match="inplace"):
        treated(torch.randn(4, 8)).sum().backward()


def test_parameter_changed_is_an_error() -> None:
    _, treated = pair(lambda m, x: m.last(m.norm(x)), norm=nn.LayerNorm(8), last=nn.Linear(8, 8))
    loss = treated(torch.randn(4, 8)).sum()
    with torch.no_grad():
        treated.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
        loss.backward()


def test_inplace_activation_after_norm() -> None:
    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        return m.conv2(m.act(m.norm(m.conv1(x))))

    plain, treated = pair(
        body, conv1=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), act=nn.ReLU(inplace=True), conv2=nn.Conv2d(4, 2, 3)
    )
    check_same(plain, treated, torch.randn(2, 3, 8, 8))
    assert plain.norm.running_mean.equal(treated.norm.running_mean)
    assert plain.norm.num_batches_tracked == treated.norm.num_batches_tracked == 1


def test_reused_addresses_do_not_confuse_tensors() -> None:
    """Many outputs are freed and others take their addresses."""

    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = m.mix(m.norm(x)).tanh() + m.mix(x * 2)
        return x

    plain, treated = pair(body, norm=nn.LayerNorm(8), mix=nn.Linear(8, 8))
    check_same(plain, treated, torch.randn(4, 8))


def test_aliases_of_inputs() -> None:
    plain, treated = pair(
        lambda m, x: m.last(m.drop(m.same(m.norm(m.first(x))))) + m.other(m.drop(x)),
        first=nn.Linear(8, 8), norm=nn.LayerNorm(8), same=nn.Identity(), drop=nn.Dropout(0.0), last=nn.Linear(8, 8),
        other=nn.Linear(8, 8),
    )  # fmt: skip
    check_same(plain, treated, torch.randn(4, 8))


def test_shared_module_and_frozen_parameters() -> None:
    norm = nn.LayerNorm(8).requires_grad_(False)
    plain, treated = pair(
        lambda m, x: m.last(m.norm(m.frozen(m.norm(x.detach())))), norm=norm,
        frozen=nn.Linear(8, 8).requires_grad_(False), last=nn.Linear(8, 8),
    )  # fmt: skip
    for model in (plain, treated):
        model(torch.ones(4, 8)).sum().backward()
    assert gradients(plain).keys() == gradients(treated).keys() == {"last.weight", "last.bias"}
    assert all(gradients(plain)[k].equal(gradients(treated)[k]) for k in gradients(plain))


def test_dropout_repeats_its_mask_and_leaves_the_generator() -> None:
    plain, treated = pair(
        lambda m, x: m.last(m.drop(m.norm(x))), norm=nn.LayerNorm(64), drop=nn.Dropout(0.5), last=nn.Linear(64, 8)
    )
    x = torch.randn(4, 64)
    check_same(plain, treated, x)
    torch.manual_seed(2)
    loss = treated(x).sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.get_rng_state().equal(before)


def test_recomputation_uses_the_mode_of_the_first_run() -> None:
    _, treated = pair(
        lambda m, x: m.last(m.drop(m.norm(x))), norm=nn.LayerNorm(8), drop=nn.Dropout(0.5), last=nn.Linear(8, 8)
    )
    results = []
    for evaluate in (False, True):
        treated.train().zero_grad()
        torch.manual_seed(1)
        loss = treated(torch.ones(4, 8)).square().sum()
        treated.train(not evaluate)
        loss.backward()
        results.append(treated.last.weight.grad.clone())
    assert results[0].equal(results[1])


@pytest.mark.parametrize("training", [True, False])
def test_parameters_and_buffers_of_a_functional_call_are_used(training: bool) -> None:
    """They are no longer in the model when backward recomputes; BatchNorm reads its own buffers."""
    plain, treated = pair(
        lambda m, x: m.last(m.bn(m.norm(m.first(x)))),
        first=nn.Linear(8, 8), norm=nn.LayerNorm(8), bn=nn.BatchNorm1d(8), last=nn.Linear(8, 8),
    )  # fmt: skip
    results = []
    for model in (plain.train(training), treated.train(training)):
        own = copy.deepcopy(model.state_dict())
        others = {name: (p.detach() + 0.5).requires_grad_() for name, p in model.named_parameters()}
        others |= {name: b + 1 for name, b in model.named_buffers()}
        torch.func.functional_call(model, others, (torch.randn(4, 8, generator=_seeded()),)).square().sum().backward()
        assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
        results.append([value.grad if value.requires_grad else value for value in others.values()])
    for a, b in zip(*results, strict=True):
        assert a.equal(b)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_modules_under_no_grad_inside_a_step() -> None:
    """A model may run its frozen first part under no_grad (Xcodec2); the reader of its norm's output saves it."""

    def body(m: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = m.act(m.norm(m.first(x)))
        return m.last(h) * m.mix(h)

    plain, treated = pair(
        body, first=nn.Linear(8, 8), norm=nn.LayerNorm(8), act=nn.SiLU(), last=nn.Linear(8, 8), mix=nn.Linear(8, 8)
    )
    x = torch.randn(4, 8)
    for model in (plain, treated):
        model(x).square().sum().backward()
    assert gradients(plain).keys() == {"last.weight", "last.bias", "mix.weight", "mix.bias"}
    assert all(g.equal(gradients(treated)[name]) for name, g in gradients(plain).items())


COMPLEX = {
    "norm's output": lambda h: (z := as_complex(h)) * z,
    "conjugated": lambda h: (z := as_complex(h)) * z.conj() * z,
    "conjugated by a matmul": lambda h: as_complex(h).conj() @ as_complex(h).T,
    "negated": lambda h: as_complex(h).conj().imag.sin() * as_complex(h),
}


def as_complex(h: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(h.view(4, 4, 2))


@pytest.mark.parametrize("read", COMPLEX.values(), ids=COMPLEX)
def test_output_read_as_complex_numbers(read: Any) -> None:
    """A saved tensor may be a view of the norm's output in another dtype, conjugated or negated."""
    plain, treated = pair(
        lambda m, x: torch.view_as_real(read(m.norm(m.first(x))) + 0j), first=nn.Linear(8, 8), norm=nn.LayerNorm(8)
    )
    check_same(plain, treated, torch.randn(4, 8))


def test_dtensors_are_kept() -> None:
    """A norm with a DTensor output, which cannot be viewed from its storage."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, treated = (
            Model(lambda m, x: m.last(m.norm(x)), norm=nn.LayerNorm(8), last=nn.Linear(8, 8)) for _ in range(2)
        )
        treated.load_state_dict(plain.state_dict())
        mesh = init_device_mesh("cpu", (1,))
        for model in (plain, treated):
            parallelize_module(model, mesh, {"norm": SequenceParallel(sequence_dim=0), "last": ColwiseParallel()})
        treat(treated)
        x = torch.randn(4, 8)
        for autocast in (False, True):
            for model in (plain, treated):
                model.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    output = model(x)
                output.float().square().sum().backward()
            for name, gradient in gradients(plain).items():
                assert gradients(treated)[name].full_tensor().equal(gradient.full_tensor())
    finally:
        dist.destroy_process_group()


def test_retain_graph_and_second_backward() -> None:
    model, inputs = build("llama")
    treat(model)
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    first = {name: g.clone() for name, g in gradients(model).items()}
    model.zero_grad()
    loss.backward()
    assert all(first[name].equal(g) for name, g in gradients(model).items())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def penalty(policy: str) -> dict[str, torch.Tensor]:
    """Returns the gradients of a gradient penalty, which needs a double backward."""
    model, inputs = build("llama")
    apply_policy(model.double(), policy)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        first = torch.autograd.grad(model(**inputs).loss, list(model.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()  # type: ignore[union-attr]
    return gradients(model)


def test_double_backward_is_refused_in_one_line_that_names_policies_which_allow_it() -> None:
    with pytest.raises(UserError, match=r"double backward.*'full', 'head', 'tile' and 'offload' allow it") as error:
        penalty("pointwise")
    assert "\n" not in str(error.value)
    expected = penalty("none")
    for policy in ("full", "head", "tile:2", "offload"):
        for name, gradient in penalty(policy).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_two_graphs_alive_at_once() -> None:
    model, inputs = build("phi3")
    treated = copy.deepcopy(model)
    treat(treated)
    for m in (model, treated):
        losses = [m(**inputs).loss for _ in range(2)]  # two graphs are alive
        for loss in losses:
            loss.backward()
    assert all(g.equal(gradients(treated)[name]) for name, g in gradients(model).items())


def test_autocast_copies_are_recomputed_once() -> None:
    """Three linear layers keep three bf16 copies of a norm's output; under the policy none, and one is recomputed."""
    plain, treated = pair(
        lambda m, x: m.q(h := m.norm(x)) + m.k(h) + m.v(h),
        norm=nn.LayerNorm(8), q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8),
    )  # fmt: skip
    x = torch.randn(4, 8)
    grads = []
    for model in (plain, treated):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        output.float().square().sum().backward()
        grads.append(gradients(model))
    assert all(grads[0][name].equal(grads[1][name]) for name in grads[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = treated(x)
    casts = {h.source for h in handles() if h.source.call.kind == "to"}
    of_weights = {frame for frame in casts if type(frame.args[0].held) is tuple}
    assert (len(casts), len(of_weights)) == (4, 3)
    del output


def test_model_called_twice_under_autocast_sums_gradients_in_fp32() -> None:
    """Plain autocast casts a weight once for both calls and sums its gradients in bf16.

    Under the policy each call casts it, as autocast does without its cache; gradients equal those without the cache.
    """
    plain, treated = pair(lambda m, x: m.last(m.norm(x)), norm=nn.LayerNorm(8), last=nn.Linear(8, 8, bias=False))

    def gradient(model: nn.Module, cache: bool) -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            loss = sum(model(torch.randn(4, 8)).float().square().sum() for _ in range(2))
        loss.backward()
        return gradients(model)["last.weight"]

    without_cache = gradient(plain, cache=False)
    assert gradient(treated, cache=True).equal(without_cache)
    assert 0 < (gradient(plain, cache=True) - without_cache).abs().max() < 2**-8 * without_cache.abs().max()


def test_autocast_in_backward_only() -> None:
    """Recomputation uses the autocast state of forward, not of backward."""
    model, inputs = build("llama")
    treated = copy.deepcopy(model)
    treat(treated)
    for m in (model, treated):
        loss = m(**inputs).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
    assert all(g.equal(gradients(treated)[name]) for name, g in gradients(model).items())


def test_no_handles_without_gradients() -> None:
    gc.collect()  # gradients with a graph, of an earlier test, are cycles
    model, inputs = build("llama")
    reference = model.eval().generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    treat(model)
    assert model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False).equal(reference)
    with torch.no_grad():
        output = model(**inputs)
    assert handles() == []
    assert output.loss.grad_fn is None


def test_pickled_model_and_signature_of_forward() -> None:
    model, inputs = build("llama")
    names = list(inspect.signature(model.forward).parameters)
    treat(model)
    assert list(inspect.signature(model.forward).parameters) == names
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.forward.module is loaded
    losses = [m(**inputs).loss for m in (model, loaded)]
    assert losses[0].equal(losses[1])


def test_compile_runs_the_plain_model_with_a_warning() -> None:
    model, inputs = build("llama")
    model(**inputs).loss.backward()
    plain = {name: g.clone() for name, g in gradients(model).items()}
    model.zero_grad()
    treat(model)
    standin._warned.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(**inputs).loss.backward()
    assert sum("'pointwise' does nothing under torch.compile" in str(w.message) for w in caught) == 1
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, 2 * plain[name], rtol=1e-4, atol=1e-6)


def test_pointwise_under_save_on_cpu() -> None:
    """Tensors that `pointwise` keeps are passed to the enclosing saved-tensor hooks."""
    model, inputs = build("llama")
    treated = copy.deepcopy(model)
    treat(treated)
    for m in (model, treated):
        with torch.autograd.graph.save_on_cpu():
            m(**inputs).loss.backward()
    assert all(g.equal(gradients(treated)[name]) for name, g in gradients(model).items())


def test_pointwise_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Model(
            lambda m, x: m.last(m.drop(m.norm(m.first(x)))),
            first=nn.Linear(8, 8), norm=nn.LayerNorm(8), drop=nn.Dropout(0.1), last=nn.Linear(8, 8),
        )  # fmt: skip
        treat(model)
        model(torch.randn(4, 8)).sum().backward()
    assert gradients(model).keys() == {name for name, _ in model.named_parameters()}


def test_model_without_cheap_modules_is_refused() -> None:
    with pytest.raises(UserError, match="has no norm, activation, gated MLP or dropout"):
        treat(nn.Sequential(nn.Linear(4, 4)))


def test_treated_modules_are_described() -> None:
    model, _ = build("llama")
    rows = {row.module: (row.count, row.dropped, row.kept) for row in treat(model).rows}
    assert rows == {
        "LlamaMLP": (2, "gated product", "gate and up projections"),
        "LlamaRMSNorm": (5, "output", "input"),
        "SiLUActivation": (2, "output", "input"),
    }


@pytest.mark.parametrize(("name", "treated"), [("qwen3", True), ("llama", False)])
def test_rotated_queries_and_keys_are_dropped_after_a_norm(name: str, treated: bool) -> None:
    """They are dropped only if the unrotated ones are recomputed anyway."""
    model, inputs = build(name)
    rows = [row for row in treat(model).rows if row.dropped == "rotated queries and keys"]
    assert [row.count for row in rows] == ([2] if treated else [])
    output = model(**inputs)
    rotations = {h.source for h in handles() if str(h.source.call) == "apply_rotary_pos_emb"}
    assert len(rotations) == (2 if treated else 0)
    del output
