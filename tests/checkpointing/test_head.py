"""The policy `head`: loss and gradients equal those of complete logits, and at most one chunk of logits exists."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import LANGUAGE, build, gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_ft.checkpointing import deferred_logits, head, standin
from ckpt_ft.checkpointing.pointwise import install as pointwise
from ckpt_ft.errors import UserError, WorkFailed

VOCABULARY = 99
ROWS = 5  # rows of logits per chunk: 24 tokens are five chunks, of which the last is shorter


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", ROWS * VOCABULARY * 4)


class LargestLogits(TorchDispatchMode):
    """The largest number of rows of a result whose last dimension is the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            weight = (32, VOCABULARY)  # a view of the output layer's weight, or its gradient
            if isinstance(value, torch.Tensor) and value.shape[-1:] == (VOCABULARY,) != value.shape != weight:
                self.rows = max(self.rows, value.numel() // VOCABULARY)
        return out


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    model.zero_grad()
    torch.manual_seed(3)
    output = model(**inputs)
    output.loss.backward()
    return output.loss.detach(), gradients(model), output


def check_same(plain: nn.Module, treated: nn.Module, inputs: dict[str, Any]) -> None:
    """Asserts that loss and gradients differ by at most 1e-6 of a tensor's norm."""
    loss, grads, _ = step(plain, inputs)
    ours, our_grads, output = step(treated, inputs)
    assert isinstance(output.logits, head.NoLogits)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert grads.keys() == our_grads.keys()
    scale = max(g.norm() for g in grads.values())
    for name, grad in grads.items():
        assert (our_grads[name] - grad).norm() <= 1e-6 * max(grad.norm(), 1e-3 * scale), name


@pytest.mark.parametrize("name", LANGUAGE)
def test_head_of_every_architecture(name: str) -> None:
    """With soft-capping (Gemma-2), scaling (Cohere, Granite), a bias (BART) and tied weights, without a warning."""
    model, inputs = build(name)
    treated = copy.deepcopy(model)
    head.install(treated)
    check_same(model, treated, inputs)


@pytest.mark.parametrize("together", [False, True])
def test_at_most_one_chunk_of_logits_exists(together: bool) -> None:
    model, inputs = build("llama")
    head.install(model)
    if together:
        pointwise.install(model, {"": model})
    with LargestLogits() as largest:
        step(model, inputs)
    assert largest.rows == ROWS


def test_options_of_the_models_loss() -> None:
    model, inputs = build("llama")
    treated = copy.deepcopy(model)
    head.install(treated)
    check_same(model, treated, {**inputs, "num_items_in_batch": 17})
    check_same(model, treated, {**inputs, "num_items_in_batch": torch.tensor(11)})
    shifted = {**inputs, "shift_labels": inputs["labels"].roll(-1, dims=1)}
    check_same(model, treated, shifted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.rand(7)}, {"ignore_index": 2}])
def test_options_of_cross_entropy(reduction: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", 3 * 7 * 4)
    layer = nn.Linear(4, 7)
    targets = torch.randint(0, 7, (10,))
    targets[3] = options.get("ignore_index", -100)
    results = []
    for deferred in (False, True):
        hidden = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        values = head.OutputLayer(layer).defer(hidden) if deferred else layer(hidden)
        values = (values / 3.0).tanh() * 3.0
        if deferred and reduction == "none":
            with pytest.warns(UserWarning, match="computed whole"):
                loss = F.cross_entropy(values, targets, reduction=reduction, **options)
        else:
            loss = F.cross_entropy(values.float(), targets, reduction=reduction, **options)
        loss.sum().backward()
        results.append((loss.detach(), hidden.grad))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
def test_head_with_adapters(targets: Any) -> None:
    """A frozen output layer, and one with LoRA and dropout, whose chunks draw equal masks in both runs."""
    from peft import LoraConfig, get_peft_model

    base, inputs = build("llama")
    dropout = 0.0 if targets == "all-linear" else 0.1
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM"))
    treated = copy.deepcopy(model)
    head.install(treated)
    if not dropout:
        check_same(model, treated, inputs)
        return
    # Chunks draw other masks than complete logits, so the reference is the chunked loss without recomputation.
    loss, grads, _ = step(treated, inputs)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(head.OutputLayer, "run_chunks", lambda self, term, function, pieces: [function(*p) for p in pieces])
    reference_loss, reference_grads, _ = step(treated, inputs)
    monkey.undo()
    assert loss.equal(reference_loss)
    assert grads.keys() == reference_grads.keys()
    assert all(grads[name].equal(reference_grads[name]) for name in grads)


def test_head_acts_only_in_training_with_labels() -> None:
    model, inputs = build("llama")
    head.install(model)
    shape = (2, 12, VOCABULARY)
    standin._warned.clear()
    with pytest.warns(UserWarning, match="is called without labels; its logits are computed whole"):
        assert model(input_ids=inputs["input_ids"]).logits.shape == shape
    assert model.eval()(**inputs).logits.shape == shape
    assert model(**inputs).loss.grad_fn is not None
    assert model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False).shape == (2, 15)
    assert isinstance(model.train()(**inputs, return_dict=False)[1], head.NoLogits)


