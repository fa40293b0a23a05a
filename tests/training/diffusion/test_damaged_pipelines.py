"""Pipelines with a missing, truncated or changed file are refused in one line before training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tiny_transformers import make_tiny_transformer
from tiny_unets import make_tiny_pipeline

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, TransformerArguments
from ckpt_ft.training.diffusion.denoiser import save_result
from ckpt_ft.training.diffusion.encoders import Encoders, checked_resolution, family_of, load_denoiser
from ckpt_ft.training.diffusion.families import UNET

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sd1")
    make_tiny_pipeline("sd1", 0, (16,)).save_pretrained(path)
    return path


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the pipeline, for damaging."""
    return Path(shutil.copytree(tiny, tmp_path / "pipeline"))


def edit(path: Path, **values: object) -> None:
    """Changes entries of a JSON object; None removes one."""
    changed = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


def test_old_configuration_without_default_entries_is_read(copied: Path) -> None:
    """Stable Diffusion 1.5's configuration has no entries for conditions that were introduced later."""
    side = json.loads((copied / "unet" / "config.json").read_text())["sample_size"]
    edit(copied / "unet" / "config.json", addition_embed_type=None)
    args = DiffusionModelArguments(pretrained_model_name_or_path=str(copied))
    family, config = family_of(args)
    assert config["addition_embed_type"] is None
    encoders = Encoders(args, family, torch.device("cpu"), torch.float32)
    assert checked_resolution(None, config, encoders) == side * 4
    edit(copied / "unet" / "config.json", sample_size=None)
    with pytest.raises(UserError, match="no sample_size; give --resolution"):
        checked_resolution(None, family_of(args)[1], encoders)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda root: (root / "unet" / "config.json").write_text("null"), "no usable unet"),
        (
            lambda root: edit(root / "unet" / "config.json", layers_per_block=10**9),
            "layers_per_block 1000000000 is no",
        ),
        (lambda root: (root / "model_index.json").write_text("{}"), "no usable model_index.json: KeyError"),
        (lambda root: (root / "model_index.json").unlink(), "no usable model_index.json"),
        (
            lambda root: edit(root / "model_index.json", _class_name=["code", "Pipe"]),
            "its pipeline is ['code', 'Pipe']; supported are",
        ),
        (lambda root: cut(root / "unet" / WEIGHTS), "no usable unet"),
        (lambda root: cut(root / "vae" / WEIGHTS), "no usable vae"),
        (lambda root: cut(root / "text_encoder" / "model.safetensors"), "no usable text_encoder"),
        (lambda root: lose_a_weight(root / "unet" / WEIGHTS), "its weights lack conv_in.weight and 0 others"),
        (lambda root: (root / "tokenizer" / "tokenizer.json").unlink(), "its tokenizer has no vocabulary"),
        (lambda root: (root / "tokenizer" / "tokenizer_config.json").unlink(), "its text encoder takes 12"),
        (lambda root: (root / "scheduler" / "scheduler_config.json").write_text("[]"), "no usable scheduler"),
    ],
)
def test_damaged_pipelines(copied: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(copied)
    with pytest.raises(UserError) as refused:
        load(DiffusionModelArguments(pretrained_model_name_or_path=str(copied)))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def load(args: DiffusionModelArguments) -> None:
    """Reads everything that the recipe reads of a pipeline before training, in the same order."""
    family, _ = family_of(args)
    Encoders(args, family, torch.device("cpu"), torch.float32)
    load_denoiser(args, family, torch.float32)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_weight(path: Path) -> None:
    save_file({name: value for name, value in load_file(path).items() if name != "conv_in.weight"}, path)


def test_unet_is_saved_if_the_pipeline_is_deleted_during_training(copied: Path, tmp_path: Path) -> None:
    args = DiffusionModelArguments(pretrained_model_name_or_path=str(copied))
    unet = load_denoiser(args, UNET, torch.float32)
    shutil.rmtree(copied)
    with pytest.raises(RuntimeError, match=f"the unet is in {tmp_path}/out/unet, and the rest of its pipeline"):
        save_result(unet, UNET, None, args, str(tmp_path / "out"))
    saved = UNet2DConditionModel.from_pretrained(tmp_path / "out" / "unet").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in unet.state_dict().items())


def test_tokenizer_without_its_configuration_is_refused(tmp_path: Path) -> None:
    make_tiny_transformer("flux").save_pretrained(tmp_path)
    (tmp_path / "tokenizer_2" / "tokenizer_config.json").unlink()
    args = TransformerArguments(pretrained_model_name_or_path=str(tmp_path), max_sequence_length=8)
    encoders = Encoders(args, family_of(args)[0], torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match="its tokenizers and text encoders take no prompt") as refused:
        encoders.encode_prompts(["a red circle"])
    assert "\n" not in str(refused.value)
