"""Measures on one CUDA GPU what the docs promise, the most valuable first, in 10 minutes and without network.

    python benchmarks/gpu.py --wheels     # where there is network: downloads what the GPU's machine lacks (13 MiB)
    python benchmarks/gpu.py              # there; a second call goes on where the first stopped
    python benchmarks/gpu.py --dry-run    # the same code on the CPU at toy size; its figures mean nothing

Python 3.12, torch, transformers, accelerate and PEFT must be there; the wheels in out/gpu_wheels add the rest. Each
case runs in a process of its own, and its result is in results.json as soon as it ends. An out-of-memory error and a
missing library are results; a case for which no time is left is recorded as not reached.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic kernels
# libraries ask for CUDA on import, which this process must not initialize
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

WHEELS = HERE.parent / "out" / "gpu_wheels"
NEEDED = ("pydantic", "typer", "rich", "filelock", "psutil", "pytest", "hypothesis", "requests")
NEEDED_ALONE = ("diffusers", "importlib_metadata", "zipp")  # their dependencies are transformers' too
MACHINE = ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64",
           "--platform", "manylinux2014_x86_64", "--only-binary", ":all:")  # fmt: skip
CASE_LIMIT = 90.0  # seconds that one case may take
DONE = ("ok", "oom", "skipped")  # what a second call does not repeat
PARTS = (
    "numbers", "races", "peaks", "scripts", "overlap", "host time", "verification", "tests", "calibrate",
    "largest batch", "plan",
)  # fmt: skip

SCRIPTS = [("plain", "full"), ("trainer", ""), ("trainer", "pointwise"), ("lora", "full"), ("plain", "")]


@dataclass
class Case:
    """One process: `function(*arguments)`. predict: the arguments of the prediction that is compared with it."""

    part: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    predict: tuple[Any, ...] = ()


def cases(dry: bool, gpu: dict[str, Any] | None) -> list[Case]:
    """Returns all cases in the order of their value: the parts, but half of the peaks behind the other parts."""
    from benchmarks.on_gpu import work
    from benchmarks.on_gpu import workloads as w

    specs = w.DRY_SPECS if dry else w.SPECS
    over, budget = (w.DRY_OVERLAP, w.DRY_BUDGET) if dry else (w.OVERLAP, w.BUDGET)
    repeats, size = (1, "small") if dry else (15, "large")
    peaks = [
        Case("peaks", f"{spec.name}, {policy}", work.measure, (spec, policy), (spec, policy, gpu))
        for spec in specs
        for policy in spec.policies
    ]
    first = [case for case in peaks if case.arguments[1] in w.CORE and case.arguments[0] in specs[:5]]
    found = [
        *(Case("numbers", spec.name, work.numbers, (spec,)) for spec in w.NUMBERS),
        *(Case("races", spec.name, work.races, (spec,)) for spec in w.RACES),
        *first,
        *(
            Case("scripts", f"{kind}, {policy or 'as it is'}", work.script, (kind, policy, size))
            for kind, policy in SCRIPTS[: 2 if dry else None]
        ),
        *(Case("overlap", f"{over.name}, {policy}", work.overlap, (over, policy)) for policy in over.policies),
        *(Case("host time", model, work.host_time, (model, repeats)) for model in ("llama", "qwen3", "vit")),
        *(Case("verification", policy, work.verification, (policy, repeats)) for policy in ("full", "pointwise")),
        Case("tests", "marked gpu", gpu_tests, (CASE_LIMIT - 5,)),
        Case("calibrate", "card", work.calibrated, ()),
        *(case for case in peaks if case not in first),
        *(
            Case("largest batch", f"{specs[0].name}, {policy}", work.largest_batch, (specs[0], policy, budget))
            for policy in ("none", "full")
        ),
        Case("plan", specs[0].name, work.planned, (specs[0], gpu, budget, 1 if dry else 4)),
    ]
    return found


def gpu_tests(seconds: float) -> dict[str, Any]:
    """Runs the suite's tests marked gpu."""
    files = [str(path) for path in (HERE.parent / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *sorted(files)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=seconds)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"rc": done.returncode, "tail": lines[-1], "failed": failed}


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs every case that is not done within the budget; returns the content of results.json."""
    from benchmarks.on_gpu import isolated, work
    from ckpt_ft.files import write
    from ckpt_ft.memory.measure.report import provenance

    began, path = time.perf_counter(), arguments.output / "results.json"
    device = {} if arguments.dry_run else _device()
    gpu = device.get("gpu")
    results = {"dry_run": arguments.dry_run, "date": datetime.date.today().isoformat(), "device": device,
               "provenance": provenance(), "cases": []}  # fmt: skip
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        if before["provenance"]["versions"] == results["provenance"]["versions"] and before["device"] == device:
            known = {(c["part"], c["name"]): c for c in before["cases"] if c["status"] in DONE}
    todo = [case for case in cases(arguments.dry_run, gpu) if not arguments.only or case.part in arguments.only]
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4))) as pool:
        predictions: dict[int, Future[Any]] = {
            id(case): pool.submit(isolated.call, work.predict, *case.predict, limit=CASE_LIMIT)
            for case in todo
            if case.predict and (case.part, case.name) not in known
        }
        for case in todo:
            row = known.get((case.part, case.name))
            left = arguments.seconds - (time.perf_counter() - began)
            if row is None and left < 5:
                row = {"status": "not reached", "message": "out of time", "seconds": 0.0, "value": None}
                if (prediction := predictions.get(id(case))) is not None:
                    prediction.cancel()
            elif row is None:
                seen = isolated.call(case.function, *case.arguments, limit=min(CASE_LIMIT, left))
                row = {"status": seen.status, "message": seen.message, "seconds": seen.seconds, "value": seen.value}
                if (prediction := predictions.get(id(case))) is not None:
                    predicted = prediction.result()
                    row["predicted"] = predicted.value
                    row["message"] += f" prediction: {predicted.message}" if predicted.message else ""
            results["cases"].append({"part": case.part, "name": case.name, **row})
            write(path, json.dumps(results, indent=1) + "\n")
            spent = f"[{time.perf_counter() - began:5.0f} s]"
            print(spent, case.part, case.name, row["status"], row["message"], file=sys.stderr, flush=True)
    return results


def _device() -> dict[str, Any]:
    """Returns the GPU, asked in another process because this one never initializes CUDA."""
    import torch

    from benchmarks.on_gpu import isolated, work
    from ckpt_ft.errors import UserError, WorkFailed

    if not torch.cuda.device_count():
        raise UserError("no CUDA device here; --dry-run runs the same code on the CPU at toy size")
    found = isolated.call(work.device_facts, limit=CASE_LIMIT)
    if not found.value:  # CUDA does not survive a fork of a process that has initialized it
        isolated.start_method = "spawn"
        found = isolated.call(work.device_facts, limit=CASE_LIMIT)
    if not found.value:
        raise WorkFailed(f"the GPU could not be asked what it is: {found.message}")
    facts: dict[str, Any] = found.value
    return facts


def download_wheels() -> None:
    """Downloads what `NEEDED` names, on a machine with network."""
    for more in (NEEDED, ("--no-deps", *NEEDED_ALONE)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(WHEELS), *MACHINE, *more]
        subprocess.run(command, check=True)


def use_wheels() -> None:
    """Makes the wheels importable here and in child processes if this machine lacks one of them."""
    if all(map(find_spec, (*NEEDED, *NEEDED_ALONE))):
        return
    into = f"{tempfile.gettempdir()}/gpu_wheels-{os.getuid()}"
    for wheel in WHEELS.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(into)
    sys.path.append(into)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), into)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU at toy size")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu; of a dry run: out/gpu-dry-run")
    parser.add_argument(
        "--wheels", action="store_true", help="download the wheels into out/gpu_wheels, and do no more"
    )
    arguments = parser.parse_args()
    if arguments.wheels:
        download_wheels()
        return 0
    if arguments.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any process that could find a GPU is started
    default = HERE.parent / "out" / "gpu-dry-run" if arguments.dry_run else HERE / "results" / "gpu"
    arguments.output = arguments.output or default
    results = measured(arguments)
    from benchmarks.on_gpu.report import markdown, verdicts
    from ckpt_ft.files import write

    write(arguments.output / "results.md", markdown(results))
    for claim, verdict, figures in verdicts(results):
        print(f"{verdict:13s} {claim}: {figures}")
    return 0


if __name__ == "__main__":
    use_wheels()
    from ckpt_ft.errors import UserError, run

    def run_with_packages() -> int:
        try:
            return main()
        except ModuleNotFoundError as missing:
            raise UserError(
                f"{missing.name} is not installed: bring what --wheels downloads, in out/gpu_wheels"
            ) from missing

    run(run_with_packages)