def test_head_under_compile_computes_complete_logits_with_a_warning() -> None:
    model, inputs = build("llama")
    head.install(model)
    compiled = torch.compile(model, backend="eager")
    standin._warned.clear()
    with pytest.warns(UserWarning, match="'head' does nothing under torch.compile"):
        output = compiled(**inputs)
    assert output.logits.shape == (2, 12, VOCABULARY)


@pytest.mark.parametrize("term", ["tile:2", "offload"])
def test_term_that_does_nothing_under_compile_warns(term: str) -> None:
    from ckpt_ft import apply_policy

    model, inputs = build("llama")
    apply_policy(model, term)
    standin._warned.clear()
    with pytest.warns(UserWarning, match=f"'{term.partition(':')[0]}' does nothing under torch.compile"):
        torch.compile(model, backend="eager")(**inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_head_keeps_no_graph_alive() -> None:
    model, inputs = build("llama")
    head.install(model)
    output = model(**inputs)
    graph = weakref.ref(output.loss)
    output.loss.backward()
    del output
    assert graph() is None


def test_deferred_logits_have_the_properties_of_a_tensor() -> None:
    layer = nn.Linear(4, 7)
    hidden = torch.randn(2, 3, 4)
    whole = layer(hidden)
    deferred = head.OutputLayer(layer).defer(hidden)
    assert (deferred.shape, deferred.size(-1), deferred.dim(), deferred.ndim) == (whole.shape, 7, 3, 3)
    assert deferred.device == whole.device
    for change in (
        lambda x: x.view(-1, 7),
        lambda x: x[..., :-1, :].contiguous().reshape((4, 7)),
        lambda x: x[1],
        lambda x: 2 * x - 1 + torch.arange(7.0),
        lambda x: torch.clamp(x, min=0.0).to(torch.float64),
    ):
        changed = change(deferred)
        assert isinstance(changed, deferred_logits.Logits)
        expected = change(whole)
        assert changed.shape == expected.shape
        torch.testing.assert_close(changed.projection.rows(changed.hidden), expected)


@pytest.mark.filterwarnings("ignore:policy 'head'")
def test_operations_without_a_chunked_form_compute_complete_logits() -> None:
    layer = nn.Linear(4, 7)
    hidden = torch.randn(2, 3, 4)
    deferred, whole = head.OutputLayer(layer).defer(hidden), layer(hidden)
    torch.testing.assert_close(deferred.argmax(-1), whole.argmax(-1))
    torch.testing.assert_close(torch.softmax(deferred, dim=-1), whole.softmax(-1))
    torch.testing.assert_close(deferred[..., 2], whole[..., 2])
    assert deferred.dtype == torch.float32
    deferred[..., 0] = 0
    deferred.fill_(2)
    torch.testing.assert_close(deferred[0], torch.full((3, 7), 2.0))


def _hook_doubles(layer: nn.Module) -> Any:
    return layer.register_forward_hook(lambda module, args, out: 2 * out)


def _pre_hook_centers(layer: nn.Module) -> Any:
    return layer.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean((0, 1)),))


def _backward_hook_halves(layer: nn.Module) -> Any:
    return layer.register_full_backward_hook(lambda module, given, got: (0.5 * given[0],))


@pytest.mark.parametrize("add_hook", [_hook_doubles, _pre_hook_centers, _backward_hook_halves])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_the_output_layer_run_once_on_complete_logits(add_hook: Any, before: bool) -> None:
    """A warning says that the logits are computed completely."""
    model, inputs = build("llama")
    treated = copy.deepcopy(model)
    add_hook(model.lm_head)
    if before:
        add_hook(treated.lm_head)
    head.install(treated)
    if not before:
        add_hook(treated.lm_head)
    loss, grads, _ = step(model, inputs)
    standin._warned.clear()
    with pytest.warns(UserWarning, match="logits of Linear, the output layer, are computed whole: it has a hook"):
        ours, our_grads, output = step(treated, inputs)
    assert output.logits.shape == (2, 12, VOCABULARY)
    assert ours.equal(loss)
    assert all(our_grads[name].equal(grad) for name, grad in grads.items())


def _written_behind_a_view(x: Any) -> Any:
    view = x[:, :-1]
    view /= 3
    return x.view(-1, 7)


def _view_of_what_is_written(x: Any) -> Any:
    view = x.view(-1, 7)
    x.mul_(3).tanh_()
    return view


