"""Recipes that are killed at random moments and resumed end as undisturbed runs do.

    KILLS=50 pytest -s -m slow tests/recipes/test_random_kills.py

Half of the kills come during a write: as soon as a name appears in the output directory or disappears from it. Of the
others, one in five comes at any time after the start, also while a checkpoint is read. Each recipe is one chain:
killed, resumed, killed ..., and then finished. The test prints for each chain the kills, incomplete files that they
left, and repeated steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ckpt_ft.training.checkpoints import checkpoints, last_complete_checkpoint, read_manifest, why_incomplete
from ckpt_ft.training.diffusion.loop import read_losses

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "4"))  # of each recipe
STARTING = 5.0  # seconds to load data, a model and a checkpoint
# Runs are forked from a process that has imported the libraries, because imports take longer than a run.
FORKED = multiprocessing.get_context("forkserver")
LIBRARIES = [
    "ckpt_ft.training.fit", "ckpt_ft.training.diffusion.loop", "ckpt_ft.training.diffusion.workload",
    "ckpt_ft.training.vision_language", "datasets", "peft", "transformers.models.llama.modeling_llama",
    "transformers.models.resnet.modeling_resnet", "transformers.models.llava_next.modeling_llava_next",
    "transformers.models.siglip.modeling_siglip", "diffusers.models.unets.unet_2d_condition",
    "diffusers.models.autoencoders.autoencoder_kl", "diffusers.models.transformers.transformer_flux",
]  # fmt: skip
_TRAINER = """
    --use_cpu --max_steps {steps} --save_steps 2 --save_total_limit 2 --logging_steps 1
    --per_device_train_batch_size 2 --disable_tqdm true --report_to none
"""
_LORA = " --use_peft --lora_dropout 0.1 "
_LOOP = """
    --max_train_steps {steps} --checkpointing_steps 2 --checkpoints_total_limit 2 --train_batch_size 2
    --max_train_samples 20 --rank 2 --lora_dropout 0.1 --use_ema --validation_steps 1000000
"""
RECIPES = {
    "llm": _TRAINER + _LORA + "--max_length 32",
    "image_classification": _TRAINER + "--max_train_samples 200 --eval_strategy no",
    "vlm": _TRAINER + _LORA + "--eval_strategy no --train_towers both",
    "diffusion_unet": _LOOP,
    "diffusion_transformer": _LOOP,
}


@dataclass
class Chain:
    """Results of one recipe; `lost`, `torn` and `unequal` must stay empty."""

    recipe: str
    kills: int = 0
    within_a_write: int = 0
    half_written: int = 0
    again: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.recipe}: {self.kills} kills, {self.within_a_write} of them within a write; {self.half_written} "
            f"left a checkpoint half-written; of {sum(self.again)} steps made again at most "
            f"{max(self.again, default=0)} at once; steps lost: {len(self.lost)}; incomplete checkpoints used: "
            f"{len(self.torn)}; unequal losses and weights: {', '.join(self.unequal) or 0}"
        )


@dataclass
class Started:
    """A run in its own process.

    resumed: step of the checkpoint from which it resumes, 0 for a new run. printed: size of its log at the start.
    at: start time, in seconds since the epoch.
    """

    process: BaseProcess
    out: Path
    resumed: int
    printed: int
    at: float

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    @property
    def step(self) -> int:
        """The last completed step: the loop logs each step, a Trainer prints each."""
        steps = [line["step"] for line in read_losses(str(self.out)) if line["step"] > self.resumed]
        said = log_of(self.out).read_bytes()[self.printed :].count(b"{'loss'")
        return self.resumed + max(len(steps), said)


def log_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def start(recipe: str, out: Path, steps: int) -> Started:
    """Starts the recipe from its last complete checkpoint, if there is one."""
    flags = RECIPES[recipe].format(steps=steps).split()
    latest = last_complete_checkpoint(str(out))
    if latest:
        flags += ["--resume_from_checkpoint", "latest"]
    elif checkpoints(out):
        # the first checkpoint was incomplete, so there is nothing to resume from
        flags.append("--overwrite_output_dir")
    argv = [f"recipes/{recipe}.py", *flags, "--ac_report", "none", "--output_dir", str(out)]
    log_of(out).touch()
    printed = log_of(out).stat().st_size
    process = FORKED.Process(target=run_recipe, args=(argv, log_of(out)))
    process.start()
    return Started(process, out, step_of(latest), printed, time.time())


def run_recipe(argv: list[str], log: Path) -> None:
    """Runs `python argv` in a new process with its output in `log`."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(ROOT)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def step_of(checkpoint: str | None) -> int:
    return int(checkpoint.rpartition("-")[2]) if checkpoint else 0


