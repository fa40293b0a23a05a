"""The README's table of ready-made files: each row equals the estimate of the file, which fits its GPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ckpt_ft.cli import main as cli
from ckpt_ft.units import format_bytes

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `([\w-]+)`, .*\[\w.*\]\((recipes/\S+\.yaml)\) \| `(\w+)` \| (\d.* GiB) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_readme_has_the_table() -> None:
    assert len(ROWS) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("card", "file", "recipe", "peak"), ROWS)
def test_figures_of_the_readme_equal_the_estimates(
    card: str, file: str, recipe: str, peak: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", "--config", str(ROOT / file), "--recipe", recipe, "--device", card, "--json"]
    launch = re.search(r"accelerate_configs/fsdp2\.yaml", (ROOT / file).read_text())
    words += ["--launch", str(ROOT / launch[0])] if launch else []
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    told = json.loads(capsys.readouterr().out)
    assert format_bytes(told["peak_reserved"]) == peak
    assert told["headroom"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("file", "more"), [
    ("recipes/diffusion_transformer/flux_lora_16gb.yaml", []),
    ("recipes/llm/llama3.1_8b_full_24gb.yaml", ["--offload", "all"]),  # set in its accelerate configuration
])  # fmt: skip
def test_figures_in_comments_of_recipe_files_equal_the_estimates(
    file: str, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = (
        r"predicted on an (\S+): ([\d.]+) GiB reserved, ([\d.]+) GiB in host memory, ([\d.]+) of ([\d.]+) s a step"
    )
    said = re.search(figures, (ROOT / file).read_text())
    assert said is not None
    card, reserved, host, waiting, seconds = said.groups()
    recipe = Path(file).parent.name
    words = ["estimate", "--config", str(ROOT / file), "--recipe", recipe, "--device", card, "--json", *more]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    told = json.loads(capsys.readouterr().out)
    assert [round(told[name] / 2**30, 1) for name in ("peak_reserved", "peak_host")] == [float(reserved), float(host)]
    assert told["headroom"] > 0
    assert told["seconds_parts"]["waiting for copies"] == pytest.approx(float(waiting), abs=0.05)
    assert told["seconds"] == pytest.approx(float(seconds), abs=0.05)
