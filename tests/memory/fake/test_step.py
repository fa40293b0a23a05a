"""A traced step equals the real step: same allocations in the same order. Tracing changes nothing of the user's."""

from __future__ import annotations

import functools
import gc
import random
import signal
import sys
from collections.abc import Callable
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.two_tensor import TwoTensor
from trace_models import MODELS, adamw, language_model, real_trace, step_events, training_step
from versions import is_older

from ckpt_ft.checkpointing import rng
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.export.memory_viz import snapshot
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import MIB

POLICIES = ["none", "full", "every:2", "segments:2", "save:attention+matmul", "pointwise"]


@pytest.mark.filterwarnings("ignore:policy 'save.attention:UserWarning")  # a ResNet has no attention to save
@pytest.mark.parametrize(
    ("name", "policy", "autocast"),
    [  # Each policy runs in one of the two precisions for the models that take longest.
        pytest.param(name, policy, autocast, marks=pytest.mark.slow if name == "unet" and (i + autocast) % 2 else ())
        for name in MODELS
        for i, policy in enumerate(POLICIES)
        for autocast in (False, True)
    ],
)
def test_fake_step_equals_the_real_step(name: str, policy: str, autocast: bool) -> None:
    model, loss = MODELS[name]()
    if policy != "none":
        apply_policy(model, policy)
    step = training_step(loss, autocast)
    fake = trace_step(model, step, make_optimizer=adamw, device="cpu")
    real = real_trace(model, step)
    assert step_events(fake) == step_events(real)
    assert (fake.peak_allocated, fake.at_peak) == (real.peak_allocated, real.at_peak)
    assert [op.name for op in fake.ops if op.at > fake.start] == [op.name for op in real.ops if op.at > real.start]


class Pair(NamedTuple):
    """A named tuple of tensors in a module's attribute."""

    cosines: torch.Tensor
    sines: torch.Tensor


