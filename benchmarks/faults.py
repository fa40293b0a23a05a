"""Kill recipes at random moments, resume them, and compare with runs that were left alone.

    python benchmarks/faults.py [--recipes llm image_classification diffusion_unet] [--kills 50] [--signal KILL]

Half of the kills come while something is written: as soon as a name comes to, or goes from, the output directory.
Each recipe is one chain: killed, resumed, killed ..., and then finished. Printed for each: kills, steps that had to be
made again, checkpoints that were torn (and passed over), and losses and weights that differ at the end: none may.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from ckpt_ft.errors import WorkFailed, run
from ckpt_ft.training.run.manifest import read_manifest, what_is_wrong
from ckpt_ft.training.run.resume import checkpoints, last_complete_checkpoint

ROOT = Path(__file__).parents[1]
_TRAINER = [
    "--use_cpu",
    "--max_steps",
    "{steps}",
    "--save_steps",
    "2",
    "--save_total_limit",
    "2",
    "--logging_steps",
    "1",
]
_TRAINER += ["--per_device_train_batch_size", "2", "--disable_tqdm", "true", "--report_to", "none"]
RECIPES = {
    "llm": [*_TRAINER, "--max_length", "32", "--use_peft", "--lora_dropout", "0.1"],
    "image_classification": [*_TRAINER, "--max_train_samples", "200", "--eval_strategy", "no"],
    "diffusion_unet": [
        "--max_train_steps", "{steps}", "--checkpointing_steps", "2", "--checkpoints_total_limit", "2",
        "--train_batch_size", "2", "--max_train_samples", "20", "--rank", "2", "--lora_dropout", "0.1", "--use_ema",
        "--validation_steps", "1000000",
    ],
}  # fmt: skip


@dataclass
class Chain:
    """What happened to one recipe."""

    recipe: str
    kills: int = 0
    within_a_write: int = 0
    lost_steps: list[int] = field(default_factory=list)
    torn: int = 0
    unequal: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        most = max(self.lost_steps, default=0)
        return (
            f"{self.recipe}: {self.kills} kills, {self.within_a_write} of them within a write; at most {most} steps "
            f"made again; {self.torn} torn checkpoints passed over; unequal: {', '.join(self.unequal) or 'nothing'}"
        )


def start(recipe: str, out: Path, steps: int) -> subprocess.Popen[bytes]:
    """The recipe in a process of its own, from its last whole checkpoint where it has one."""
    flags = [flag.replace("{steps}", str(steps)) for flag in RECIPES[recipe]]
    if last_complete_checkpoint(str(out)):
        flags += ["--resume_from_checkpoint", "latest"]
    elif checkpoints(out):
        flags.append("--overwrite_output_dir")  # the first one was torn: there is nothing to go on from
    command = [sys.executable, f"recipes/{recipe}.py", *flags, "--ac_report", "none", "--output_dir", str(out)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (out.parent / f"{out.name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)


def finish(recipe: str, out: Path, steps: int) -> None:
    """Run it to its end. Raises WorkFailed where it fails."""
    if start(recipe, out, steps).wait() != 0:
        raise WorkFailed(f"{recipe} failed: {(out.parent / f'{out.name}.log').read_text()[-2000:]}")


def listing(out: Path) -> set[str]:
    """The names in the output directory and in its checkpoints, hidden ones included."""
    return {str(path) for pattern in ("*", "*checkpoint-*/*") for path in out.glob(pattern)}


def kill_once(process: subprocess.Popen[bytes], out: Path, within: bool, number: int, draw: random.Random) -> bool:
    """Wait for a random moment of training and kill; False if the run ended before."""
    before = last_step(out)
    wanted = before + draw.randint(1, 4)
    while process.poll() is None and last_step(out) < wanted:
        time.sleep(0.005)
    if within:
        names = listing(out)
        while process.poll() is None and listing(out) == names:
            pass
        time.sleep(draw.random() * 0.02)
    else:
        time.sleep(draw.random() * 0.5)
    if process.poll() is not None:
        return False
    process.send_signal(number)
    process.wait()
    return True


def last_step(out: Path) -> int:
    """The newest checkpoint's step, whole or not; of the loop the last step that it logged."""
    named = [int(path.name.rpartition("-")[2]) for path in checkpoints(out)]
    log = out / "losses.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    logged = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max([*named, *logged, 0])


def losses(out: Path) -> list[float]:
    """Of every step, from the loop's log or the Trainer's state."""
    if (out / "losses.jsonl").exists():
        return [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def unequal(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs: "losses", or files of weights."""
    found = [] if losses(one) == losses(other) else ["losses"]
    for path in sorted(one.glob("*.safetensors")):
        ours, theirs = load_file(path), load_file(other / path.name)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            found.append(path.name)
    return found


def chain(recipe: str, kills: int, seed: int, number: int, root: Path) -> Chain:
    """Kill `recipe` `kills` times, finish it, and compare it with one that was left alone."""
    steps, out, whole = 6 + 10 * kills, root / f"{recipe}-killed", root / f"{recipe}-whole"
    finish(recipe, whole, steps)
    draw, done = random.Random(seed), Chain(recipe)
    while done.kills < kills:
        process = start(recipe, out, steps)
        within = done.kills % 2 == 1
        if not kill_once(process, out, within, number, draw):
            break
        done.kills += 1
        done.within_a_write += within
        done.torn += sum(read_manifest(path) is None for path in checkpoints(out))
        latest = last_complete_checkpoint(str(out))
        stood = int(latest.rpartition("-")[2]) if latest else 0
        done.lost_steps.append(max(0, last_step(out) - stood))
    finish(recipe, out, steps)
    done.unequal = unequal(out, whole) + [path.name for path in checkpoints(out) if what_is_wrong(path)]
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", default="KILL", choices=["KILL", "TERM", "INT"])
    args = parser.parse_args()
    number = signal.Signals[f"SIG{args.signal}"]
    with tempfile.TemporaryDirectory() as root:
        chains = []
        for recipe in args.recipes:
            chains.append(chain(recipe, args.kills, args.seed, number, Path(root)))
            print(chains[-1], flush=True)
    return 1 if any(done.unequal for done in chains) else 0


if __name__ == "__main__":
    run(main)
