"""Steps under torch.compile: as many bytes as PyTorch records where the C++ backend compiles them for this CPU."""

from __future__ import annotations

import peft
import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trace_models import adamw, language_model, training_step, vit

from ckpt_ft import apply_policy, trace_step

MARK = 7_777_777  # bytes, of nothing else


def steady_peak(step, model: nn.Module) -> int:
    """Bytes above what is resident in a third step, by the profiler's memory events."""
    optimizer = adamw(model)
    step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step(model, optimizer)
        torch.empty(MARK, dtype=torch.uint8)
        step(model, optimizer)
    held = before = peak = 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        before = held if event.nbytes() == -MARK else before
        peak = held if event.nbytes() == -MARK else max(peak, held)
    return peak - before


class UnetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResnetBlock2D(in_channels=32, temb_channels=None, groups=8) for _ in range(3))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden, None)
        return hidden


def unet_block():
    images = torch.randn(4, 32, 16, 16)
    return UnetBlock().train(), lambda model: model(images).pow(2).mean()


def lora():
    model, loss = language_model(shape=(4, 128))
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config), loss


MODELS = {
    "llama": lambda: language_model(shape=(4, 128)),
    "gpt2": lambda: language_model("gpt2", (4, 128), n_embd=64, n_layer=3, n_head=4),
    "vit": lambda: vit(8),
    "unet": unet_block,
    "lora": lora,
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "save:matmul"])
@pytest.mark.parametrize("kind", MODELS)
def test_peak_is_the_compiled_steps(kind: str, policy: str) -> None:
    torch._dynamo.reset()
    model, loss = MODELS[kind]()
    apply_policy(model, policy)
    model.compile()
    step = training_step(loss)
    trace = trace_step(model, step, make_optimizer=adamw, device="cpu")
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    assert predicted == pytest.approx(steady_peak(step, model), rel=0.02)
