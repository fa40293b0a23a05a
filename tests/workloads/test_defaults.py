"""Defaults of a spec equal those of the recipes, and errors of a spec name no command-line flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments
from ckpt_ft.training.models import ModelArguments
from ckpt_ft.workloads.load import load

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 8, "cross_attention_dim": 8, "block_out_channels": [8, 8],
    "attention_head_dim": 4, "norm_num_groups": 4, "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip
FLUX = {
    "_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 1, "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": [4, 4, 8],
}  # fmt: skip


def dropouts(model: nn.Module) -> set[float]:
    return {m.p for name, m in model.named_modules() if "lora_dropout" in name and isinstance(m, nn.Dropout)}


def test_default_lora_dropout_equals_the_recipes(tmp_path: Path) -> None:
    """Dropout of adapters keeps a copy of each layer's input, and a mask of a byte per element."""
    file = write_config(tmp_path, LLAMA)
    taken = load(TrainingSpec.of(file, lora_r=2, seq_length=16), "t4")
    without = load(TrainingSpec.of(file, lora_r=2, seq_length=16, lora_dropout=0.0), "t4")
    assert dropouts(taken.model) == {ModelArguments().lora["lora_dropout"]} == {0.05}
    assert dropouts(without.model) == set()
    kept = [sum(w.trace(8).module_activations().values()) for w in (taken, without)]
    tokens = 8 * 16
    copies = 2 * tokens * (6 * 32 + 64)  # elements: in each block six layers of width 32 and one of 64
    # the input of q, k and v in the first block is the frozen embeddings' output, which has no gradient
    masks = copies - 3 * tokens * 32
    shared = 2 * tokens * (2 * 32 + 64)  # saved without dropout: inputs of q, k, v; of gate, up; of down
    assert kept[0] - kept[1] == 4 * copies + masks - 4 * shared


def test_default_lora_dropout_of_diffusion_models_is_zero(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    file = write_config(tmp_path, UNET)
    assert DiffusionModelArguments(rank=2).lora_dropout == 0.0
    assert dropouts(load(TrainingSpec.of(file, lora_r=2), "t4").model) == set()
    assert dropouts(load(TrainingSpec.of(file, lora_r=2, lora_dropout=0.1), "t4").model) == {0.1}


def test_default_resolution_of_flux_is_1024(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    workload = load(TrainingSpec.of(write_config(tmp_path, FLUX)), "t4")
    assert workload.shape == {"resolution": 1024}
    assert workload.make_batch(1, None)["hidden_states"].shape == (1, 64 * 64, 64)
    assert load(TrainingSpec.of(write_config(tmp_path, FLUX), resolution=512), "t4").make_batch(1, None)[
        "img_ids"
    ].shape == (1024, 3)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"dtype": "fp16"}, r"dtype 'fp16' \(float32, bfloat16, float16\)"),
        ({"mixed_precision": "fp4"}, "mixed precision 'fp4'"),
        ({"seq_length": 1}, "sequence length 1: a sequence has at least 2 tokens"),
        ({"lora_r": -1}, "LoRA rank -1: it is at least 1"),
        ({"resolution": -8}, "resolution -8: a number of pixels"),
        ({"load_in_4bit": True}, "4-bit weights cannot be trained themselves"),
        ({"lora_r": 4, "lora_dropout": 1.0}, "LoRA dropout 1.0"),
    ],
)
def test_errors_of_a_spec_name_no_flag(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        TrainingSpec.of(**asked)
    assert "--" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "positions"),
    [("bert-base-uncased", 512), ("openai/clip-vit-base-patch32", 77), ("openai/whisper-tiny", 448)],
)
def test_default_length_is_clamped_to_the_models_positions(name: str, positions: int) -> None:
    workload = load(TrainingSpec.of(name), "t4")
    assert workload.shape["seq_length"] == positions
    assert workload.notes[0] == f"sequences of {positions} tokens: {name} has no more positions"
    with pytest.raises(UserError, match=f"sequence length 1024: {name} has {positions} positions"):
        load(TrainingSpec.of(name, seq_length=1024), "t4")


def test_default_length_of_a_model_with_enough_positions(tmp_path: Path) -> None:
    workload = load(TrainingSpec.of("gpt2"), "t4")
    assert (workload.shape, workload.notes) == ({"seq_length": 1024}, ())
