"""Tiny models with a loss and a training step each, for tests of traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker

Loss = Callable[[nn.Module], Tensor]
MARK = 7_777_777  # bytes; no other tensor has this size


def language_model(kind: str = "llama", shape: tuple[int, int] = (2, 64), **config: object) -> tuple[nn.Module, Loss]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 500, "use_cache": False}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **config})).train()
    ids = torch.randint(0, 500, shape)
    return model, lambda model: model(input_ids=ids, labels=ids).loss


def unet(channels: int = 16, size: int = 8) -> tuple[nn.Module, Loss]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=size, block_out_channels=(channels, 2 * channels), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    )  # fmt: skip
    latents, times, texts = torch.randn(2, 4, size, size), torch.tensor([1, 2]), torch.randn(2, 8, 32)
    return model.train(), lambda model: model(latents, times, encoder_hidden_states=texts).sample.float().pow(2).mean()


def resnet(images: int = 2, **config: object) -> tuple[nn.Module, Loss]:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "bottleneck"}
    model = ResNetForImageClassification(ResNetConfig(**{**sizes, **config}, num_labels=10)).train()
    return model, _classify(images, 64)


def vit(images: int = 2, **config: object) -> tuple[nn.Module, Loss]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    whole = ViTConfig(**{**sizes, "image_size": 64, **config}, patch_size=16, num_labels=10)
    return ViTForImageClassification(whole).train(), _classify(images, whole.image_size)


def _classify(images: int, size: int) -> Loss:
    pixels, labels = torch.randn(images, 3, size, size), torch.arange(images) % 10
    return lambda model: model(pixel_values=pixels, labels=labels).loss


MODELS = {"language model": language_model, "unet": unet, "resnet": resnet, "vit": vit}


def training_step(loss: Loss, autocast: bool = False) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def real_trace(model: nn.Module, step: Callable[..., object]) -> StepTrace:
    """Returns the trace of two real steps on the CPU."""
    optimizer = adamw(model)
    with Tracker(model, optimizer) as tracker:
        for _ in range(2):
            tracker.start_step()
            step(model, optimizer)
    return tracker.trace()


def sorted_events(trace: StepTrace) -> list[int]:
    """Returns the events with consecutive frees sorted, because autocast frees cached weights in address order."""
    told: list[int] = []
    freed: list[int] = []
    for event in trace.events:
        if event < 0:
            freed.append(event)
        else:
            told += [*sorted(freed), event]
            freed = []
    return told + sorted(freed)


def step_events(trace: StepTrace) -> list[tuple[int, str, str, str]]:
    """Returns the events of the measured step in order: bytes (negative for frees), operator, module, phase.

    Consecutive frees are sorted, because autocast frees its cached weights in the order of their addresses.
    """
    told: list[tuple[int, str, str, str]] = []
    freed: list[tuple[int, str, str, str]] = []
    for event in trace.events[trace.start :]:
        storage = trace.storages[max(event, ~event)]
        row = (storage.nbytes if event >= 0 else -storage.nbytes, storage.op, storage.module, storage.phase)
        if event < 0:
            freed.append(row)
        else:
            told += [*sorted(freed), row]
            freed = []
    return told + sorted(freed)


def peak_of_a_second_step(step, model: nn.Module) -> int:
    """Returns the peak bytes of a second step above those before it.

    In a first step, the profiler would miss frees of tensors that were allocated before it started.
    """
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
