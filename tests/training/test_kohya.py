"""A U-Net's LoRA under kohya's names: every key is converted, and the pipeline's output is unchanged."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny_unets import make_tiny_pipeline

from ckpt_ft.errors import UserError
from ckpt_ft.training.checkpoints import PIPELINE_LORA
from ckpt_ft.training.diffusion.denoiser import text_encoder_to_file
from ckpt_ft.training.merge import to_kohya

KINDS = {"sd2": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}


def saved(pipeline: Any, place: Path, text: bool = False, **settings: Any) -> int:
    """Saves a random LoRA of rank 4 on attention as the recipe does; returns the number of adapted layers."""
    parts = {"unet": ["to_q", "to_out.0"], **({"text_encoder": ["q_proj", "out_proj"]} if text else {})}
    layers: dict[str, Any] = {}
    for name, targets in parts.items():
        part = getattr(pipeline, name)
        part.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **settings))
        weights = get_peft_model_state_dict(part)
        weights = weights if name == "unet" else text_encoder_to_file(weights)
        layers[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(weights)
    more = _collate_lora_metadata({name: getattr(pipeline, name) for name in parts})
    type(pipeline).save_lora_weights(place, **layers, **more)
    return sum(len(layer) for layer in layers.values()) // 2


def noise(base: Path, lora: Path | None = None) -> torch.Tensor:
    """Returns the U-Net's output for zeros under a LoRA."""
    pipeline = DiffusionPipeline.from_pretrained(base)
    if lora is not None:
        pipeline.load_lora_weights(lora, weight_name=PIPELINE_LORA)
    unet = pipeline.unet
    width = unet.config.cross_attention_dim
    added = {}
    if unet.config.addition_embed_type == "text_time":
        sizes = 6 * unet.config.addition_time_embed_dim
        pooled = unet.config.projection_class_embeddings_input_dim - sizes
        added = {"text_embeds": torch.ones(1, pooled), "time_ids": torch.ones(1, 6)}
    with torch.no_grad():
        out: torch.Tensor = unet.eval()(
            torch.ones(1, unet.config.in_channels, 8, 8), torch.tensor([3]), torch.ones(1, 4, width),
            added_cond_kwargs=added,
        ).sample  # fmt: skip
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sd2", {"lora_alpha": 12}), ("sdxl", {"lora_alpha": 6, "use_rslora": True})],
)
def test_every_key_is_converted(
    tmp_path: Path, kind: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make_tiny_pipeline(kind, 0, (16, 32))
    pipeline.save_pretrained(tmp_path / "base")
    layers = saved(pipeline, tmp_path / "lora", text=kind == "sd2", **settings)
    file = to_kohya(str(tmp_path / "lora"), str(tmp_path / "kohya" / "lora.safetensors"))
    weights = load_file(file)
    assert len(weights) == 3 * layers
    assert all(name.startswith(("lora_unet_", "lora_te1_")) for name in weights)
    alphas = {value.item() for name, value in weights.items() if name.endswith(".alpha")}
    assert alphas == {settings["lora_alpha"] * (math.sqrt(4) if settings.get("use_rslora") else 1)}
    with caplog.at_level(logging.WARNING):
        found = noise(tmp_path / "base", file)
    assert not [record for record in caplog.records if "unexpected keys" in record.message]
    torch.testing.assert_close(found, noise(tmp_path / "base", tmp_path / "lora"), rtol=1e-5, atol=1e-6)
    assert (found - noise(tmp_path / "base")).abs().max() > 1e-3


def test_weights_without_kohya_names_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out.safetensors")
    with pytest.raises(UserError, match="holds no pytorch_lora_weights.safetensors; give the output_dir"):
        to_kohya(str(tmp_path), out)
    lora, weight = tmp_path / "lora.safetensors", torch.zeros(4, 4)
    save_file({"transformer.blocks.0.to_q.lora_A.weight": weight}, lora)
    with pytest.raises(UserError, match=r"transformer.blocks.0.to_q.lora_A.weight does not belong to a U-Net"):
        to_kohya(str(lora), out)
    save_file({"unet.q.lora_A.weight": weight, "unet.q.lora_magnitude_vector.weight": torch.ones(4)}, lora)
    with pytest.raises(UserError, match="is not plain LoRA"):
        to_kohya(str(lora), out)
    for half, other in (("A", "B"), ("B", "A")):
        save_file({f"unet.q.lora_{half}.weight": weight}, lora)
        with pytest.raises(UserError, match=f"an incomplete LoRA: it lacks unet.q.lora_{other}.weight"):
            to_kohya(str(lora), out)
    save_file({}, lora)
    with pytest.raises(UserError, match="an incomplete LoRA: it lacks all of it"):
        to_kohya(str(lora), out)
    with pytest.raises(UserError, match=r"give a new file, NAME.safetensors"):
        to_kohya(str(lora), str(lora))
    lora.write_bytes(b"none")
    with pytest.raises(UserError, match="cannot be read"):
        to_kohya(str(lora), out)
    assert not Path(out).exists()
