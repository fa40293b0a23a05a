"""recipes/vlm.py on a Qwen2.5-VL: a processor without torchvision, and weights saved under other names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import PeftModel
from PIL import Image
from recipe_scripts import history, load_recipe
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from ckpt_ft.errors import UserError
from ckpt_ft.training.samples.language import make_tokenizer

MARKS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|end|>\n{% endfor %}"
)
VISION = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8},
    "qwen2_5_vl": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16, "patch_size": 8,
        "window_size": 32, "fullatt_block_indexes": [0],
    },
    "qwen3_vl": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16, "patch_size": 8,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    },
}  # fmt: skip
PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


@pytest.fixture(scope="module")
def vlm() -> ModuleType:
    return load_recipe("vlm")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_of("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


def made_of(kind: str, made: Path) -> Path:
    """Creates a model's directory as on the Hub, with rows that have two images of different sizes."""
    words = make_tokenizer(["What is it? red green"], extra=list(MARKS.values()))
    words.save_pretrained(made)
    text = {
        "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4},
    }  # fmt: skip
    ids = {name: words.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION[kind], **ids)
    AutoModelForImageTextToText.from_config(config).save_pretrained(made)
    Qwen2VLImageProcessorPil(patch_size=8, min_pixels=256, max_pixels=4096).save_pretrained(made)
    settings = made / "preprocessor_config.json"
    named = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": PROCESSORS[kind]}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **named}))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    lines = []
    for at in range(8):
        colour = ("red", "green")[at % 2]
        Image.new("RGB", (48, 48 * (at % 2 + 1)), colour).save(made / f"{at}.png")
        turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": colour}]
        lines.append(json.dumps({"messages": turns, "images": [f"{at}.png"]}))
    (made / "rows.jsonl").write_text("\n".join(lines))
    return made


def train(vlm: ModuleType, qwen: Path, out: Path, *flags: str) -> list[float]:
    """Returns the losses of a run of two steps, with a checkpoint and an evaluation after each."""
    small = [
        "--max_steps", "2", "--save_steps", "1", "--logging_steps", "1", "--per_device_train_batch_size", "2",
        "--eval_strategy", "steps", "--eval_steps", "1", "--test_split_size", "0.25", "--disable_tqdm", "true",
    ]  # fmt: skip
    data = ["--model_name_or_path", str(qwen), "--dataset_name", str(qwen / "rows.jsonl")]
    vlm.main(["--use_cpu", *data, *small, "--output_dir", str(out), "--ac_report", "none", *flags])
    return history(out)


def test_qwen_is_trained_resumed_and_its_best_checkpoint_kept(vlm: ModuleType, qwen: Path, tmp_path: Path) -> None:
    """Weights are saved under the published names, which a Trainer alone would not read back."""
    flags = ["--train_towers", "both", "--ac_policy", "full@language,full@vision"]
    flags += ["--load_best_model_at_end", "--metric_for_best_model", "eval_loss", "--greater_is_better", "true"]
    losses = train(vlm, qwen, tmp_path, *flags)
    saved = load_file(tmp_path / "model.safetensors")
    assert "visual.merger.ln_q.weight" in saved  # not as in the model, model.visual...
    best = json.loads((tmp_path / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert best.endswith("checkpoint-1")  # the worse one, so that it is not the last
    kept = load_file(Path(best) / "model.safetensors")
    assert all(torch.equal(kept[name], saved[name]) for name in saved)
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert train(vlm, qwen, tmp_path, *flags, "--resume_from_checkpoint", "latest") == losses
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["video_processor"]["size"] == {"longest_edge": 4096, "shortest_edge": 256}


def test_max_pixels_is_saved_in_the_processor(vlm: ModuleType, qwen: Path, tmp_path: Path) -> None:
    train(vlm, qwen, tmp_path, "--use_peft", "--max_steps", "1", "--max_pixels", "1024")
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["image_processor"]["size"] == {"longest_edge": 1024, "shortest_edge": 256}


@pytest.mark.parametrize("kind", [pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen3_vl"])
def test_related_models_are_trained_resumed_and_predicted(vlm: ModuleType, tmp_path: Path, kind: str) -> None:
    (tmp_path / "model").mkdir()
    model, out = made_of(kind, tmp_path / "model"), tmp_path / "out"
    flags = ["--use_peft", "--lora_r", "4", "--train_towers", "both", "--ac_policy", "full@language"]
    flags += ["--ac_report", "json"]
    losses = train(vlm, model, out, *flags)
    (rank,) = json.loads((out / "memory_report.json").read_text())["ranks"]
    for phase in ("forward", "backward", "optimizer"):
        assert rank["predicted"]["peaks"][phase] == pytest.approx(rank["peaks"][phase]["allocated"], rel=0.005)
    adapted = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model), out).state_dict()
    trained = [name for name, value in adapted.items() if "lora_B" in name and value.abs().max() > 0]
    assert any("visual" in name for name in trained)
    assert any("language_model" in name for name in trained)
    shutil.rmtree(out / "checkpoint-2")
    assert train(vlm, model, out, *flags, "--resume_from_checkpoint", "latest") == losses


@pytest.mark.slow  # it tries batch sizes
def test_largest_batch_fits_the_budget(vlm: ModuleType, qwen: Path, tmp_path: Path) -> None:
    asked = ["--train_towers", "both", "--find_max_batch_size", "--ac_budget", "12MiB", "--ac_report", "json"]
    train(vlm, qwen, tmp_path, *asked, "--ac_policy", "none")
    report = json.loads((tmp_path / "memory_report.json").read_text())
    assert report["max_batch"]["proved"] > 2
    assert max(phase["allocated"] for phase in report["ranks"][0]["peaks"].values()) <= 12 << 20


@pytest.mark.parametrize("image", ["", "<image>"])
def test_image_token_in_a_text_is_refused(vlm: ModuleType, qwen: Path, tmp_path: Path, image: str) -> None:
    Image.new("RGB", (48, 48)).save(tmp_path / "0.png")
    turns = [{"role": "user", "content": f"{image}What is <|image_pad|>?"}, {"role": "assistant", "content": "red"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns, "images": ["0.png"] if image else []}))
    with pytest.raises(UserError, match=r"^row 1: its text holds <\|image_pad\|>, [^\n]*$"):
        train(vlm, qwen, tmp_path / "out", "--dataset_name", str(tmp_path / "rows.jsonl"), "--eval_strategy", "no")
