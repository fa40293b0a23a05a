"""Adapters merged into full weights: the numbers of the adapted model, without peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from ckpt_ft.errors import UserError
from ckpt_ft.training.merge import merge


def with_random_lora(model: torch.nn.Module, targets: list[str]) -> torch.nn.Module:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return adapted.eval()


def test_a_language_model_gives_the_adapted_ones_logits(sample: tuple[Path, Path], tmp_path: Path) -> None:
    ids = torch.arange(64).view(2, 32)
    base = AutoModelForCausalLM.from_pretrained(sample[0])
    with torch.no_grad():
        plain = base.eval()(ids).logits
        adapted = with_random_lora(base, ["q_proj", "down_proj"])
        wanted = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "adapter")

    merged = AutoModelForCausalLM.from_pretrained(merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))).eval()
    with torch.no_grad():
        found = merged(ids).logits
    assert not hasattr(merged, "peft_config")
    assert torch.allclose(found, wanted, atol=1e-5)
    assert (found - plain).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").pad_token == "<|pad|>"  # the base's


def test_a_pipeline_gives_the_adapted_ones_noise(tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    from ckpt_ft.training.diffusion.tiny_pipeline import make_tiny_pipeline

    make_tiny_pipeline("sd2", 0, (16, 32)).save_pretrained(tmp_path / "base")
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "base")
    width = pipeline.unet.config.cross_attention_dim
    inputs = torch.ones(1, pipeline.unet.config.in_channels, 8, 8), torch.tensor([3]), torch.ones(1, 4, width)
    pipeline.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q"], init_lora_weights=False))
    with torch.no_grad():
        wanted = pipeline.unet.eval()(*inputs).sample
    StableDiffusionPipeline.save_lora_weights(tmp_path / "lora", get_peft_model_state_dict(pipeline.unet))

    with pytest.raises(UserError, match="does not name its base; give the pipeline with --base"):
        merge(str(tmp_path / "lora"), str(tmp_path / "merged"))
    merge(str(tmp_path / "lora"), str(tmp_path / "merged"), base=str(tmp_path / "base"))
    merged = StableDiffusionPipeline.from_pretrained(tmp_path / "merged").unet
    with torch.no_grad():
        assert torch.allclose(merged(*inputs).sample, wanted, atol=1e-5)


def test_what_cannot_be_merged_is_one_line(sample: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "nameless").mkdir()
    (tmp_path / "nameless" / "adapter_config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("[")
    for adapter, output, message in (
        (str(sample[0]), "new", "holds no adapter"),
        ("nameless", "taken", "is there already"),
        ("nameless", "new", "names no base model; give it with --base"),
        ("broken", "new", "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            merge(str(tmp_path / adapter), str(tmp_path / output))
    assert not (tmp_path / "new").exists()
