"""A run of gpu.py as a Markdown page: a verdict for each part, and its rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.pages import table
from ckpt_ft.units import GIB

Case = dict[str, Any]
Verdict = tuple[bool, str]  # whether the claim holds, and the figures
CONVOLUTIONAL = ("SD ", "SDXL", "ResNet")


def markdown(results: dict[str, Any]) -> str:
    """Returns the page: claims, and the cases of each part."""
    facts, device = results["provenance"], results["device"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    dry = "no GPU: a dry run on the CPU at toy size, of which no figure says anything"
    command = f"Made by `python benchmarks/{facts['command']}` on {results['date']}"
    made = f"{command} with {versions}; {device.get('name', dry)}."
    rows = [[claim, f"**{verdict}**", figures] for claim, verdict, figures in verdicts(results)]
    parts = [f"# {device.get('name', 'Dry run')}", made, "## Claims", table(["claim", "verdict", "figures"], rows)]
    for name in dict.fromkeys(case["part"] for case in results["cases"]):
        cases = [case for case in results["cases"] if case["part"] == name]
        cells = [
            [case["name"], f"{case['status']} {case['message']}".strip(), f"{case['seconds']:.1f}", _figures(case)]
            for case in cases
        ]
        parts += [f"## {name}", table(["case", "status", "s", "figures"], cells)]
    return "\n\n".join(parts) + "\n"


def verdicts(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns (claim, "holds" | "falls short" | "not measured", figures) of each claim."""
    rows = []
    for claim, part, decide in CLAIMS:
        cases = [case for case in results["cases"] if case["part"] == part and case["status"] == "ok"]
        decided = None if results["dry_run"] or not cases else decide(cases)
        rows.append((claim, "not measured", "") if decided is None else
                    (claim, "holds" if decided[0] else "falls short", decided[1]))  # fmt: skip
    return rows


def _equal(cases: list[Case]) -> Verdict:
    wrong = [f"{case['name']} {policy}" for case in cases for policy, row in case["value"].items() if not row["equal"]]
    return not wrong, ", ".join(wrong) or f"{sum(len(case['value']) for case in cases)} policies"


def _within(
    figure: str, median: float, worst: float, mine: Callable[[str], bool] = lambda _: True
) -> Callable[[list[Case]], Verdict | None]:
    """Compares the median and worst of |predicted / measured - 1| with bounds."""

    def decide(cases: list[Case]) -> Verdict | None:
        pairs = [(case["name"], case["predicted"].get(figure), case["value"].get(figure)) for case in cases
                 if mine(case["name"]) and case["predicted"]]  # fmt: skip
        errors = sorted((abs(p / m - 1), name) for name, p, m in pairs if p and m)
        if not errors:
            return None
        middle, (most, name) = statistics.median(error for error, _ in errors), errors[-1]
        figures = f"median {100 * middle:.2f} %, worst {100 * most:.2f} % ({name}), {len(errors)} cases"
        return middle <= median and most <= worst, figures

    return decide


def _hidden(cases: list[Case]) -> Verdict | None:
    plain = next((case["value"]["seconds"] for case in cases if case["name"].endswith(", none")), None)
    copied = [(case["name"], case["value"]) for case in cases if case["value"]["copies"]]
    if plain is None or not copied:
        return None
    texts = [f"{name}: {value['hidden'] / value['copies']:.0%} hidden, {value['seconds'] / plain:.2f} of plain's time"
             for name, value in copied]  # fmt: skip
    return all(value["hidden"] >= 0.8 * value["copies"] for _, value in copied), "; ".join(texts)


def _host(cases: list[Case]) -> Verdict:
    ratios = {case["name"]: case["value"]["pointwise"] / case["value"]["plain"] for case in cases}
    return max(ratios.values()) <= 1.7, ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


def _verified(cases: list[Case]) -> Verdict:
    more = {case["name"]: case["value"]["always"] / case["value"]["never"] - 1 for case in cases}
    return max(more.values()) <= 1, ", ".join(f"{name} {100 * share:+.0f} %" for name, share in more.items())


