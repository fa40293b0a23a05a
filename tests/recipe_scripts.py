"""Loads the recipes, which are scripts and no package, as modules, and runs them in the tests' process."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file

from ckpt_ft.training.diffusion.loop import read_losses

ROOT = Path(__file__).parents[1]


def load_recipe(name: str) -> ModuleType:
    """Loads recipes/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", ROOT / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget_process() -> None:
    """Resets accelerate's state of this process, so that the next run is like a new process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def history(out: Path, key: str = "loss") -> list[float]:
    """Returns the values of `key` in the Trainer's log of the run in `out`."""
    state = json.loads((out / "trainer_state.json").read_text())
    return [entry[key] for entry in state["log_history"] if key in entry]


def assert_same_weights(one: Path, other: Path) -> None:
    """Compares two files tensor by tensor, because the order in a file's header is not fixed."""
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def copy_checkpoint(run: Path, step: int, part: Path) -> Path:
    """Copies the checkpoint that a run wrote after `step`, and its losses, to `part`, which is returned."""
    shutil.copytree(run / f"checkpoint-{step}", part / f"checkpoint-{step}")
    shutil.copy(run / "losses.jsonl", part)
    return part


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def losses_of(recipe: ModuleType, base: str, out: Path, *flags: str) -> list[float]:
    """Returns the losses of a diffusion recipe's run on the pipeline in `base`, with output in `out`."""
    forget_process()
    recipe.main(["--pretrained_model_name_or_path", base, "--output_dir", str(out), *flags])
    return [line["loss"] for line in read_losses(str(out))]


def losses_on_two_ranks(recipe: str, base: str, out: Path, *flags: str) -> list[float]:
    """Returns the losses of a script that torchrun starts on two ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", recipe]
        + ["--pretrained_model_name_or_path", base, "--output_dir", str(out), *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [line["loss"] for line in read_losses(str(out))]
