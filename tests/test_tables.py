"""Printed tables fit the width of the console and break no word."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ckpt_ft.tables import Table, print_table, shortened

HOLDERS = Table(
    "What holds the peak",
    ("module", "op", "category", "count", "bytes"),
    [
        ("base_model.model.model.layers.*.mlp.gate_proj.lora_A.default", "_log_softmax_backward_data", "activations",
         "224", "512.0 MiB"),
        ("model.embed_tokens", "embedding", "temporary", "1", "2.00 GiB"),
    ],
    (0, 1, 2),
    names=(0, 1),
)  # fmt: skip
PLAN = Table(
    "a model on t4",
    ("policy", "batch", "peak allocated", "reserved", "s/step", "nominal samples/s", ""),
    [
        (
            "first:12,save:attention+matmul,pointwise,head", "128", "12.31 GiB", "13.05 GiB", "0.0123", "12,300",
            "pick",
        )
    ],
    (0, 6),
)  # fmt: skip


def printed(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    print_table(table, Console(file=out, width=width, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_long_names_are_shortened_at_the_start(width: int) -> None:
    lines = printed(HOLDERS, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 6  # one line each: title, header, rule, two rows, and an empty line
    assert "_log_softmax_backward_data  activations" in lines[3]
    assert "lora_A.default  " in lines[3]
    whole = "base_model.model.model.layers.*.mlp.gate_proj.lora_A.default"
    assert (whole in lines[3]) == (width == 200)


def test_policies_break_between_terms() -> None:
    lines = printed(PLAN, 80)
    assert max(map(len, lines)) <= 80
    policy = [line.split("  ")[0] for line in lines[4:-1]]
    assert "".join(policy) == "first:12,save:attention+matmul,pointwise,head"
    assert all(part.endswith((",", "+", ":")) for part in policy[:-1])
    assert "12.31 GiB" in lines[4]


@pytest.mark.parametrize(("more", "widest"), [((), 80), (("host memory", "memory"), 98)])
def test_numbers_are_never_truncated(more: tuple[str, ...], widest: int) -> None:
    """At 80 columns policies break first; if all columns have their minimum width, lines get longer."""
    header = ("policy", "batch", "peak allocated", "reserved", "s/step", "samples/s", "bound by", *more, "")
    row = ("modules:attention", "2", "11.37 GiB", "11.46 GiB", "0.201", "9.96", "compute", *["11.46 GiB"] * len(more))
    lines = printed(Table("a plan", header, [(*row, "frontier")], (0, 6, 7 + len(more))), 80)
    assert max(map(len, lines)) <= widest
    assert "".join(lines).count("11.46 GiB") == 1 + len(more)
    assert "frontier" in "".join(lines)
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(
    ("name", "width", "short"),
    [
        ("model.layers.0.mlp", 18, "model.layers.0.mlp"),
        ("model.layers.0.mlp", 17, "…layers.0.mlp"),
        ("_log_softmax_backward_data", 25, "…softmax_backward_data"),
        ("a" * 30, 10, "…" + "a" * 9),
    ],
)
def test_shortened_names(name: str, width: int, short: str) -> None:
    assert shortened(name, width) == short
