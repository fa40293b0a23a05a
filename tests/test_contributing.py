"""The changes that CONTRIBUTING.md names: each works after an edit of the one file that it names.

The files are edited in a copy of the repository, and one process asks the copy about all changes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMED = dict(re.findall(r"^\| ([a-z ]+) \| `([\w/.]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip
PARAMETERS = 2 * 256 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128
MODEL = {"dtype": "float32", "parameters": PARAMETERS, "source": "this test", "config": CONFIG}
SPEC = {"model": "tiny-900", "dtype": "bfloat16", "seq_length": 64, "device": "t4"}
ROW = {
    "group": "long", "name": "a new row", "column": "allocated", "unit": "GiB", "seconds": 0, "published": 1.0,
    "spec": SPEC,
}  # fmt: skip
CARD = "x900, 9.0, 132, 40, 0.5, 3350, 67, 494.7, 989, 989, 1979, 0.78, 0.79, 0.71, 0.9, 35, 1, nvidia, x900pro"
# change -> what stands in the file, what is put in its place, and code that sets `found`
CHANGES = {
    "a card": (
        "\nh100,  ", f"\n{CARD}\nh100,  ",
        "from ckpt_ft.memory.gpus import find_gpu; found = find_gpu('NVIDIA X900 Pro').memory",
    ),
    "a model": (
        "{\n", f"{{\n{json.dumps('mine/Tiny-900')}: {json.dumps(MODEL)},\n",
        "found = estimate(TrainingSpec.of('tiny-900', seq_length=16)).at_peak['parameters']",
    ),
    "a setting": (
        "[transformers]\n", "[transformers]\nwarp_factor = no effect: it warps the log\n",
        "from ckpt_ft.spec.settings import KINDS, entry_of\n"
        "found = [entry_of('warp_factor', KINDS[kind]).text for kind in ('llm', 'trl')]",
    ),
    "a policy term": (
        '    "router": ("topk",),\n', '    "router": ("topk",),\n    "norm": ("native_layer_norm",),\n',
        """
import torch
from torch import nn
from ckpt_ft import apply_policy
from ckpt_ft.memory.record.tracker import Tracker

found = []
for policy in ("full", "save:norm"):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    apply_policy(model, policy)
    with Tracker(model) as tracker:
        tracker.start_step()
        model(torch.randn(2, 8)).sum().backward()
    found.append(sum(op.name == "aten.native_layer_norm.default" for op in tracker.trace().ops))
""",
    ),
    "a published row": (
        "[\n", f"[\n{json.dumps(ROW)},\n",
        "from benchmarks.accuracy import described\nrow = next(described('long'))\n"
        f"found = [row.name, row.cells, estimate(TrainingSpec.of(**{SPEC})).peak_allocated]",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the copy answers about each change."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("ckpt_ft", "benchmarks"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    code = ["import json", "from ckpt_ft import estimate", "from ckpt_ft.spec.training_spec import TrainingSpec"]
    code.append("answers = {}")
    for change, (before, after, asks) in CHANGES.items():
        text = (root / NAMED[change]).read_text(encoding="utf-8")
        assert before in text
        (root / NAMED[change]).write_text(text.replace(before, after, 1), encoding="utf-8")
        code.append(f"{asks}\nanswers[{change!r}] = found")
    code.append("print(json.dumps(answers))")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_every_change_is_named_with_a_file_of_its_own() -> None:
    assert list(NAMED) == list(CHANGES)
    assert len(set(NAMED.values())) == len(NAMED)


def test_a_card_is_one_row(found: dict[str, Any]) -> None:
    assert found["a card"] == 40 * 2**30


def test_a_model_is_one_entry(found: dict[str, Any]) -> None:
    assert found["a model"] == 4 * PARAMETERS


def test_a_setting_is_one_line(found: dict[str, Any]) -> None:
    assert found["a setting"] == ["it warps the log", "it warps the log"]


def test_a_policy_term_is_one_line(found: dict[str, Any]) -> None:
    """`save:norm` keeps the outputs of the norms: recomputation then runs none of the four again."""
    assert found["a policy term"] == [8, 4]


def test_a_published_row_is_one_line(found: dict[str, Any]) -> None:
    name, cells, nbytes = found["a published row"]
    gib = nbytes / 2**30
    assert (name, cells) == ("a new row", ["1.00 GiB", f"{gib:.2f} GiB", f"{100 * (gib - 1):+.2f} %"])
