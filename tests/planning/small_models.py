"""Four small models with training steps for any batch size, for tests of planning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from ckpt_ft.memory.gpus import GPU
from ckpt_ft.workloads.workload import Workload


@dataclass
class Small:
    """A model in train mode with its training step."""

    model: nn.Module
    loss: Callable[[nn.Module, int], torch.Tensor]

    def step_for_batch(self, size: int) -> Callable[[nn.Module, Any], None]:
        def step(model: nn.Module, optimizer: Any) -> None:
            self.loss(model, size).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()

        return step

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def workload(self, device: str | GPU = "cpu") -> Workload:
        return Workload.of_loop(self.model, self.step_for_batch, self.make_optimizer, device)


def llama() -> Small:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip

    def loss(model: nn.Module, size: int) -> torch.Tensor:
        ids = torch.arange(size * 48).reshape(size, 48) % 256
        found: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return Small(LlamaForCausalLM(config).train(), loss)


def unet() -> Small:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, attention_head_dim=16,
    )  # fmt: skip

    def loss(model: nn.Module, size: int) -> torch.Tensor:
        noise = torch.ones(size, 3, 16, 16)
        return nn.functional.mse_loss(model(noise, torch.zeros(size, dtype=torch.long)).sample, noise)

    return Small(model.train(), loss)


def resnet() -> Small:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=4)
    return Small(ResNetForImageClassification(config).train(), _images)


def vit() -> Small:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=4,
        num_labels=4,
    )  # fmt: skip
    return Small(ViTForImageClassification(config).train(), _images)


def _images(model: nn.Module, size: int) -> torch.Tensor:
    found: torch.Tensor = model(
        pixel_values=torch.ones(size, 3, 32, 32), labels=torch.zeros(size, dtype=torch.long)
    ).loss
    return found


MODELS = {"llama": llama, "unet": unet, "resnet": resnet, "vit": vit}
