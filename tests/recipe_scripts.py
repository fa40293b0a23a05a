"""Loads the recipes, which are scripts and no package, as modules, and runs them in the tests' process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
