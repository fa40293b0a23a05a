"""Checks every claim on one CUDA GPU: offline, each case in its own process, in under 8 minutes.

    python benchmarks/gpu.py                 # JSON, Markdown and pictures in benchmarks/results/
    python benchmarks/gpu.py --dry-run       # the same code on the CPU at toy size; its figures mean nothing

Models have random weights and known configurations. An out-of-memory error is a result; a case for which no
time is left is recorded as not reached. Without diffusers the U-Nets are skipped, and the page says so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# libraries ask for CUDA on import, which this process must not initialize
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from benchmarks.on_gpu import isolated, work
from benchmarks.on_gpu.claims import verdicts
from benchmarks.on_gpu.isolated import Outcome, call
from benchmarks.on_gpu.report import markdown, pictures
from benchmarks.on_gpu.workloads import (
    BUDGET,
    CORE,
    DRY_BUDGET,
    DRY_LARGE,
    DRY_SMALL,
    DRY_SPECS,
    LARGE_BATCH,
    SMALL_BATCH,
    SPECS,
    Spec,
)
from ckpt_ft.errors import UserError, WorkFailed, run
from ckpt_ft.memory.measure.report import provenance

HERE = Path(__file__).resolve().parent
CASE_LIMIT = 60.0  # seconds that one case may take
TESTS_RESERVE = 60.0  # seconds reserved for the tests marked gpu
PLAN_ROWS = 5


class Session:
    """One run of all cases, the most informative first, until the time is used up."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.dry, self.began, self.limit = arguments.dry_run, time.perf_counter(), 60 * arguments.minutes
        self.device: dict[str, Any] = {} if self.dry else _device()
        self.gpu = self.device.get("gpu")
        specs = DRY_SPECS if self.dry else SPECS
        small, large = (DRY_SMALL, DRY_LARGE) if self.dry else (SMALL_BATCH, LARGE_BATCH)
        self.specs = [spec for spec in (*specs, small, large) if not arguments.only or spec.name in arguments.only]
        if not self.specs:
            raise UserError(f"--only: no such workload ({', '.join(spec.name for spec in (*specs, small, large))})")
        self.budget = DRY_BUDGET if self.dry else BUDGET
        self.cases: list[dict[str, Any]] = []

    @property
    def left(self) -> float:
        """Returns the seconds left for cases."""
        return self.limit - TESTS_RESERVE * (not self.dry) - (time.perf_counter() - self.began)

    def run(self) -> dict[str, Any]:
        """Runs everything except the suite's tests; returns the content of the JSON file."""
        self._steps()
        self._largest_batches()
        plan = self._plan()
        results = {
            "title": "Dry run" if self.dry else f"Measured on {self.device['name']}",
            "dry_run": self.dry,
            "date": datetime.date.today().isoformat(),
            "provenance": provenance(),
            "device": self.device,
            "cases": self.cases,
            "plan": plan,
            "tests": {},
            "seconds": time.perf_counter() - self.began,
        }
        return {**results, "claims": verdicts(results)}

    def with_tests(self, results: dict[str, Any]) -> dict[str, Any]:
        """Returns `results` with the outcome of the tests marked gpu, run in the remaining time."""
        results = {**results, "tests": self._tests(), "seconds": time.perf_counter() - self.began}
        return {**results, "claims": verdicts(results)}

    def _ordered(self) -> list[tuple[Spec, str]]:
        """Returns each workload's most informative policies first, then the others."""
        everything = [(spec, policy) for spec in self.specs for policy in spec.policies]
        telling = [pair for pair in everything if pair[1] in (*CORE, "save:attention+matmul+conv", "stages")]
        return telling + [pair for pair in everything if pair not in telling]

    def _steps(self) -> None:
        """Runs predictions on other cores while the GPU measures one case at a time."""
        jobs = self._ordered()
        with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4))) as pool:
            predictions: list[Future[Outcome]] = [
                pool.submit(call, work.predict, spec, policy, self.gpu, limit=CASE_LIMIT) for spec, policy in jobs
            ]
            for (spec, policy), prediction in zip(jobs, predictions, strict=True):
                case: dict[str, Any] = {
                    "workload": spec.name,
                    "policy": policy,
                    "batch": spec.batch,
                    "settings": spec.settings,
                }
                if self.left <= 0:
                    prediction.cancel()
                    self.cases.append({**case, "status": "not reached", "message": "out of time"})
                    continue
                measured = call(work.measure, spec, policy, limit=min(CASE_LIMIT, self.left))
                predicted = prediction.result()
                message = measured.message or (f"prediction: {predicted.message}" if predicted.message else "")
                case |= {
                    "status": measured.status,
                    "message": message,
                    "measured": measured.value,
                    "predicted": predicted.value,
                }
                self.cases.append(case)
                self._say(case)

    def _largest_batches(self) -> None:
        for spec in self.specs[: 1 if self.dry else 3]:
            for policy in spec.policies[: 1 if self.dry else 2]:
                found = self._timed(work.largest_batch, spec, policy, self.budget)
                case = {
                    "workload": f"{spec.name}, largest batch in {self.budget}",
                    "policy": policy,
                    "batch": spec.batch,
                }
                self.cases.append(
                    {**case, "status": found.status, "message": found.message, "largest_batch": found.value}
                )
                self._say(self.cases[-1])

    def _plan(self) -> list[dict[str, Any]]:
        """Measures the planner's rows for the first workload, each at its batch size."""
        spec = self.specs[0]
        made = self._timed(work.make_plan, spec, self.gpu, self.budget, ["none", "full"] if self.dry else None)
        rows: list[dict[str, Any]] = (made.value or [])[: 1 if self.dry else PLAN_ROWS]
        if made.status != "ok":
            self.cases.append(
                {
                    "workload": f"{spec.name}, plan",
                    "policy": "auto",
                    "batch": 0,
                    "status": made.status,
                    "message": made.message,
                }
            )
        for row in rows:
            at = Spec(spec.name, spec.model, row["batch"], (), spec.settings)
            seen = self._timed(work.measure, at, row["policy"])
            row["status"] = seen.status
            if seen.value:
                row |= {
                    "measured_samples_per_second": row["batch"] / seen.value["seconds"],
                    "measured_reserved": seen.value["reserved"],
                }
        return rows

    def _timed(self, function: Any, *arguments: Any) -> Outcome:
        """Calls a function within the remaining time."""
        if self.left <= 0:
            return Outcome("not reached", None, "out of time", 0.0)
        return call(function, *arguments, limit=min(2 * CASE_LIMIT, self.left))

    def _tests(self) -> dict[str, Any]:
        """Runs the suite's tests marked gpu."""
        if self.dry:
            return {"message": "dry run: no GPU"}
        limit = max(TESTS_RESERVE / 2, self.limit - (time.perf_counter() - self.began))
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"message": f"not done after {limit:.0f} s"}
        if done.returncode == 5:
            return {"message": "no tests marked gpu were found"}
        return {"rc": done.returncode, "tail": " ".join(done.stdout.strip().splitlines()[-1:])}

    def _say(self, case: dict[str, Any]) -> None:
        peak = (case.get("measured") or {}).get("allocated")
        outcome = f"{case['status']} " + (f"{peak / 2**30:.2f} GiB" if peak else case["message"])
        spent = f"[{time.perf_counter() - self.began:5.0f} s]"
        print(f"{spent} {case['workload']}, {case['policy']}: {outcome}", file=sys.stderr, flush=True)


