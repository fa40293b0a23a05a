"""Claims of README and DESIGN, compared with the results of a run: holds, falls short, or not measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]
Verdict = tuple[str, str]  # "holds" | "falls short" | "not measured", and the figures
CONVOLUTIONAL = ("SD ", "SDXL", "ResNet")


@dataclass(frozen=True)
class Claim:
    """A claim, and the function that decides it for a run."""

    text: str
    decide: Callable[[dict[str, Any]], Verdict]


def predicted_and_measured(
    results: dict[str, Any], figure: str, name: Callable[[str], bool] = lambda _: True
) -> list[tuple[str, float, float]]:
    """Yields (case, predicted, measured) of each case that has both."""
    found = []
    for case in results["cases"]:
        predicted, measured = (case.get("predicted") or {}).get(figure), (case.get("measured") or {}).get(figure)
        if predicted and measured and name(case["workload"]):
            found.append((f"{case['workload']}, {case['policy']}", float(predicted), float(measured)))
    return found


def _within(
    figure: str, median: float, worst: float, name: Callable[[str], bool]
) -> Callable[[dict[str, Any]], Verdict]:
    """Compares the median and worst of |predicted / measured - 1| with bounds."""

    def decide(results: dict[str, Any]) -> Verdict:
        errors = sorted((abs(p / m - 1), case) for case, p, m in predicted_and_measured(results, figure, name))
        if not errors or results["dry_run"]:
            return _not_measured(results)
        middle, (most, case) = statistics.median(error for error, _ in errors), errors[-1]
        figures = f"median {100 * middle:.2f} %, worst {100 * most:.2f} % ({case}), {len(errors)} cases"
        return ("holds" if middle <= median and most <= worst else "falls short"), figures

    return decide


def _seconds_rank(results: dict[str, Any]) -> Verdict:
    pairs = predicted_and_measured(results, "seconds")
    if len(pairs) < 3 or results["dry_run"]:
        return _not_measured(results)
    predicted, measured = _ranks([p for _, p, _ in pairs]), _ranks([m for _, _, m in pairs])
    correlation = statistics.correlation(predicted, measured)
    return (
        "holds" if correlation >= 0.9 else "falls short"
    ), f"rank correlation {correlation:.3f} over {len(pairs)} cases"


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def _full_saves(results: dict[str, Any]) -> Verdict:
    savings = []
    for workload in dict.fromkeys(case["workload"] for case in results["cases"]):
        none, full = (_measured(results, workload, policy, "allocated") for policy in ("none", "full"))
        if none and full:
            savings.append((1 - full / none, workload))
    if not savings:
        return _not_measured(results)
    least = min(savings)
    text = ", ".join(f"{name} {100 * saved:.0f} %" for saved, name in savings)
    return ("holds" if least[0] > 0 else "falls short"), f"peak saved: {text}"


def _cheaper_than(size: str, policy: str, other: str) -> Callable[[dict[str, Any]], Verdict]:
    def decide(results: dict[str, Any]) -> Verdict:
        none, mine, theirs = (_measured(results, size, p, "seconds") for p in ("none", policy, other))
        if not (none and mine and theirs) or results["dry_run"]:
            return _not_measured(results)
        figures = f"step time over none's: {policy} {mine / none:.2f}, {other} {theirs / none:.2f}"
        return ("holds" if mine < theirs else "falls short"), figures

    return decide


def _max_batch(results: dict[str, Any]) -> Verdict:
    found = [(case, case["largest_batch"]) for case in results["cases"] if case.get("largest_batch")]
    if not found:
        return _not_measured(results)
    texts = []
    for case, row in found:
        out = sum(trial["peak"] is None for trial in row["trials"])
        steps = f"{len(row['trials'])} steps, {out} out of memory"
        texts.append(
            f"{case['workload']}, {case['policy']}: predicted {row['predicted']}, proved {row['proved']}, {steps}"
        )
    most = 4  # three, plus the one that creates the optimizer's state
    good = all(row["proved"] and len(row["trials"]) <= most for _, row in found)
    return ("holds" if good else "falls short"), "; ".join(texts)


def _pick(results: dict[str, Any]) -> Verdict:
    rows = [row for row in results.get("plan", []) if row.get("measured_samples_per_second")]
    if len(rows) < 2 or not results["plan"][0].get("measured_samples_per_second"):
        return _not_measured(results)
    pick, best = rows[0], max(rows, key=lambda row: row["measured_samples_per_second"])
    share = pick["measured_samples_per_second"] / best["measured_samples_per_second"]
    names = [f"{row['policy']} at batch {row['batch']}" for row in (pick, best)]
    text = f"{names[0]} reaches {100 * share:.0f} % of the best of {len(rows)} ({names[1]})"
    return ("not measured" if results["dry_run"] else "holds" if share >= 0.9 else "falls short"), text


def _gpu_tests(results: dict[str, Any]) -> Verdict:
    tests = results.get("tests") or {}
    if "rc" not in tests:
        return "not measured", tests.get("message", "")
    return ("holds" if tests["rc"] == 0 else "falls short"), tests["tail"]


def _measured(results: dict[str, Any], workload: str, policy: str, figure: str) -> float | None:
    for case in results["cases"]:
        if (case["workload"], case["policy"]) == (workload, policy):
            value = (case.get("measured") or {}).get(figure)
            return float(value) if value else None
    return None


def _not_measured(results: dict[str, Any]) -> Verdict:
    return "not measured", "dry run: no GPU" if results["dry_run"] else ""


def _convolutional(name: str) -> bool:
    return name.startswith(CONVOLUTIONAL)


CLAIMS = [
    Claim(
        "predicted peak allocated, transformers: median within 0.2 %, worst within 0.6 %",
        _within("allocated", 0.002, 0.006, lambda name: not _convolutional(name)),
    ),
    Claim(
        "predicted peak allocated, U-Nets and ResNet: worst within 5 %",
        _within("allocated", 0.05, 0.05, _convolutional),
    ),
    Claim(
        "predicted peak reserved: median within 2 %, worst within 6 %", _within("reserved", 0.02, 0.06, lambda _: True)
    ),
    Claim("predicted seconds: rank correlation at least 0.9", _seconds_rank),
    Claim("full checkpointing lowers the peak of every workload", _full_saves),
    Claim(
        "at a small batch pointwise costs less time than SAC",
        _cheaper_than("small batch", "pointwise", "save:attention+matmul"),
    ),
    Claim("at a large batch pointwise costs less time than full", _cheaper_than("large batch", "pointwise", "full")),
    Claim("the largest batch is proved with at most three steps beyond the first", _max_batch),
    Claim("plan's pick is within 10 % of the best measured of its rows", _pick),
    Claim("the tests marked gpu pass", _gpu_tests),
]


def verdicts(results: dict[str, Any]) -> list[dict[str, str]]:
    """Returns a row for each claim."""
    rows = []
    for claim in CLAIMS:
        verdict, figures = claim.decide(results)
        rows.append({"claim": claim.text, "verdict": verdict, "figures": figures})
    return rows
