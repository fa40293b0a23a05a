"""Amounts of memory as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_ft.errors import UserError
from ckpt_ft.units import GIB, MIB, format_bytes, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * GIB),
        ("600 MiB", 600 * MIB),
        ("1.5gib", 3 * GIB // 2),
        ("80GB", 80 * 10**9),
        ("24G", 24 * GIB),
        ("600m", 600 * MIB),
        (123, 123),
        ("7b", 7),
    ],
)
def test_amounts_are_parsed(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "0", "-1GiB", "24 gigs", "1e9", "24GiBs", 0, -3])
def test_invalid_amount_is_refused(text: str | int) -> None:
    with pytest.raises(UserError, match="as in 24GiB"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_formatted_bytes_are_within_half_of_the_last_digit(nbytes: int) -> None:
    half = GIB / 200 if nbytes >= GIB else MIB / 20 if nbytes >= MIB else 2**10 / 20 if nbytes >= 2**10 else 0
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= half + 1


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24", 24 * GIB), (" 24 ", 24 * GIB), (24, 24 * GIB), ("1.5", 3 * GIB // 2), ("9999", 9999 * GIB),
        ("10000", 10_000), (10_000, 10_000), ("24G", 24 * GIB), ("24GB", 24 * 10**9), ("24GiB", 24 * GIB),
        ("600MiB", 600 * MIB), ("10kb", 10_000),
    ],
)  # fmt: skip
def test_budget_without_unit_is_gib(text: str | int, nbytes: int) -> None:
    assert parse_budget(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "lots", -3, "512b", "1KiB"])
def test_invalid_budget_text_is_refused(text: str | int) -> None:
    with pytest.raises(UserError, match="as in 24GiB"):
        parse_budget(text)
