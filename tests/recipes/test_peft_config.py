"""`--peft_config` in every recipe: adapters other than LoRA are trained, predicted, resumed, loaded and merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from recipe_scripts import forget_process, history, load_recipe
from tiny_transformers import make_tiny_transformer
from tiny_unets import make_tiny_pipeline
from transformers import AutoModelForCausalLM
from versions import slow_except

from ckpt_ft.errors import UserError
from ckpt_ft.training.checkpoints import PIPELINE_LORA
from ckpt_ft.training.diffusion.loop import read_losses

pytestmark = pytest.mark.usefixtures("one_process")

# by name: the file's content besides the adapted modules
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4},
    "dora": {"peft_type": "LORA", "r": 4, "use_dora": True},
    "rslora": {"peft_type": "LORA", "r": 4, "use_rslora": True, "lora_alpha": 8},
    "pissa": {"peft_type": "LORA", "r": 4, "init_lora_weights": "pissa"},
    "lokr": {"peft_type": "LOKR", "r": 4},
    "loha": {"peft_type": "LOHA", "r": 4},
    "oft": {"peft_type": "OFT", "r": 0, "oft_block_size": 8},
    "boft": {"peft_type": "BOFT", "boft_block_size": 4},
    "hra": {"peft_type": "HRA"},
    "vera": {"peft_type": "VERA", "r": 4},  # all layers share a part of it
}


def written(folder: Path, kind: str, targets: list[str]) -> str:
    file = folder / f"{kind}.json"
    file.write_text(json.dumps({"target_modules": targets, **KINDS[kind]}))
    return str(file)


def repeated(run: Callable[[Path, list[str]], list[float]], out: Path) -> list[float]:
    """Returns the losses of a run, and asserts that a run resumed from its second step has the same, bit for bit."""
    losses = run(out, [])
    part = out.with_name(f"{out.name}-part")
    shutil.copytree(out / "checkpoint-2", part / "checkpoint-2")
    if (out / "losses.jsonl").exists():
        shutil.copy(out / "losses.jsonl", part)
    assert run(part, ["--resume_from_checkpoint", "latest"]) == losses
    assert len(losses) == 4
    return losses


def assert_predicted(out: Path) -> None:
    """Asserts that the prediction is within 0.5 % of the measurement."""
    [rank] = json.loads((out / "memory_report.json").read_text())["ranks"]
    measured = max(peak["allocated"] for peak in rank["peaks"].values())
    assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)


@pytest.mark.filterwarnings("ignore")  # peft warns about its defaults
@pytest.mark.parametrize("kind", slow_except(KINDS, "oft"))
def test_peft_config_of_causal_models(llm: ModuleType, sample: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    config = written(tmp_path, kind, ["q_proj", "v_proj"])

    def run(out: Path, more: list[str]) -> list[float]:
        flags = [
            "--max_steps",
            "4",
            "--max_length",
            "64",
            "--per_device_train_batch_size",
            "8",
            "--logging_steps",
            "1",
        ]
        flags += ["--use_cpu", "--save_steps", "2", "--disable_tqdm", "true", "--ac_report", "json", "--peft_config"]
        llm.main([*flags, config, "--learning_rate", "1e-2", "--output_dir", str(out), *more])
        return history(out)

    out = tmp_path / "out"
    repeated(run, out)
    assert_predicted(out)
    ids = torch.arange(32).view(1, -1)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(sample[0]).eval()(ids).logits
        tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sample[0]), out).eval()(ids).logits
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sample[0]), out)
        adapted.merge_and_unload(safe_merge=True).save_pretrained(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
    assert (tuned - plain).abs().max() > 1e-3
    assert torch.allclose(merged, tuned, atol=1e-5)


def drawn(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    image = pipeline("a red circle", height=32, width=32, num_inference_steps=2, generator=noise).images[0]
    return np.asarray(image).astype(int)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("base", "kind"),
    [
        ("sd2", "lokr"),
        *(
            pytest.param("sd2", kind, marks=pytest.mark.slow)
            for kind in ("dora", "rslora", "pissa", "loha", "boft", "hra")
        ),
        *(pytest.param("flux", kind, marks=pytest.mark.slow) for kind in ("lokr", "oft", "vera", "dora")),
    ],
)
def test_peft_config_of_a_diffusion_model(tmp_path: Path, base: str, kind: str) -> None:
    transformer = base == "flux"
    recipe = load_recipe("diffusion_transformer" if transformer else "diffusion_unet")
    made = make_tiny_transformer("flux", heads=4, layers=2) if transformer else make_tiny_pipeline(base, 0, (16, 32))
    made.save_pretrained(tmp_path / "base")
    config = written(tmp_path, kind, ["to_q", "to_v"])

    def run(out: Path, more: list[str]) -> list[float]:
        forget_process()
        flags = ["--max_train_steps", "4", "--max_train_samples", "16", "--train_batch_size", "8"]
        flags += ["--pretrained_model_name_or_path", str(tmp_path / "base"), "--peft_config", config]
        flags += ["--learning_rate", "1e-2", "--lr_warmup_steps", "1", "--checkpointing_steps", "2", "--ac_report"]
        recipe.main([*flags, "json", "--resolution", "32", "--output_dir", str(out), *more])
        return [line["loss"] for line in read_losses(str(out))]

    out = tmp_path / "out"
    repeated(run, out)
    assert_predicted(out)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "base")
    plain = drawn(pipeline)
    if kind in ("dora", "rslora"):  # kinds of LoRA that a pipeline loads itself
        pipeline.load_lora_weights(out, weight_name=PIPELINE_LORA)
    else:
        PeftModel.from_pretrained(pipeline.transformer if transformer else pipeline.unet, out)  # in place
    tuned = drawn(pipeline)
    assert (tuned != plain).any()
    if kind in ("dora", "rslora"):
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        assert np.abs(drawn(pipeline) - tuned).max() <= 1


@pytest.mark.filterwarnings("ignore")
def test_head_of_a_classifier_is_trained_with_adapters(tmp_path: Path) -> None:
    recipe = load_recipe("image_classification")
    config = tmp_path / "loha.json"
    config.write_text('{"peft_type": "LOHA", "r": 2}')
    flags = ["--use_cpu", "--max_steps", "2", "--per_device_train_batch_size", "4", "--eval_strategy", "no"]
    flags += ["--disable_tqdm", "true", "--ac_report", "json", "--save_strategy", "no", "--peft_config", str(config)]
    recipe.main([*flags, "--output_dir", str(tmp_path / "out")])
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert saved["peft_type"] == "LOHA"
    assert "classifier" in saved["modules_to_save"]
    assert any("convolution" in name for name in saved["target_modules"])
    assert_predicted(tmp_path / "out")
    config.write_text('{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}')
    with pytest.raises(UserError, match="PROMPT_TUNING is for the language models of recipes/llm.py"):
        recipe.main([*flags, "--output_dir", str(tmp_path / "other")])
    assert not list((tmp_path / "other").glob("adapter*"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_peft_config_of_preference_training(sample: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("trl")
    config = written(tmp_path, "lokr", ["q_proj", "v_proj"])
    flags = ["--use_cpu", "--max_steps", "2", "--max_length", "64", "--per_device_train_batch_size", "2"]
    flags += ["--disable_tqdm", "true", "--ac_report", "json", "--save_strategy", "no", "--peft_config", config]
    load_recipe("dpo").main([*flags, "--output_dir", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LOKR"
    assert_predicted(tmp_path / "out")
