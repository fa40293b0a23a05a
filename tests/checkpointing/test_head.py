"""`head`: the same loss and gradients as with whole logits, and never more than one chunk of them."""

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

from ckpt_ft.checkpointing import chunks, head, logits, standin
from ckpt_ft.checkpointing.pointwise import install as pointwise
from ckpt_ft.errors import UserError, WorkFailed

VOCABULARY = 99
ROWS = 5  # of logits in a chunk here: 24 tokens are five chunks, the last one shorter


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", ROWS * VOCABULARY * 4)


class LargestLogits(TorchDispatchMode):
    """The most rows over the vocabulary that any operator's result has."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            weight = (32, VOCABULARY)  # a view of the output layer's, or its gradient
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
    """Loss and gradients within 1e-6 relative (of a tensor's norm)."""
    loss, grads, _ = step(plain, inputs)
    ours, our_grads, output = step(treated, inputs)
    assert isinstance(output.logits, head.NoLogits)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert grads.keys() == our_grads.keys()
    scale = max(g.norm() for g in grads.values())
    for name, grad in grads.items():
        assert (our_grads[name] - grad).norm() <= 1e-6 * max(grad.norm(), 1e-3 * scale), name


@pytest.mark.parametrize("name", LANGUAGE)
def test_architectures(name: str) -> None:
    """Soft-capping (Gemma-2), scaling (Cohere, Granite), a bias (BART), tied weights, and no warning."""
    model, inputs = build(name)
    treated = copy.deepcopy(model)
    head.install(treated)
    check_same(model, treated, inputs)


@pytest.mark.parametrize("together", [False, True])
def test_one_chunk_at_a_time(together: bool) -> None:
    model, inputs = build("llama")
    head.install(model)
    if together:
        pointwise.install(model, {"": model})
    with LargestLogits() as largest:
        step(model, inputs)
    assert largest.rows == ROWS


def test_options_of_the_loss() -> None:
    model, inputs = build("llama")
    treated = copy.deepcopy(model)
    head.install(treated)
    check_same(model, treated, {**inputs, "num_items_in_batch": 17})
    check_same(model, treated, {**inputs, "num_items_in_batch": torch.tensor(11)})
    shifted = {**inputs, "shift_labels": inputs["labels"].roll(-1, dims=1)}
    check_same(model, treated, shifted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.rand(7)}, {"ignore_index": 2}])
def test_cross_entropy(reduction: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3 * 7 * 4)
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
def test_adapters(targets: Any) -> None:
    """A frozen output layer, and one with LoRA and dropout, whose chunks draw the same mask twice."""
    from peft import LoraConfig, get_peft_model

    base, inputs = build("llama")
    dropout = 0.0 if targets == "all-linear" else 0.1
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM"))
    treated = copy.deepcopy(model)
    head.install(treated)
    if not dropout:
        check_same(model, treated, inputs)
        return
    # chunks draw other masks than the whole: compare with the chunked loss without recomputation
    loss, grads, _ = step(treated, inputs)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(chunks, "checkpoint", lambda function, *args, **kwargs: function(*args))
    again, again_grads, _ = step(treated, inputs)
    monkey.undo()
    assert loss.equal(again)
    assert grads.keys() == again_grads.keys()
    assert all(grads[name].equal(again_grads[name]) for name in grads)


def test_only_in_training_with_labels() -> None:
    model, inputs = build("llama")
    head.install(model)
    shape = (2, 12, VOCABULARY)
    assert model(input_ids=inputs["input_ids"]).logits.shape == shape
    assert model.eval()(**inputs).logits.shape == shape
    assert model(**inputs).loss.grad_fn is not None
    assert model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False).shape == (2, 15)
    assert isinstance(model.train()(**inputs, return_dict=False)[1], head.NoLogits)


def test_compiled_runs_whole_and_says_so() -> None:
    model, inputs = build("llama")
    head.install(model)
    compiled = torch.compile(model, backend="eager")
    standin._said.clear()
    with pytest.warns(UserWarning, match="'head' does nothing under torch.compile"):
        output = compiled(**inputs)
    assert output.logits.shape == (2, 12, VOCABULARY)


def test_nothing_stays_alive() -> None:
    model, inputs = build("llama")
    head.install(model)
    output = model(**inputs)
    graph = weakref.ref(output.loss)
    output.loss.backward()
    del output
    assert graph() is None


def test_logits_stand_for_a_tensor() -> None:
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
        assert isinstance(changed, logits.Logits)
        expected = change(whole)
        assert changed.shape == expected.shape
        torch.testing.assert_close(changed.projection.rows(changed.hidden), expected)
    scaled = head.OutputLayer(layer).defer(hidden)
    scaled.mul_(3)
    torch.testing.assert_close(scaled.projection.rows(hidden), 3 * whole)


@pytest.mark.filterwarnings("ignore:policy 'head'")
def test_what_has_no_chunked_form() -> None:
    layer = nn.Linear(4, 7)
    hidden = torch.randn(2, 3, 4)
    deferred, whole = head.OutputLayer(layer).defer(hidden), layer(hidden)
    torch.testing.assert_close(deferred.argmax(-1), whole.argmax(-1))
    torch.testing.assert_close(torch.softmax(deferred, dim=-1), whole.softmax(-1))
    torch.testing.assert_close(deferred[..., 2], whole[..., 2])
    assert deferred.dtype == torch.float32
    with pytest.raises(WorkFailed, match="assignment"):
        deferred[..., 0] = 0
    with pytest.raises(WorkFailed, match="fill_"):
        deferred.fill_(0)


def test_what_cannot_be_treated() -> None:
    with pytest.raises(UserError, match="ViTForImageClassification has no output layer over a vocabulary"):
        head.install(build("vit")[0])
    with pytest.raises(UserError, match="it is no transformers model"):
        head.install(nn.Linear(2, 2))


def test_remove_and_describe() -> None:
    model, _ = build("llama")
    installed = head.install(model)
    assert installed.describe() == [
        {
            "term": "head",
            "module": "LlamaForCausalLM",
            "count": 1,
            "dropped": "logits",
            "kept": "the output layer's input",
        }
    ]
    installed.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
