"""Results of a run as Markdown and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_ft.memory.record.events import PHASES
from ckpt_ft.units import GIB

from .claims import predicted_and_measured


def markdown(results: dict[str, Any], pictures: list[Path]) -> str:
    """Returns the page: claims, every case, plan and largest batches, and the machine."""
    parts = [
        f"# {results['title']}",
        _made_by(results),
        "## Claims",
        _claims(results["claims"]),
        "## Cases",
        _cases(results),
    ]
    if results.get("plan"):
        parts += ["## plan's rows, measured", _plan(results["plan"])]
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n\n".join(parts) + "\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _made_by(results: dict[str, Any]) -> str:
    facts = results["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    dry = "no GPU: a dry run on the CPU at toy size, of which no figure says anything"
    minutes = f"{results['seconds'] / 60:.1f} minutes"
    made = f"Made by `python benchmarks/{facts['command']}` on {results['date']} in {minutes} with {versions}; "
    how = "Predicted: `trace_step` for this very device. Measured: the allocator's counters, a process for each case."
    return f"{made}{results['device'].get('name', dry)}. {how}"


def _claims(claims: list[dict[str, str]]) -> str:
    return table(
        ["claim", "verdict", "figures"], [[row["claim"], f"**{row['verdict']}**", row["figures"]] for row in claims]
    )


def _cases(results: dict[str, Any]) -> str:
    header = [
        "case",
        "batch",
        "status",
        "allocated, predicted",
        "measured GiB",
        "error",
        "reserved, predicted",
        "measured GiB",
        "error",
        "active GiB",
        *(f"{phase} GiB" for phase in PHASES),
        "ms, predicted",
        "measured",
    ]
    rows = []
    for case in results["cases"]:
        predicted, measured = case.get("predicted") or {}, case.get("measured") or {}
        row = [
            f"{case['workload']}, `{case['policy']}`",
            str(case["batch"]),
            case["status"] + (f": {case['message']}" if case["message"] else ""),
        ]
        for figure in ("allocated", "reserved"):
            mine, theirs = predicted.get(figure), measured.get(figure)
            row += [_gib(mine), _gib(theirs), f"{100 * (mine / theirs - 1):+.2f} %" if mine and theirs else ""]
        row.append(_gib(measured.get("active")))
        row += [_gib((measured.get("phases") or {}).get(phase, {}).get("allocated")) for phase in PHASES]
        row += [
            f"{1e3 * seconds:.1f}" if seconds else ""
            for seconds in (predicted.get("seconds"), measured.get("seconds"))
        ]
        rows.append(row)
    return table(header, rows)


def _plan(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        seen = row.get("measured_samples_per_second")
        cells.append(
            [
                f"`{row['policy']}`",
                str(row["batch"]),
                _gib(row["reserved"]),
                _gib(row.get("measured_reserved")),
                f"{row['samples_per_second']:.3g}",
                f"{seen:.3g}" if seen else row.get("status", ""),
            ]
        )
    return table(["policy", "batch", "reserved GiB, predicted", "measured", "samples/s, predicted", "measured"], cells)


def _gib(nbytes: Any) -> str:
    return f"{nbytes / GIB:.3f}" if nbytes else ""


def pictures(results: dict[str, Any], stem: Path) -> list[Path]:
    """Draws measured against predicted peaks, and each workload's peak against its time, if there are points."""
    made = []
    pairs = predicted_and_measured(results, "allocated")
    if pairs:
        made.append(_scatter(pairs, stem.with_name(f"{stem.name}-peaks.png")))
    points: dict[str, list[tuple[str, float, float]]] = {}
    for case in results["cases"]:
        measured = case.get("measured") or {}
        if measured.get("allocated") and measured.get("seconds"):
            points.setdefault(case["workload"], []).append(
                (case["policy"], 1e3 * measured["seconds"], measured["allocated"] / GIB)
            )
    if points:
        made.append(_frontiers(points, stem.with_name(f"{stem.name}-policies.png")))
    return made


def _scatter(pairs: list[tuple[str, float, float]], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.subplots()
    mine, theirs = [p / GIB for _, p, _ in pairs], [m / GIB for _, _, m in pairs]
    axes.plot([0, max(mine + theirs)], [0, max(mine + theirs)], color="grey", linewidth=0.8)
    axes.scatter(theirs, mine, s=12)
    axes.set(xlabel="peak allocated, measured (GiB)", ylabel="predicted (GiB)")
    figure.savefig(path, dpi=90)
    return path


def _frontiers(points: dict[str, list[tuple[str, float, float]]], path: Path) -> Path:
    from matplotlib.figure import Figure

    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[len(points) :]:
        unused.remove()
    for axes, (workload, found) in zip(panels, points.items(), strict=False):
        axes.scatter([ms for _, ms, _ in found], [gib for _, _, gib in found], s=14)
        for policy, ms, gib in found:
            axes.annotate(policy, (ms, gib), fontsize=6, xytext=(2, 2), textcoords="offset points")
        axes.set(title=workload, xlabel="ms per step, measured", ylabel="peak allocated (GiB)")
    figure.savefig(path, dpi=90)
    return path
