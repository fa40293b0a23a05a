"""Damaged YAML files, rows and lists of images are read, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from fuzz import ROUNDS, assert_one_line, damaged_lines, damaged_yaml
from PIL import Image

from ckpt_ft.errors import UserError
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import read_launch
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, LoopArguments
from ckpt_ft.training.images import ImageArguments, load_captioned
from ckpt_ft.training.models import ModelArguments, load_tokenizer
from ckpt_ft.training.run_arguments import RunArguments, parse_args
from ckpt_ft.training.text import DataArguments, encode_rows, load_rows

ROOT = Path(__file__).parents[1]
FEW = ROUNDS // 2  # for inputs that take longer


def refusals(path: Path, contents: Iterable[bytes], read: Callable[[], object]) -> int:
    """Returns how many of `contents` `read` refuses in `path`; it must accept the others."""
    count = 0
    for number, content in enumerate(contents):
        path.write_bytes(content)
        try:
            read()
        except UserError as error:
            count += 1
            assert_one_line(error, number)
    return count


LLM = (ModelArguments, DataArguments, ACArguments, RunArguments)
RECIPES = ("llm/qwen2.5_0.5b_full.yaml", "diffusion/sdxl_lora_24gb.yaml")
UNET = (DiffusionModelArguments, ImageArguments, LoopArguments, ACArguments)


@pytest.mark.parametrize(("name", "classes"), list(zip(RECIPES, (LLM, UNET), strict=True)))
def test_damaged_recipe_files(name: str, classes: tuple[type, ...], tmp_path: Path) -> None:
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    text = (ROOT / "recipes" / name).read_text(encoding="utf-8").replace("bf16: true", "bf16: false")
    contents = damaged_yaml(text, seed=3, rounds=FEW)
    argv = ["--config", str(path), "--output_dir", str(out)]
    assert refusals(path, contents, lambda: parse_args(classes, argv)) > FEW // 2
    assert not out.exists()


def test_damaged_launch_files(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    texts = [file.read_text() for file in sorted((ROOT / "accelerate_configs").glob("*.yaml"))]
    for seed, text in enumerate(texts):
        refusals(path, damaged_yaml(text, seed, ROUNDS // len(texts)), lambda: str(read_launch(path)[0]))
    assert len(texts) > 3


AXOLOTL = """base_model: HuggingFaceTB/SmolLM2-135M
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_target_modules: [q_proj, k_proj]
sequence_len: 512
optimizer: adamw_bnb_8bit
bf16: auto
"""


def test_damaged_training_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    texts = [(ROOT / "recipes" / name).read_text(encoding="utf-8") for name in RECIPES]
    for seed, text in enumerate([AXOLOTL, *texts]):
        refusals(path, damaged_yaml(text, seed, FEW), lambda: spec_of(path))
    path.write_text("base_model: m\nadapter: lora\nlora_target_modules: .nan\n")
    assert spec_of(path).adapter.lora_targets == ("nan",)


def spec_of(path: Path) -> TrainingSpec:
    """Returns the spec of `ckpt-ft estimate --config path`."""
    read = read_training_file(str(path))
    return TrainingSpec.of(read.model, **fields_of(read.flags))


CHAT = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"good day {number}"}]}
    for number in range(4)
]
PAIRS = [{"prompt": f"what is {number}?", "completion": "a number"} for number in range(4)]


@pytest.mark.parametrize("rows", [[{"text": f"text {number}"} for number in range(4)], CHAT, PAIRS])
def test_damaged_rows(rows: list[object], sample: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=str(sample[0])))
    path = tmp_path / "rows.jsonl"
    args = DataArguments(dataset_name=str(path), max_length=32)

    def read() -> None:
        encode_rows(load_rows(args, evaluate=False, seed=0)[0], tokenizer, args)

    assert refusals(path, damaged_lines(rows, seed=4, rounds=FEW // 3), read) > FEW // 6


def test_damaged_lists_of_images(tmp_path: Path) -> None:
    rows = [{"file_name": f"{number}.png", "text": f"picture {number}"} for number in range(4)]
    for row in rows:
        Image.new("RGB", (8, 8)).save(tmp_path / row["file_name"])
    args = ImageArguments(train_data_dir=str(tmp_path))
    contents = damaged_lines(rows, seed=5, rounds=FEW // 3)
    assert refusals(tmp_path / "metadata.jsonl", contents, lambda: list(load_captioned(args, 8))) > FEW // 6