def _written_behind_a_cast(x: Any) -> Any:
    x.float().mul_(3)
    kept = x.float()
    x.mul_(2)
    return kept.view(-1, 7)


def _copied_first(x: Any) -> Any:
    shifted = x[:, 1:].contiguous()
    shifted.mul_(3)
    return torch.cat([shifted.view(-1, 7), x[:, 0]])


def _part_assigned(x: Any) -> Any:
    view = x.reshape(6, 7)
    x[:, :, 2] = -1
    return view


def _written_after_a_plain_view(x: Any) -> Any:
    one = x[..., 2]
    x *= 3
    return x.view(-1, 7) + one.sum()


def _read_without_gradients(x: Any) -> Any:
    with torch.no_grad():
        x.argmax(-1)
    return x.view(-1, 7)


def _product_written(x: Any) -> Any:
    scaled = x * 2
    scaled.add_(1)
    return (x + 0.5).view(-1, 7)


@pytest.mark.filterwarnings("ignore:policy 'head'")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "use",
    [
        _written_behind_a_view,
        _view_of_what_is_written,
        _written_behind_a_cast,
        _copied_first,
        _part_assigned,
        _written_after_a_plain_view,
        _read_without_gradients,
        _product_written,
    ],
)
def test_in_place_writes_reach_logit_views(use: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients equal those of a tensor; an error is raised if a view was read before the write."""
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", 2 * 7 * 4)
    torch.manual_seed(0)
    layer, targets = nn.Linear(4, 7, dtype=dtype), torch.arange(6)
    results = []
    for deferred in (False, True):
        layer.zero_grad()
        hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        x = head.OutputLayer(layer).defer(hidden) if deferred else layer(hidden)
        if deferred and use in (_written_behind_a_cast, _view_of_what_is_written, _part_assigned):
            with pytest.raises(WorkFailed, match="the logits were written to"):
                F.cross_entropy(use(x), targets)
            return
        loss = F.cross_entropy(use(x), targets)
        loss.backward()
        results.append((loss.detach(), hidden.grad, layer.weight.grad))
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=bound, atol=bound * float(plain.abs().max()))


def test_written_input_of_the_output_layer_is_an_error() -> None:
    hidden = torch.randn(2, 3, 4)
    deferred = head.OutputLayer(nn.Linear(4, 7)).defer(hidden)
    hidden.zero_()
    with pytest.raises(WorkFailed, match="output layer's input was written to"):
        F.cross_entropy(deferred.view(-1, 7), torch.arange(6))


def test_chunks_use_the_autocast_of_the_layers_call() -> None:
    """Not that of the loss, which some models compute with autocast off."""
    torch.manual_seed(0)
    layer, hidden, targets = nn.Linear(64, VOCABULARY), torch.randn(8, 64), torch.arange(8)
    results = []
    for call in (layer, head.OutputLayer(layer).defer):
        with torch.autocast("cpu", torch.bfloat16):
            x = call(hidden)
            assert x.dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                results.append(F.cross_entropy(x.float(), targets).item())
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_chunk_gradients_are_summed_in_fp32(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 256 chunks, the weight's gradient has the error of one matmul plus the rounding of each chunk."""
    vocabulary, width, tokens = 64, 32, 4096
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", 4 * vocabulary * 16)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tokens, width, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(vocabulary, width, generator=generator)).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)

    def gradient(dtype: torch.dtype, deferred: bool) -> torch.Tensor:
        layer = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        layer.weight.data.copy_(weight)
        hidden = inputs.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.float32):
            x = head.OutputLayer(layer).defer(hidden) if deferred else layer(hidden)
            F.cross_entropy(x if dtype == torch.float64 else x.float(), targets).backward()
        assert layer.weight.grad.dtype == dtype
        return layer.weight.grad.double()

    exact = gradient(torch.float64, deferred=False)
    dtype = torch.float32 if autocast else torch.bfloat16
    plain, ours = ((gradient(dtype, deferred) - exact).norm() / exact.norm() for deferred in (False, True))
    assert ours < 2**-8
    assert ours < (1.0 if autocast else 1.5) * plain  # under autocast, fp32 weights get the fp32 sum


def test_trace_has_the_fp32_sum() -> None:
    """The sum of the output weight's gradient is allocated at the output layer, once in each of two steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ckpt_ft import apply_policy, trace_step

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCABULARY
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    apply_policy(model, "full,head")

    def step(model: nn.Module, optimizer: Any) -> None:
        ids = torch.zeros(2, 12, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()

    trace = trace_step(model, step, device="a100-80gb")
    sums = [(storage.module, storage.category) for storage in trace.storages if storage.nbytes == 4 * 32 * VOCABULARY]
    assert sums == [("lm_head", "temporary")] * 2
    assert {op.module for op in trace.ops if op.name.startswith("aten.mm") and op.phase == "backward"} >= {"lm_head"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("adapted", [False, True])
def test_head_under_mixed_precision_of_accelerate(when: str, adapted: bool) -> None:
    """accelerate's wrapper converts outputs to fp32; the logits stay in chunks, without a warning."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    model, inputs = build("llama")
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    if when == "before":
        head.install(model)
        prepared = accelerator.prepare(model)
    else:
        prepared = accelerator.prepare(model)
        head.install(prepared)
    with LargestLogits() as largest:
        step(prepared, inputs)
    assert largest.rows == ROWS