def finish(recipe: str, out: Path, steps: int) -> None:
    """Runs the recipe to its end."""
    process = start(recipe, out, steps).process
    process.join()
    require(process.exitcode, out)


def require(code: int | None, out: Path) -> None:
    if code != 0:
        raise AssertionError(f"{out.name} ended with {code}: {log_of(out).read_text(errors='replace')[-2000:]}")


def listing(out: Path) -> set[str]:
    """Returns the names in the output directory and in its checkpoints, including hidden ones."""
    return {str(path) for pattern in ("*", "*checkpoint-*/*") for path in out.glob(pattern)}


def kill_once(run: Started, within: bool, number: int, draw: random.Random) -> bool:
    """Waits for a random moment (during a write, or any) and kills; False if the run ended before."""
    if not within and draw.random() < 0.2:
        until = time.monotonic() + draw.uniform(0, STARTING)
        while run.running and time.monotonic() < until:
            time.sleep(0.01)
    else:
        wanted = run.resumed + draw.randint(1, 4)
        while run.running and run.step < wanted:
            time.sleep(0.005)
        if within:
            names = listing(run.out)
            while run.running and listing(run.out) == names:
                time.sleep(0.0005)
        time.sleep(draw.random() * (0.02 if within else 0.3))
    if not run.running:
        require(run.process.exitcode, run.out)
        return False
    assert run.process.pid is not None
    os.kill(run.process.pid, number)
    run.process.join()
    return True


def left_half(run: Started) -> bool:
    """Whether the run left a checkpoint without a manifest or under a hidden name."""
    torn = [path for path in checkpoints(run.out) if read_manifest(path) is None]
    return any(path.stat().st_mtime > run.at for path in [*torn, *run.out.glob(".*checkpoint-*")])


def reads(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint can be read completely, checked without its manifest."""
    try:
        for path in checkpoint.rglob("*"):
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix in (".pt", ".pth", ".bin", ".pkl") and ZipFile(path).testzip() is not None:
                return False
    except (OSError, ValueError, BadZipFile, SafetensorError):
        return False
    return True


def losses(out: Path) -> dict[int, float]:
    """Returns the loss of every step, from the loop's log or the Trainer's state."""
    entries = read_losses(str(out)) or json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {int(entry["step"]): entry["loss"] for entry in entries if "loss" in entry}


def unequal(one: Path, other: Path) -> list[str]:
    """Returns the differences between two finished runs: "losses", or names of weight files."""
    found = [] if losses(one) == losses(other) else ["losses"]
    weights = sorted(path.relative_to(one) for path in one.glob("*.safetensors"))
    assert weights, "a finished run has weights"
    for path in weights:
        ours, theirs = load_file(one / path), load_file(other / path)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            found.append(str(path))
    return found


def chain(recipe: str, kills: int, seed: int, number: int, root: Path) -> Chain:
    """Kills `recipe` `kills` times, finishes it, and compares it with an undisturbed run."""
    steps, out, whole = 6 + 10 * kills, root / f"{recipe}-killed", root / f"{recipe}-whole"
    finish(recipe, whole, steps)
    draw, done = random.Random(seed), Chain(recipe)
    while done.kills < kills:
        run = start(recipe, out, steps)
        within = done.kills % 2 == 1
        if not kill_once(run, within, number, draw):
            break
        done.kills += 1
        done.within_a_write += within
        done.half_written += left_half(run)
        latest = last_complete_checkpoint(str(out))
        done.again.append(run.step - step_of(latest))
        if latest and not reads(Path(latest)):
            done.torn.append(latest)
    finish(recipe, out, steps)
    done.lost = sorted(losses(whole).keys() - losses(out).keys())
    done.torn += [path.name for path in checkpoints(out) if why_incomplete(path) or not reads(path)]
    done.unequal = unequal(out, whole)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_runs_end_as_undisturbed_ones(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    FORKED.set_forkserver_preload(LIBRARIES)
    done = chain(recipe, KILLS, 0, signal.SIGKILL, tmp_path)
    print(done)
    assert done.kills >= KILLS / 2  # the last ones may come after the end
    assert (done.lost, done.torn, done.unequal) == ([], [], [])
