"""Policies per tower of a vision-language model: towers are found by structure, and the numbers stay the same."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import vision_language_models as vlm
from language_models import differing
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.blocks import find_blocks
from ckpt_ft.checkpointing.towers import find_towers
from ckpt_ft.errors import UserError

POLICIES = (
    "full@language", "full@vision", "every:2@language,full@vision", "full,none@vision", "segments:1@vision",
    "save:attention+matmul@language,modules:mlp@vision", "save:matmul@vision",
)  # fmt: skip
CLOSE = ("pointwise@vision", "full@language,pointwise@vision", "pointwise,full@vision", "pointwise@language,head")
ROOTS = {
    "qwen2_vl": ("model.language_model", "model.visual"),
    "qwen2_5_vl": ("model.language_model", "model.visual"),
    "idefics3": ("model.text_model", "model.vision_model"),
    "smolvlm": ("model.text_model", "model.vision_model"),
}


# every family with full fine-tuning, and one LoRA case per kind of tower; other LoRA cases are slow tests
CASES = [(name, lora) for name in vlm.CONFIGS for lora in (False, True)]
QUICK = {(name, False) for name in vlm.CONFIGS} | {("qwen2_5_vl", True), ("paligemma", True)}


@pytest.mark.parametrize(
    ("name", "lora"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=[f"{name}-{'lora' if lora else 'full'}" for name, lora in CASES],
)
def test_tower_policies_keep_the_numbers(name: str, lora: bool) -> None:
    model = vlm.make(name, lora)
    expected = vlm.numbers(model, name)
    towers = find_towers(model, find_blocks(model).blocks)
    roots = ROOTS.get(name, ("model.language_model", "model.vision_tower"))
    assert [root.removeprefix("base_model.model.") for tower in towers for root in tower.modules] == list(roots)
    trained = {key.removeprefix("gradient ") for key in expected if key.startswith("gradient ")}
    for tower in towers:
        assert any(key.startswith(next(iter(tower.modules))) for key in trained), tower.name
    for policy in POLICIES:
        applied = apply_policy(model, policy)
        assert differing(vlm.numbers(model, name), expected) == [], policy
        applied.remove()
    for policy in CLOSE:
        applied = apply_policy(model, policy)
        found = vlm.numbers(model, name)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
        applied.remove()


def test_position_embedding_does_not_make_a_language_tower() -> None:
    from transformers import SEWDConfig, SEWDForCTC

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 4)}
    model = SEWDForCTC(SEWDConfig(**sizes, **convolutions, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2))
    (tower,) = find_towers(model, find_blocks(model).blocks)
    assert (tower.name, len(tower.blocks)) == ("audio", 4)


def runs(model: nn.Module, name: str) -> Counter[str]:
    """Returns how often the blocks of each tower run in a step."""
    see = Mock(return_value=None)  # the policy would restore a counter of ours for the second run
    hooks = []
    for tower in find_towers(model, find_blocks(model).blocks):
        for block in tower.blocks.values():
            inner = next(module for module in block.modules() if isinstance(module, nn.Linear))
            hooks.append(inner.register_forward_hook(lambda *_, tower=tower: see(tower.name)))
    vlm.numbers(model, name)
    for hook in hooks:
        hook.remove()
    return Counter(call.args[0] for call in see.call_args_list)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", {"vision": 2, "language": 2}),
        ("full@language", {"vision": 2, "language": 4}),
        ("full@vision", {"vision": 4, "language": 2}),
        ("first:1@language,full@vision", {"vision": 4, "language": 3}),
        ("full,none@vision", {"vision": 2, "language": 4}),
        ("full,first:1@vision", {"vision": 3, "language": 4}),
        ("pointwise@vision,full@language", {"vision": 2, "language": 4}),
    ],
)
def test_each_tower_has_its_own_policy(policy: str, expected: dict[str, int]) -> None:
    model = vlm.make("llava")
    apply_policy(model, policy)
    assert runs(model, "llava") == expected


def saved_bytes(model: nn.Module, within: str) -> int:
    """Returns the bytes that autograd saved in the forward of `within` and still holds at the end of forward."""
    kept: list[weakref.ref[torch.Tensor]] = []
    inside = False

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach()
        if inside and not isinstance(tensor, nn.Parameter):
            kept.append(weakref.ref(alias))
        return alias

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    part = model.get_submodule(within)
    hooks = [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**vlm.batch("llava")).loss
    for hook in hooks:
        hook.remove()
    assert loss.requires_grad
    return sum(alias.nbytes for ref in kept if (alias := ref()) is not None)


def test_frozen_tower_saves_nothing() -> None:
    model = vlm.make("llava")
    model.model.vision_tower.requires_grad_(False)
    assert saved_bytes(model, "model.vision_tower") == 0
    assert saved_bytes(model, "model.language_model") > 0
    apply_policy(model, "full")
    assert saved_bytes(model, "model.vision_tower") == 0


def test_explain_names_the_towers() -> None:
    model = vlm.make("qwen2_vl")
    lines = apply_policy(model, "full@language,pointwise@vision").explain().splitlines()
    assert next(line.split() for line in lines if "Qwen2VLVisionBlock" in line) == [
        "vision", "Qwen2VLVisionBlock", "2", "0", "see", "pointwise",
    ]  # fmt: skip
    assert next(line.split() for line in lines if "Qwen2VLDecoderLayer" in line) == [
        "language", "Qwen2VLDecoderLayer", "2", "2", "input", "only",
    ]  # fmt: skip
    said = " ".join(lines)
    assert "2 of 4 blocks are re-run" in said
    assert "towers: language model.language_model (2 blocks); vision model.visual (2 blocks)" in said
    assert "towers:" in apply_policy(model, "full").explain()  # towers that a policy could name


def test_unknown_tower_is_refused() -> None:
    from language_models import make

    model = make("llama")
    assert len(apply_policy(model, "full@language").covered) == 4
    with pytest.raises(UserError, match="LlamaForCausalLM has no vision tower; it has language"):
        apply_policy(model, "full@vision")
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)))
    with pytest.raises(UserError, match="Sequential has no audio tower; none was found"):
        apply_policy(plain, "full@audio")
    with pytest.raises(UserError, match="the vision tower of Qwen2VLForConditionalGeneration has no stages"):
        apply_policy(vlm.make("qwen2_vl"), "stages@vision")


TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
    "image_size": 32,
}  # fmt: skip
# Models that declare all modalities for every part, declare one that they lack, or have embeddings beside another
# tower.
UNCLEAR: list[tuple[str, dict[str, Any], dict[str, list[str]]]] = [
    (
        "gemma4",
        {
            "text_config": {**TEXT, "hidden_size_per_layer_input": 8},
            "vision_config": {**SIGHT, "num_key_value_heads": 2, "head_dim": 8},
            "audio_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        },
        {"language": ["model.language_model"], "vision": ["model.vision_tower"], "audio": ["model.audio_tower"]},
    ),
    (
        "git",
        {**TEXT, "vision_config": SIGHT},
        {"language": ["git.encoder"], "vision": ["git.image_encoder"]},
    ),
    (
        "idefics",
        {
            **TEXT, "cross_layer_interval": 1, "use_resampler": False,
            "vision_config": {**SIGHT, "embed_dim": 16},
        },
        {"language": ["model.layers", "model.gated_cross_attn_layers"], "vision": ["model.vision_model"]},
    ),
    (
        "pp_formulanet",
        {},
        {"language": ["model.decoder"], "vision": ["model.encoder"]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "expected"), UNCLEAR, ids=[case[0] for case in UNCLEAR])
def test_structure_of_a_tower_overrides_its_declared_modality(
    kind: str, config: dict[str, Any], expected: dict[str, list[str]]
) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **config))
    towers = find_towers(model, find_blocks(model).blocks)
    assert {tower.name: list(tower.modules) for tower in towers} == expected


def test_towers_are_found_by_structure_without_declarations() -> None:
    """A vision tower by its convolution with positions, a language model by its tokens; other towers have no name."""

    class Tower(nn.Module):
        def __init__(self, first: nn.Module, count: int) -> None:
            super().__init__()
            self.stem = nn.ModuleDict({"first": first, "positions": nn.Embedding(8, 4)})
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(count))

    model = nn.ModuleDict({
        "eyes": Tower(nn.Conv2d(3, 4, 2), 2),
        "words": Tower(nn.Embedding(50, 4), 3),
        "ears": Tower(nn.Conv1d(2, 4, 2), 4),
        "between": nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2)),
    })  # fmt: skip
    blocks = {f"{tower}.blocks.{i}": model[tower].blocks[i] for tower in ("eyes", "words", "ears") for i in range(2)}
    blocks |= {f"between.{i}": model["between"][i] for i in range(2)}
    found = {tower.name: (list(tower.modules), list(tower.blocks)) for tower in find_towers(model, blocks)}
    assert found == {
        "language": (["words"], ["words.blocks.0", "words.blocks.1"]),
        "vision": (["eyes"], ["eyes.blocks.0", "eyes.blocks.1"]),
        "audio": (["ears"], ["ears.blocks.0", "ears.blocks.1"]),
    }


def test_explain_of_two_thousand_blocks_takes_linear_time() -> None:
    """A quadratic algorithm took 19 s."""
    blocks = (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2000))
    model = nn.Sequential(nn.Embedding(2, 2), nn.ModuleList(blocks))
    applied = apply_policy(model, "every:2,pointwise")
    start = time.process_time()
    assert "1000 of 2000 blocks are re-run" in applied.explain()
    assert time.process_time() - start < 4
