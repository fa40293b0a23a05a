"""Small vision models of every family, and the numbers of a training step for bitwise comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SIDE, CLASSES = 32, 5


def resnet(layer_type: str) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[2, 2, 3, 2], layer_type=layer_type, num_labels=CLASSES
    )
    return ResNetForImageClassification(config)


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[8, 16, 16, 24], depths=[2, 2, 2, 2], drop_path_rate=0.3, patch_size=2, num_labels=CLASSES
    )
    return ConvNextForImageClassification(config)


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=SIDE, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, drop_path_rate=0.3,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=CLASSES,
    )  # fmt: skip
    return SwinForImageClassification(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=SIDE,
        patch_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=CLASSES,
    )  # fmt: skip
    return ViTForImageClassification(config)


class ConvBlock(nn.Module):
    """Convolution, BatchNorm, ReLU in place, dropout; twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout2d(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(self.dropout(x))), inplace=True)


class Level(nn.Module):
    """One resolution of the U-Net, a sequence of blocks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(inputs, outputs), ConvBlock(outputs, outputs)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class Output:
    loss: torch.Tensor


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015, arXiv:1505.04597) with BatchNorm; the mean over its pixels classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.down_blocks = nn.ModuleList([Level(3, 8), Level(8, 16)])
        self.mid_block = Level(16, 16)
        self.up_blocks = nn.ModuleList([Level(32, 16), Level(24, 8)])
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Output:
        x, skipped = pixel_values, []
        for level in self.down_blocks:
            x = level(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.mid_block(x)
        for level in self.up_blocks:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skipped.pop()], dim=1))
        return Output(F.cross_entropy(self.head(x).mean((2, 3)), labels))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet-basic": lambda: resnet("basic"),
    "resnet-bottleneck": lambda: resnet("bottleneck"),
    "convnext": convnext,
    "swin": swin,
    "vit": vit,
    "unet": UNet,
}


def make(name: str, seed: int = 0) -> nn.Module:
    """Returns the model in train mode with fixed weights and running statistics that differ from the initial ones."""
    torch.manual_seed(seed)
    model = MODELS[name]().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model


def batches(count: int, size: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        {
            "pixel_values": torch.randn(size, 3, SIDE, SIDE, generator=generator),
            "labels": torch.randint(CLASSES, (size,), generator=generator),
        }
        for _ in range(count)
    ]


def numbers(model: nn.Module, inputs: list[dict[str, torch.Tensor]], seed: int = 3) -> dict[str, torch.Tensor]:
    """Returns what forward and backward over `inputs` leave: losses, accumulated gradients, buffers, random state."""
    torch.manual_seed(seed)
    found = {}
    for index, batch in enumerate(inputs):
        loss = model(**batch).loss
        found[f"loss {index}"] = loss.detach()
        loss.backward()
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    return {**found, "rng": torch.get_rng_state()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Asserts bitwise equality of every tensor, and that no other tensor is there."""
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:5]}"