def test_trace_does_not_change_the_model_or_the_random_state() -> None:
    model, loss = language_model(tie_word_embeddings=True)
    model.model.norm.weight.requires_grad_(False)
    model.note, model.notes, model.pair = torch.ones(2), [torch.zeros(1)], Pair(torch.ones(1), torch.ones(1))
    before = {id(p): (p, p.clone(), p.requires_grad) for p in model.parameters()}
    attributes = model.note, model.notes, model.notes[0], model.pair
    drawn = rng.snapshot(host=True)

    def step(model: nn.Module, optimizer: Any) -> None:
        random.random(), numpy.random.rand(), torch.rand(1)  # as a mask, LayerDrop or an augmentation draws
        training_step(loss)(model, optimizer)

    trace_step(model, step, make_optimizer=adamw)
    assert {id(p) for p in model.parameters()} == set(before)
    assert all(
        torch.equal(p, copy) and p.grad is None and p.requires_grad == grad for p, copy, grad in before.values()
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(a is b for a, b in zip((model.note, model.notes, model.notes[0], model.pair), attributes, strict=True))
    assert rng.snapshot(host=True) == drawn
    loss(model).backward()


class KeepsTensors(nn.Module):
    """A layer whose forward stores tensors in an attribute, a dict and a list, as position caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.indices = {"default": torch.arange(4)}
        self.positions: torch.Tensor | None = None
        self.by_length: dict[int, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.positions is None:
            self.positions = torch.arange(4.0)
        self.indices["default"] = self.indices["default"].to(x.device)
        self.by_length.setdefault(len(x), torch.ones(4))
        self.seen.append(x + 1)
        return self.linear(x)[:, self.indices["default"]] * self.positions + self.by_length[len(x)]


def test_no_fake_tensor_stays_in_the_model() -> None:
    model, x = KeepsTensors(), torch.ones(2, 4)
    indices, held = model.indices, model.indices["default"]

    def step(model: nn.Module, optimizer: object) -> None:
        model(x).sum().backward()

    fake = trace_step(model, step, device="cpu")
    assert model.indices is indices
    assert model.indices == {"default": held}
    assert (model.positions, model.by_length, model.seen) == (None, {}, [])
    real = real_trace(model, step)
    assert fake.peak_allocated == real.peak_allocated


def test_error_in_the_step_restores_the_model() -> None:
    model = nn.Linear(2, 2)

    def step(model: nn.Module, optimizer: object) -> None:
        model(torch.ones(1, 2)).sum().backward()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        trace_step(model, step)
    assert type(model.weight) is nn.Parameter
    assert model.weight.grad is None
    assert model(torch.ones(1, 2)).device.type == "cpu"
    assert torch.nn.functional.dropout(torch.ones(4), 1.0).sum() == 0  # the CPU's own kernels are active again


def test_tied_half_precision_model_on_meta_is_traced() -> None:
    with torch.device("meta"):
        model, _ = language_model(tie_word_embeddings=True)
    model.half()
    batch = torch.zeros(2, 64, dtype=torch.long)
    trace = trace_step(model, lambda model, _: model(input_ids=batch, labels=batch).loss.backward(), device="cpu")
    real, _ = language_model(tie_word_embeddings=True)
    assert trace.at_peak["parameters"] == sum(p.numel() for p in real.parameters()) * 2
    assert all(p.device.type == "meta" for p in model.parameters())


def test_tensor_subclass_has_the_bytes_of_its_inner_tensors() -> None:
    """A weight of two tensors has the bytes and operators of both, as in the real step."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    pair = TwoTensor(torch.randn(64, 64), torch.randn(64, 64))
    model[0].weight = nn.Parameter(pair, requires_grad=False)
    weight, held, inputs = model[0].weight, model[0].weight.a, torch.randn(8, 64)

    def step(model: nn.Module, _: object) -> None:
        model(inputs).sum().backward()
        model.zero_grad()

    fake, real = trace_step(model, step, device="cpu"), real_trace(model, step)
    assert fake.at_peak["parameters"] == 3 * 64 * 64 * 4
    assert (fake.peaks, fake.at_peak) == (real.peaks, real.at_peak)
    assert model[0].weight is weight
    assert weight.a is held


def test_tensor_in_the_steps_closure_counts_once() -> None:
    images = torch.zeros(4, 3, 64, 64)
    model = nn.Conv2d(3, 4, 3)

    def step(model: nn.Module, optimizer: object) -> None:
        model(images.to("cuda")[:2]).sum().backward()

    trace = trace_step(model, step, device="t4")
    resident = [storage for storage, _ in trace.live_at(trace.start - 1) if storage.nbytes == images.nbytes]
    assert len(resident) == 1


def test_second_model_gets_no_fake_gradient() -> None:
    critic = nn.Linear(8, 1)
    trace_step(nn.Linear(4, 8), lambda model, _: critic(model(torch.ones(2, 4))).sum().backward())
    assert critic.weight.grad is None


def optimizers() -> dict[str, object]:
    return {
        "adamw": lambda model: torch.optim.AdamW(model.parameters()),
        "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        "for-loop": lambda model: torch.optim.AdamW(model.parameters(), foreach=False),
        "sgd": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
        "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    }


@pytest.mark.parametrize(
    ("name", "states"), [("adamw", 2), ("fused", 2), ("for-loop", 2), ("sgd", 1), ("adafactor", 0.04)]
)
def test_bytes_of_optimizer_states(name: str, states: float) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    nbytes = model.weight.nbytes

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = trace_step(model, step, make_optimizer=optimizers()[name], device="t4")
    assert trace.live_at(len(trace.events) - 1)
    state = sum(held for storage, held in trace.live_at(len(trace.events) - 1) if storage.category == "optimizer")
    assert state == pytest.approx(states * nbytes, rel=0.01, abs=0.05 * nbytes)
    # foreach allocates a temporary tensor as large as all parameters, fused none
    temporary = trace.peaks["optimizer"] - trace.replay.allocated[-1] - nbytes
    assert (temporary >= nbytes) == (name in ("adamw", "for-loop", "adafactor"))


def test_amp_with_a_scaler_accumulation_and_clipping() -> None:
    model, loss = language_model()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            with torch.autocast("cuda"):
                value = loss(model)
            scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        assert value.item() == 1.0

    trace = trace_step(model, step, make_optimizer=adamw, device="t4")
    names = {op.name for op in trace.ops}
    assert {"aten._amp_foreach_non_finite_check_and_unscale_.default", "aten._foreach_sqrt.default"} <= names
    weights = [
        op
        for op in trace.ops
        if op.name == "aten._to_copy.default" and op.module.endswith("q_proj") and op.phase == "forward"
    ]
    # steps x micro-batches x layers, for weights and inputs, each cast once
    assert len(weights) == 2 * 2 * 3 + 2 * 2 * 3
    assert any(".item()" in note for note in trace.notes)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_see_equal_numbers_of_tokens(experts: str) -> None:
    model, loss = language_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation(experts)
    trace = trace_step(model, lambda model, _: loss(model).backward())
    matmuls = ("aten.mm.default", "aten._grouped_mm.default")
    flops = sum(
        op.flops
        for op in trace.ops
        if op.module.endswith("mlp.experts") and op.phase == "forward" and op.name in matmuls
    )
    if experts == "eager":
        tokens, top_k, layers, steps = 128, 2, 3, 2
        assert flops == steps * layers * tokens * top_k * 2 * 64 * 128 * 3
        assert "indices fall evenly on their classes: experts see equal numbers of tokens" in trace.notes


def test_masks_with_unknown_values_are_assumed_full() -> None:
    def step(model: nn.Module, optimizer: object) -> None:
        x = model(torch.ones(8, 4))
        assert x[x > 0].shape == (32,)
        assert (x > 0).nonzero().shape == (32, 2)
        assert torch.masked_select(x, x > 0).shape == (32,)

    assert trace_step(nn.Linear(4, 4), step).notes == [
        "a mask whose size decides a shape is taken as full: the worst case"
    ]


def test_user_defined_gpu_and_unknown_gpu_name() -> None:
    t4 = find_gpu("t4")
    model, loss = language_model()
    own = trace_step(
        model, training_step(loss), make_optimizer=adamw, device=type(t4)(**{**t4.__dict__, "name": "mine"})
    )
    named = trace_step(model, training_step(loss), make_optimizer=adamw, device="t4")
    assert own.device == "mine"
    assert (own.peak_allocated, own.peak_reserved, own.seconds) == (
        named.peak_allocated,
        named.peak_reserved,
        named.seconds,
    )
    with pytest.raises(UserError, match="t4"):
        trace_step(model, training_step(loss), device="t44")


@pytest.mark.skipif(is_older("torch", "2.13"), reason="torch 2.11 adds no fake gradient to one on meta")
def test_input_on_meta_may_require_a_gradient() -> None:
    given = nn.Parameter(torch.empty(8, 4, device="meta"))

    def step(model: nn.Module, optimizer: Any) -> None:
        model(given).sum().backward()

    trace = trace_step(nn.Identity(), step, device="cpu")
    assert trace.peak_allocated == 2 * 8 * 4 * 4 + 4 + 4  # the input and its gradient, the sum and its gradient
    assert given.grad is None


def test_step_that_empties_the_cache_reserves_segments_again() -> None:
    """The step has 4 MiB weights and gradients, then allocates 30 MiB; the cache before that is released or stays."""

    def step(empties: bool) -> Callable[[nn.Module, object], None]:
        def stepped(model: nn.Module, optimizer: object) -> None:
            model(torch.zeros(64, 1024)).sum().backward()
            model.zero_grad()
            if empties:
                torch.cuda.empty_cache()
            torch.zeros(30 * MIB // 4)

        return stepped

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    kept, emptied = (trace_step(model, step(empties)) for empties in (False, True))
    assert (kept.peak_reserved, emptied.peak_reserved) == (134 * MIB, 104 * MIB)
    assert kept.peak_allocated == emptied.peak_allocated
    assert not kept.emptied
    assert len(emptied.emptied) == 2
    assert StepTrace.from_json(emptied.to_json()).peak_reserved == emptied.peak_reserved
    actions = [entry["action"] for entry in snapshot(emptied)["device_traces"][0]]
    assert (actions.count("segment_free"), actions.count("segment_alloc")) == (2, 2)


def test_traces_are_deterministic() -> None:
    model, loss = language_model()
    traces = [trace_step(model, training_step(loss, autocast), make_optimizer=adamw) for autocast in (False, False)]
    assert traces[0].to_json() == traces[1].to_json()


def test_trace_uses_the_current_default_dtype() -> None:
    """Operators without a dtype use the default one, so cached results are not used under another default."""

    def step(model: nn.Module, optimizer: object) -> None:
        model(torch.ones(1, 4)).sum().backward()
        torch.ones(1000) + torch.arange(1000) / 2

    def nbytes() -> int:
        model = nn.Linear(4, 4)
        return max(s.nbytes for s in trace_step(model, step, device="cpu").storages if s.op == "aten.ones.default")

    before = nbytes()
    torch.set_default_dtype(torch.float64)
    try:
        assert (before, nbytes()) == (4000, 8000)
    finally:
        torch.set_default_dtype(torch.float32)


def test_torch_equal_is_assumed_true_with_a_note() -> None:
    def step(model: nn.Module, optimizer: object) -> None:
        assert torch.equal(torch.rand(3), torch.rand(3))
        assert not torch.equal(torch.rand(3), torch.rand(4))

    assert trace_step(nn.Linear(2, 2), step).notes == ["torch.equal() is taken to find tensors of one shape equal"]


def test_threads_that_trace_one_model_wait_for_each_other() -> None:
    model, loss = language_model()
    alone = trace_step(model, training_step(loss), make_optimizer=adamw).to_json()
    traces: list[StepTrace] = []

    def trace() -> None:
        traces.append(trace_step(model, training_step(loss), make_optimizer=adamw))

    threads = [Thread(target=trace) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [trace.to_json() for trace in traces] == [alone] * 3
    assert_everything_is_restored(model)


def test_training_in_another_thread_is_not_recorded() -> None:
    """The other thread's modules and optimizers are not hooked, and its GradScaler still finds infinities."""
    model, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    scaler_step = torch.amp.GradScaler._maybe_opt_step

    def train() -> None:
        assert torch.amp.GradScaler._maybe_opt_step is scaler_step
        optimizer = torch.optim.SGD(other.parameters())
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    def step(model: nn.Module, optimizer: object, in_thread: bool = True) -> None:
        if in_thread:
            thread = Thread(target=train)
            thread.start()
            thread.join()
        model(torch.ones(2, 4)).sum().backward()

    def observed(trace: StepTrace) -> list[Any]:
        return [step_events(trace), [name for _, name in trace.marks]]

    assert observed(trace_step(model, step)) == observed(
        trace_step(model, lambda model, _: step(model, _, in_thread=False))
    )


@pytest.mark.parametrize(
    "where",
    [
        ("find_torch_dispatch_rule", 40),  # PyTorch's C++ code aborts the process if an exception leaves this function
        ("_freed", 40),  # exceptions in a weak reference's callback are lost
        ("faked_model", 1),
        ("like", 3),
        ("behave_like", 1),
        ("_note_node", 60),
        ("__exit__", 3),
        ("forget_real_tensors", 1),
        ("_del_library", 1),
    ],
    ids=lambda where: where[0],
)
def test_ctrl_c_at_any_moment_restores_everything(where: tuple[str, int]) -> None:
    model, loss = language_model()
    name, left = where

    def watch(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_name == name:
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            trace_step(model, training_step(loss), make_optimizer=adamw)
    finally:
        sys.setprofile(previous)
    assert_everything_is_restored(model)


def test_second_ctrl_c_does_not_wait_for_an_operator() -> None:
    model = nn.Linear(2, 2)
    seen: list[int] = []

    def step(model: nn.Module, optimizer: object) -> None:
        for i in range(3):
            signal.raise_signal(signal.SIGINT)
            seen.append(i)

    with pytest.raises(KeyboardInterrupt):
        trace_step(model, step)
    assert seen == [0]
    assert_everything_is_restored(model)


MAKE_TENSOR = torch.tensor


def assert_everything_is_restored(model: nn.Module) -> None:
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(p.grad is None for p in model.parameters())
    assert torch.tensor is MAKE_TENSOR
    assert type(torch.ones(1)) is torch.Tensor
    assert torch.nn.functional.dropout(torch.ones(4), 1.0).sum() == 0  # the CPU's own kernel
    assert not torch.nn.modules.module._global_forward_hooks
    assert gc.isenabled()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class CachesPositions(nn.Module):
    """Creates a tensor once per requested size and caches it, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    @functools.cache  # noqa: B019  its own kind of leak
    def places(self, rows: int) -> torch.Tensor:
        return torch.arange(float(rows * 64)).view(rows, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x + self.places(len(x)))


def test_cached_method_results_of_a_trace_are_separate() -> None:
    """A trace counts the cached tensor before and after a real call, and leaves no fake tensor in the cache."""
    model, step = CachesPositions(), lambda model, optimizer: model(torch.zeros(256, 64)).sum().backward()
    before = trace_step(model, step, device="cpu").peak_allocated
    assert not isinstance(model.places(256), FakeTensor)
    assert trace_step(model, step, device="cpu").peak_allocated == before
    assert model(torch.zeros(256, 64)).shape == (256, 64)


@pytest.mark.parametrize("when", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_traced(when: str) -> None:
    """Users' hooks project gradients or step an optimizer in backward."""
    model, loss = language_model()

    def project(grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean(0) @ torch.ones(grad.shape[1:])

    def descend(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    def step(model: nn.Module, optimizer: object) -> None:
        loss(model).backward()
        for parameter in model.parameters():
            parameter.grad = None

    plain = trace_step(model, step, device="cpu")
    for parameter in model.parameters():
        if parameter.dim() == 2:
            getattr(parameter, when)(project if when == "register_hook" else descend)
    fake, real = trace_step(model, step, device="cpu"), real_trace(model, step)
    assert step_events(fake) == step_events(real)
    assert len(fake.ops) > len(plain.ops)


def test_objects_frozen_by_gc_freeze_stay_frozen() -> None:
    """`gc.freeze()` before a fork keeps memory pages shared, so a trace must not unfreeze objects."""
    model = torch.nn.Linear(4, 4)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 4)).sum().backward()

    gc.unfreeze()
    try:
        trace_step(model, step, device="cpu")
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    frozen = gc.get_freeze_count()
    trace_step(model, step, device="cpu")
    assert 0 < gc.get_freeze_count() <= frozen