def test_reading_the_missing_logits_explains_why() -> None:
    model, inputs = build("llama")
    head.install(model)
    missing = model(**inputs).logits
    assert not hasattr(missing, "dtype")
    for read in (lambda x: x.argmax(-1), lambda x: x[..., -1], lambda x: torch.softmax(x, -1), list):
        with pytest.raises(WorkFailed, match="'head' computes no logits in a training step"):
            read(missing)


def test_head_refuses_a_reward_model() -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    with pytest.raises(UserError, match="LlamaForSequenceClassification has no output layer over a vocabulary"):
        head.install(LlamaForSequenceClassification(config))


@pytest.mark.parametrize("first", ["trl", "head"])
def test_head_does_nothing_with_the_chunked_loss_of_trl(first: str) -> None:
    """`explain()` states the reason, and there is no warning."""
    add_fused_lm_head = getattr(pytest.importorskip("trl.trainer.utils"), "add_fused_lm_head", None)
    if add_fused_lm_head is None:
        pytest.skip("an older TRL")
    model, inputs = build("llama")
    if first == "head":
        head.install(model)
    add_fused_lm_head(model)
    if first == "trl":
        row = head.install(model).rows[0]
        assert row.kept == "TRL's chunked loss is on, which keeps no logits either"
        assert "forward" not in model.lm_head.__dict__
    model(**inputs, fused_lm_head=True).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_head_refuses_models_without_an_output_layer() -> None:
    with pytest.raises(UserError, match="ViTForImageClassification has no output layer over a vocabulary"):
        head.install(build("vit")[0])
    with pytest.raises(UserError, match="it is no transformers model"):
        head.install(nn.Linear(2, 2))


def test_head_is_described_and_removed() -> None:
    model, _ = build("llama")
    installed = head.install(model)
    assert installed.term == "head"
    assert installed.rows == [standin.Treated("LlamaForCausalLM", 1, "logits", "the output layer's input")]
    installed.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_deepspeeds_hooks_in_a_trace_leave_the_loss_in_chunks() -> None:
    from ckpt_ft.checkpointing.deferred_logits import _hooked
    from ckpt_ft.memory.distributed.zero3 import ModuleHooks

    layer = nn.Linear(4, 4)
    ModuleHooks(layer, [], fetcher=object())  # type: ignore[arg-type]
    assert _hooked(layer) == ""
    layer.register_forward_hook(lambda module, args, output: None)
    assert _hooked(layer).startswith("it has a hook (test_deepspeeds_hooks_in_a_trace")


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize(
    "options", [{"size_average": False}, {"reduce": True}, {"size_average": False, "reduce": True}]
)
def test_deprecated_names_of_a_reduction(options: dict[str, bool]) -> None:
    layer, hidden, targets = nn.Linear(4, 7), torch.randn(10, 4), torch.randint(0, 7, (10,))
    with pytest.warns(UserWarning, match="computed whole.* size_average or reduce"):
        ours = F.cross_entropy(head.OutputLayer(layer).defer(hidden), targets, **options)
    assert torch.equal(ours, F.cross_entropy(layer(hidden), targets, **options))


@pytest.mark.parametrize("function", [torch.cat, torch.stack])
def test_logits_in_a_list_are_computed_completely(function: Any) -> None:
    layer, hidden = nn.Linear(4, 7), torch.randn(10, 4)
    logits = head.OutputLayer(layer).defer(hidden)
    with pytest.warns(UserWarning, match="computed whole"):
        together = function([logits, logits])
    whole = layer(hidden)
    assert torch.equal(together, function([whole, whole]))
    chosen = torch.where(hidden[:, :1] > 0, 0.0, logits[:, :])
    assert torch.equal(chosen, torch.where(hidden[:, :1] > 0, 0.0, whole))


def test_output_layer_called_with_a_keyword() -> None:
    model, _ = build("llama")
    treated = copy.deepcopy(model)
    head.install(treated)
    stand_in = treated.lm_head.forward
    with torch.no_grad():
        hidden = torch.randn(2, 3, model.lm_head.in_features)
        assert torch.equal(treated.lm_head(input=hidden), model.lm_head(input=hidden))
    head.local.deferring = True
    try:
        assert isinstance(treated.lm_head(input=hidden), deferred_logits.Logits)
    finally:
        head.local.deferring = False
    assert stand_in.called