def _device() -> dict[str, Any]:
    """Returns the GPU, asked in another process because this one never initializes CUDA."""
    if not torch.cuda.device_count():
        raise UserError("no CUDA device here; --dry-run runs the same code on the CPU at toy size")
    found = call(work.device_facts, limit=CASE_LIMIT)
    if not found.value:  # CUDA does not survive a fork of a process that has initialized it
        isolated.start_method = "spawn"
        found = call(work.device_facts, limit=CASE_LIMIT)
    if not found.value:
        raise WorkFailed(f"the GPU could not be asked what it is: {found.message}")
    facts: dict[str, Any] = found.value
    return facts


def write(results: dict[str, Any], folder: Path) -> Path:
    """Writes JSON, Markdown and, with matplotlib, pictures; returns the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = (
        "dry-run" if results["dry_run"] else re.sub(r"[^a-z0-9]+", "-", results["device"]["name"].lower()).strip("-")
    )
    stem = folder / f"{name}-torch{results['provenance']['versions']['torch'].partition('+')[0]}"
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = stem.with_name(f"{stem.name}.md")
    drawn = pictures(results, stem) if importlib.util.find_spec("matplotlib") else []
    page.write_text(markdown(results, drawn), encoding="utf-8")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU at toy size")
    parser.add_argument("--minutes", type=float, default=7.5, help="for all of it")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="these workloads alone")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results; of a dry run: out/gpu-dry-run")
    arguments = parser.parse_args()
    if arguments.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any process that could find a GPU is started
    default = HERE.parent / "out" / "gpu-dry-run" if arguments.dry_run else HERE / "results"
    session = Session(arguments)
    results = session.run()
    write(results, arguments.output or default)  # whatever the tests do to this process
    results = session.with_tests(results)
    page = write(results, arguments.output or default)
    for row in results["claims"]:
        print(f"{row['verdict']:13s} {row['claim']}: {row['figures']}")
    print(f"wrote {page.name} and its JSON")
    return 0


if __name__ == "__main__":
    run(main)
