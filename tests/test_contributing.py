"""The changes that CONTRIBUTING.md names: each works after an edit of the one file that it names.

Each test edits that file in a copy of the repository and asks the copy, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = dict(re.findall(r"^\| ([a-z ]+) \| `([\w/.]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    for folder in ("ckpt_ft", "benchmarks"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def asked(copied: Path, change: str, before: str, after: str, code: str) -> str:
    """Returns what `code` prints in the copy once the file of `change` has `after` in place of `before`."""
    path = copied / NAMED[change]
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copied), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copied, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_change_is_named() -> None:
    assert list(NAMED) == ["a card", "a model", "a setting", "a policy term", "a published row"]


def test_a_card_is_one_row(copied: Path) -> None:
    row = "x900, 9.0, 132, 40, 0.5, 3350, 67, 494.7, 989, 989, 1979, 0.78, 0.79, 0.71, 0.9, 35, 1, nvidia, x900pro"
    code = "from ckpt_ft.memory.gpus import find_gpu; print(find_gpu('NVIDIA X900 Pro').memory)"
    assert asked(copied, "a card", "\nh100,  ", f"\n{row}\nh100,  ", code) == f"{40 * 2**30}\n"


def test_a_model_is_one_entry(copied: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
    }  # fmt: skip
    parameters = 2 * 256 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128
    entry = {"dtype": "float32", "parameters": parameters, "source": "this test", "config": config}
    code = (
        "from ckpt_ft import estimate; from ckpt_ft.spec.training_spec import TrainingSpec; "
        "print(estimate(TrainingSpec.of('tiny-900', seq_length=16)).at_peak['parameters'])"
    )
    before, after = "{\n", f"{{\n{json.dumps('mine/Tiny-900')}: {json.dumps(entry)},\n"
    assert asked(copied, "a model", before, after, code) == f"{4 * parameters}\n"


def test_a_setting_is_one_line(copied: Path) -> None:
    code = (
        "from ckpt_ft.spec.settings import KINDS, entry_of; "
        "print([entry_of('warp_factor', KINDS[kind]).text for kind in ('llm', 'trl')])"
    )
    line = "[transformers]\nwarp_factor = no effect: it warps the log\n"
    printed = asked(copied, "a setting", "[transformers]\n", line, code)
    assert printed == "['it warps the log', 'it warps the log']\n"


def test_a_policy_term_is_one_line(copied: Path) -> None:
    """`save:norm` keeps the outputs of the norms: recomputation then runs none of the four again."""
    code = """
import torch
from torch import nn
from ckpt_ft import apply_policy
from ckpt_ft.memory.record.tracker import Tracker

for policy in ("full", "save:norm"):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    apply_policy(model, policy)
    with Tracker(model) as tracker:
        tracker.start_step()
        model(torch.randn(2, 8)).sum().backward()
    print(sum(op.name == "aten.native_layer_norm.default" for op in tracker.trace().ops))
"""
    before = '    "router": ("topk",),\n'
    assert asked(copied, "a policy term", before, f'{before}    "norm": ("native_layer_norm",),\n', code) == "8\n4\n"


def test_a_published_row_is_one_line(copied: Path) -> None:
    """The row's published figure is twice what is predicted, so its error is -50 %."""
    spec = {"model": "HuggingFaceTB/SmolLM2-135M", "dtype": "bfloat16", "seq_length": 64, "device": "t4"}
    fields = f"from ckpt_ft.spec.training_spec import TrainingSpec; spec = TrainingSpec.of(**{spec})"
    code = f"from ckpt_ft import estimate; {fields}; print(estimate(spec).peak_allocated)"
    nbytes = int(asked(copied, "a published row", "", "", code))
    row = {
        "group": "long", "name": "a new row", "column": "allocated", "unit": "GiB", "seconds": 0,
        "published": 2 * nbytes / 2**30, "spec": spec,
    }  # fmt: skip
    code = "from benchmarks.accuracy import described; row = next(described('long')); print(row.name, *row.cells)"
    printed = asked(copied, "a published row", "[\n", f"[\n{json.dumps(row)},\n", code)
    assert printed == f"a new row {2 * nbytes / 2**30:.2f} GiB {nbytes / 2**30:.2f} GiB -50.00 %\n"
