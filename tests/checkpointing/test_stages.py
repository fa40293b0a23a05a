"""Stages of vision models, and policies on every family of them: the numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from vision_models import MODELS, assert_same, batches, make, numbers

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.blocks import find_blocks
from ckpt_ft.errors import UserError

EVERY_MODEL = [
    "full", "every:2", "first:1", "segments:2", "sqrt",
    "save:conv", "save:attention+matmul", "save:conv+matmul/2", "save:aten.native_batch_norm",
]  # fmt: skip
STAGED = ["stages", "stages:1", "stages:2", "stages,save:conv+matmul"]
ATTENTION = ["modules:attention", "modules:mlp", "modules:attention+mlp,save:matmul"]

CASES = [
    (model, policy)
    for model in MODELS
    for policy in EVERY_MODEL + (STAGED if model != "vit" else []) + (ATTENTION if model in ("vit", "swin") else [])
]


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, torch.Tensor]]:
    return {name: numbers(make(name), batches(2)) for name in MODELS}


# blocks of a ViT have no convolutions, a ResNet has no attention
@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_policy_keeps_vision_models_bits(name: str, policy: str, plain: dict[str, dict[str, torch.Tensor]]) -> None:
    model = make(name)
    applied = apply_policy(model, policy)
    assert applied.covered
    assert_same(numbers(model, batches(2)), plain[name])


@pytest.mark.parametrize("policy", ["offload", "full,offload"])
@pytest.mark.parametrize("name", MODELS)
def test_offload_keeps_vision_models_bits(name: str, policy: str, plain: dict[str, dict[str, torch.Tensor]]) -> None:
    model = make(name)
    apply_policy(model, policy)
    assert_same(numbers(model, batches(2)), plain[name])


@pytest.mark.parametrize("name", MODELS)
def test_pointwise_is_equal_up_to_rounding(name: str, plain: dict[str, dict[str, torch.Tensor]]) -> None:
    model = make(name)
    apply_policy(model, "pointwise")
    found = numbers(model, batches(2))
    assert found.keys() == plain[name].keys()
    for key, expected in plain[name].items():
        if key == "rng" or not expected.is_floating_point():
            assert torch.equal(found[key], expected), key
        else:
            assert (found[key] - expected).norm() <= 1e-6 * expected.norm() + 1e-9, key


def resnet50() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.device("meta"):
        return ResNetForImageClassification(ResNetConfig())


STAGES = [f"resnet.encoder.stages.{stage}" for stage in range(4)]
BLOCKS = [[f"{stage}.layers.{i}" for i in range(depth)] for stage, depth in zip(STAGES, (3, 4, 6, 3), strict=True)]


@pytest.mark.parametrize(
    ("policy", "covered"),
    [
        ("none", []),
        ("stages", STAGES),
        ("aggressive", BLOCKS[2] + BLOCKS[3]),
        ("full", [block for blocks in BLOCKS for block in blocks]),
    ],
)
def test_published_strategies_of_resnet50(policy: str, covered: list[str]) -> None:
    assert apply_policy(resnet50(), policy).covered == covered


def test_aliases_equal_the_published_strategies() -> None:
    for alias, policy in {"per_block": "full", "per_stage": "stages", "aggressive": "stages:3+4"}.items():
        assert apply_policy(resnet50(), alias).covered == apply_policy(resnet50(), policy).covered


@pytest.mark.parametrize(
    ("name", "depths"),
    [
        ("resnet-basic", [2, 2, 3, 2]),
        ("resnet-bottleneck", [2, 2, 3, 2]),
        ("convnext", [2, 2, 2, 2]),
        ("swin", [2, 2]),
        ("vit", []),
        ("unet", [2, 2, 2, 2, 2]),
    ],
)
def test_stages_of_every_family(name: str, depths: list[int]) -> None:
    found = find_blocks(make(name))
    assert [len(stage.blocks) for stage in found.stages] == depths
    if depths:
        assert [block for stage in found.stages for block in stage.blocks] == list(found.blocks)


def test_stages_of_a_unet_are_in_execution_order() -> None:
    names = [stage.name for stage in find_blocks(make("unet")).stages]
    assert names == ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"]


class Pair(nn.Module):
    """A list of blocks inside a level, as a video U-Net's transformers over space and time have."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial, self.temporal = (
            nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.temporal[0](self.spatial[0](x))


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([nn.ModuleDict({"pairs": nn.ModuleList([Pair(), Pair()])}) for _ in range(2)])


def test_stage_is_not_searched_for_stages() -> None:
    found = find_blocks(Levels())
    assert [(stage.name, len(stage.blocks)) for stage in found.stages] == [("levels.0", 4), ("levels.1", 4)]


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("swin", "stages:3", "SwinForImageClassification has no stage 3; it has 2, counted from 1"),
        ("vit", "stages", "ViTForImageClassification has no stages; segments:N makes runs of its 4 blocks"),
        ("vit", "aggressive", "ViTForImageClassification has no stages"),
        ("resnet-basic", "modules:attention", "no attention submodule in the blocks of ResNetForImageClassification"),
    ],
)
def test_missing_stage_or_submodule_is_refused(name: str, policy: str, message: str) -> None:
    model = make(name)
    with pytest.raises(UserError, match=message):
        apply_policy(model, policy)
    assert all("forward" not in module.__dict__ for module in model.modules())
