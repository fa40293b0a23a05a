"""Two published workloads: a ResNet-50 on a T4 and twelve toy blocks on an A100.

Each function yields (name, published megabytes of 1e6 bytes, traced megabytes, trace). The publications leave two
things open, which the figures show: the ResNet's loop never zeroed its gradients, and of the toy models trained
earlier, the gradients still existed and the optimizers did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace

Row = tuple[str, float, float, StepTrace]


class Bottleneck(nn.Module):
    """ResNet's block (He et al. 2015), stride in the 3x3 convolution, ReLU in place."""

    def __init__(self, channels_in: int, width: int, stride: int = 1, first: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if first:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


class ResNet50(nn.Module):
    """ResNet-50 for 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        stages, channels = [], 64
        for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
            stage = [Bottleneck(channels, width, stride, first=True)]
            channels = 4 * width
            stages.append(nn.Sequential(*stage, *(Bottleneck(channels, width) for _ in range(blocks - 1))))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


RESNET = {
    "none": (3033.27, 276.69),
    "stages:3+4": (2627.26, 316.66),
    "stages": (1765.28, 368.39),
    "full": (1360.01, 368.90),
}


def resnet() -> Iterator[Row]:
    """ResNet-50, fp32, 32 x 3 x 224 x 224, forward and backward on a T4."""

    def step(model: nn.Module, _: object) -> None:
        images, labels = torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,))
        F.cross_entropy(model(images), labels).backward()

    for policy, (published, _) in RESNET.items():
        with torch.device("meta"):
            model = ResNet50()
        if policy != "none":
            apply_policy(model, policy)
        trace = trace_step(model, step, device="t4")
        yield f"ResNet-50, {policy}", published, trace.peak_allocated / 1e6, trace


class ToyBlock(nn.Module):
    """Attention and MLP, each after a norm; `recompute` names the checkpointed ones (with their norm)."""

    def __init__(self, recompute: str, weights: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(512), nn.LayerNorm(512)
        self.attention = nn.MultiheadAttention(512, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
        self.recompute, self.weights = recompute, weights

    def attend(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        return self.attention(x, x, x, need_weights=self.weights)[0]

    def transform(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(x))

    def both(self, x: Tensor) -> Tensor:
        for name, part in (("attention", self.attend), ("mlp", self.transform)):
            x = x + (checkpoint(part, x, use_reentrant=False) if name in self.recompute else part(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.recompute == "block" else self.both(x)


def toy(recompute: str, every: int = 1, weights: bool = True) -> nn.Module:
    """Twelve blocks; the first is never checkpointed, of the others every `every`-th is."""
    return nn.Sequential(*(ToyBlock(recompute if i and i % every == 0 else "", weights) for i in range(12)))


TOYS: list[tuple[str, float, Callable[[], nn.Module]]] = [
    ("none", 3140, lambda: toy("")),
    ("attention and MLP", 1414, lambda: toy("attention mlp")),
    ("MLP only", 3093, lambda: toy("mlp")),
    ("attention only", 1787, lambda: toy("attention")),
    ("all blocks", 1819, lambda: toy("block")),
    ("every other block", 2803, lambda: toy("block", every=2)),
    ("all blocks, second time", 2216, lambda: toy("block")),
    ("all blocks, flash", 1691, lambda: toy("block", weights=False)),
    ("every other block, flash", 1987, lambda: toy("block", every=2, weights=False)),
]
CELLS = (4, 6, 9)  # number of models alive when the figures up to here were measured


def twelve_blocks() -> Iterator[Row]:
    """Twelve blocks, bf16, batch 1, 4096 tokens, width 512, AdamW, on an A100-40GB; all models of a cell are kept."""
    for at, (name, published, _) in enumerate(TOYS):
        with torch.device("meta"):
            alive = next(cell for cell in CELLS if at < cell)
            models = nn.ModuleList(make() for _, _, make in TOYS[:alive]).to(torch.bfloat16)
        calls = iter(range(2 * at + 2))

        def step(
            models: nn.Module, optimizers: dict[int, torch.optim.Optimizer], calls: Iterator[int] = calls
        ) -> None:
            turn = next(calls) // 2
            model = models[turn]  # type: ignore[index]
            if turn not in optimizers:
                optimizers.clear()
                optimizers[turn] = torch.optim.AdamW(model.parameters())
            x, target = (torch.randn(1, 4096, 512, dtype=torch.bfloat16) for _ in range(2))
            optimizers[turn].zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizers[turn].step()

        trace = trace_step(models, step, make_optimizer=lambda _: {}, device="a100-40gb", warmup_steps=2 * at + 1)  # type: ignore[arg-type, return-value]
        yield f"twelve blocks, {name}", published, trace.peak_allocated / 1e6, trace