def _proved(cases: list[Case]) -> Verdict:
    rows = [(case["name"], case["value"]) for case in cases]
    good = all(row["proved"] and len(row["trials"]) <= 4 for _, row in rows)  # three, and the one that makes states
    return good, "; ".join(f"{name}: {row['predicted']} predicted, {row['proved']} proved" for name, row in rows)


def _pick(cases: list[Case]) -> Verdict:
    rates = [row["rate"] for row in cases[0]["value"]]
    return rates[0] >= 0.9 * max(rates), f"{100 * rates[0] / max(rates):.0f} % of the best of {len(rates)}"


def _scripts(cases: list[Case]) -> Verdict:
    rows = [(case["name"], case["value"]) for case in cases]
    errors = {name: (row["predicted"]["allocated"] or 0) / row["allocated"] - 1 for name, row in rows}
    good = all(row["equal"] for _, row in rows) and max(map(abs, errors.values())) <= 0.002
    return good, ", ".join(f"{name} {100 * error:+.2f} %" for name, error in errors.items())


def _convolutional(name: str) -> bool:
    return name.startswith(CONVOLUTIONAL)


# claim, part, and the function that decides it for the part's cases
CLAIMS: list[tuple[str, str, Callable[[list[Case]], Verdict | None]]] = [
    ("a step's numbers are plain training's under every policy", "numbers", _equal),
    ("no copy races with the computation: late copies, poisoned memory", "races", _equal),
    ("predicted peak allocated, transformers: median within 0.2 %, worst within 0.6 %", "peaks",
     _within("allocated", 0.002, 0.006, lambda name: not _convolutional(name))),
    ("predicted peak allocated, U-Nets and ResNet: worst within 5 %", "peaks",
     _within("allocated", 0.05, 0.05, _convolutional)),
    ("predicted peak reserved: median within 2 %, worst within 6 %", "peaks", _within("reserved", 0.02, 0.06)),
    ("predicted seconds: median within 5 %, worst within 12 %", "peaks", _within("seconds", 0.05, 0.12)),
    ("scripts: ckpt-ft run changes no number, and its dry run is within 0.2 % of the peak", "scripts", _scripts),
    ("at least 80 % of the seconds of copies are under kernels", "overlap", _hidden),
    ("host time of pointwise is at most 1.7 times plain's", "host time", _host),
    ("verification at most doubles a step's time", "verification", _verified),
    ("the largest batch is proved with at most three steps beyond the first", "largest batch", _proved),
    ("plan's pick is within 10 % of the best measured of its rows", "plan", _pick),
    ("the tests marked gpu pass", "tests", lambda cases: (cases[0]["value"]["rc"] == 0, cases[0]["value"]["tail"])),
]  # fmt: skip


def _figures(case: Case) -> str:
    value, predicted = case.get("value") or {}, case.get("predicted") or {}
    if case["part"] == "peaks" and value:
        rows = []
        for figure in ("allocated", "reserved"):
            mine, theirs = predicted.get(figure), value.get(figure)
            error = f" ({100 * (mine / theirs - 1):+.2f} %)" if mine and theirs else ""
            rows += [f"{figure} {theirs / GIB:.3f} GiB{error}"] if theirs else []
        mine = predicted.get("seconds")
        return ", ".join(
            [*rows, f"{1e3 * value['seconds']:.1f} ms" + (f", predicted {1e3 * mine:.1f}" if mine else "")]
        )
    if case["part"] == "scripts" and value:
        mine, theirs = value["predicted"]["allocated"], value["allocated"]
        error = f" ({100 * (mine / theirs - 1):+.2f} %)" if mine else ""
        return f"{'equal' if value['equal'] else 'DIFFERS'}, allocated {theirs / GIB:.3f} GiB{error}"
    if case["part"] in ("numbers", "races"):
        return ", ".join(f"{policy} {'equal' if row['equal'] else 'DIFFERS'}" for policy, row in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items() if isinstance(number, (int, float)))
    return ""
