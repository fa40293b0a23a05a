"""The bytes that `full` keeps between forward and backward of a real step, compared with the library's checkpointing.

A block's second run starts from copies of what its first run wrote. Apart from them, only buffers of up to 4 KiB are
copied; a frozen quantised base, whose scales may be buffers, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import language_models
import pytest
import torch
import vision_language_models
import vision_models
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.standins.quantised_layers import PACKINGS, PackedLinear, replace_linears, to_int8, to_nf4

TINY = 4096  # bytes
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # peft, about experts
]


def kept_bytes(trace: StepTrace) -> int:
    """Returns the bytes that are allocated when the forward pass of the second step has ended."""
    backward = next(at for at, phase in trace.marks if phase == "backward" and at >= trace.start)
    return trace.replay.allocated[backward - 1]


def step(batch: dict[str, torch.Tensor]) -> Callable[[nn.Module, Any], None]:
    def stepped(model: nn.Module, optimizer: Any) -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    return stepped


def kept_live(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    with Tracker(model) as tracker:
        for _ in range(2):
            tracker.start_step()
            step(batch)(model, None)
    return kept_bytes(tracker.trace())


def checkpointed(model: Any, policy: str = "") -> nn.Module:
    """Returns the model under `policy`, or under its library's own checkpointing."""
    if not policy:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()
    if policy:
        apply_policy(model, policy)
    return model  # type: ignore[no-any-return]


QUICK = ("llama", "mixtral", "vit", "llava")
QUICK_PACKINGS = ("gptq", "fp8")  # all are traced
VISION = ("qwen2_vl", "qwen2_5_vl", "llava", "paligemma", "gemma3", "pixtral", "mistral3", "idefics3", "smolvlm")
ARCHITECTURES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*language_models.CONFIGS, "vit", *VISION)
]
# `full` also keeps the router's outputs: logits of 4 experts, and 2 scores and indices, for each of 12 tokens, in all
# layers with experts.
ROUTED = {
    name: layers * 12 * (4 * 4 + 2 * (4 + 8)) for name, layers in (("mixtral", 4), ("qwen3_moe", 4), ("jamba", 2))
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_keeps_as_much_as_the_librarys_checkpointing(name: str) -> None:
    if name in language_models.CONFIGS:
        make, batch = lambda: language_models.make(name, "lora"), language_models.batch()
    elif name in vision_models.MODELS:
        make, batch = lambda: vision_models.make(name), vision_models.batches(1)[0]
    else:
        make, batch = lambda: vision_language_models.make(name), vision_language_models.batch(name)
    theirs, ours = (kept_live(checkpointed(make(), policy), batch) for policy in ("", "full"))
    assert ours == theirs + ROUTED.get(name, 0)


def quantised(method: str, device: str = "meta") -> nn.Module:
    """Returns a Llama with LoRA over a base that is quantised by `method`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
        use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return packed(LlamaForCausalLM(config), method)


def packed(base: Any, method: str) -> nn.Module:
    if method in PACKINGS:
        replace_linears(
            base, lambda linear: PackedLinear(linear, PACKINGS[method], 8 if method == "quanto" else 4, 0), None
        )
        base.requires_grad_(False)
        for buffer in base.buffers():
            buffer.zero_()  # a NaN would not equal its copy
    elif method == "int8":
        to_int8(base)
    else:
        to_nf4(base, torch.float32, nested="double" in method)
    return get_peft_model(base, LoraConfig(r=2)).train()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK_PACKINGS else pytest.mark.slow) for name in PACKINGS]
)
def test_frozen_quantised_base_is_not_copied(method: str) -> None:
    batch = language_models.batch()
    theirs, ours = (kept_live(checkpointed(quantised(method, "cpu"), policy), batch) for policy in ("", "full"))
    tiny = sum(value.nbytes for value in quantised(method).buffers() if value.nbytes <= TINY)
    assert theirs <= ours <= theirs + tiny


@pytest.mark.parametrize("method", ["nf4", "nf4, double", "int8", *PACKINGS])
def test_traced_quantised_base_is_not_copied(method: str) -> None:
    theirs, ours = (
        trace_step(checkpointed(quantised(method), policy), step(language_models.batch())) for policy in ("", "full")
    )
    assert kept_bytes(ours) == kept_bytes(theirs)
    assert ours.peaks == theirs.peaks


class Checkpointed(nn.Module):
    """A block under PyTorch's own checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Three blocks with running statistics of 2,000 channels and a constant buffer of the same size."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 8)) for _ in range(3)]
        for block in blocks:
            block.register_buffer("constant", torch.zeros(2000))
        self.blocks = nn.ModuleList(blocks if policy else map(Checkpointed, blocks))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return vision_models.Output(x.square().mean())


def test_only_written_buffers_are_kept_as_copies() -> None:
    batch = {"x": torch.randn(4, 8)}
    model = Net("full")
    assert apply_policy(model, "full").covered == ["blocks.0", "blocks.1", "blocks.2"]
    written = 3 * (2 * 2000 * 4 + 8)  # means, variances, and the count of batches
    assert kept_live(model, batch) == kept_live(Net(""), batch) + written
