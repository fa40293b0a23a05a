"""Parses and formats bytes and numbers. GiB is 2**30 bytes everywhere in this project; the unit is always shown."""

from __future__ import annotations

import re

from .errors import UserError

KIB, MIB, GIB = 2**10, 2**20, 2**30
TIB = 2**40
BARE = 10_000  # a smaller number without a unit means GiB of a card's memory: no card has so few bytes
_FACTORS = {
    "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "k": KIB, "m": MIB, "g": GIB, "t": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def whole_number(text: str) -> int | None:
    """Returns the number that `text` writes in decimal digits; None if it is not one, or has too many digits."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


def parse_bytes(text: str | int) -> int:
    """Bytes of `"24GiB"`, `"600 MiB"`, `"24G"` (GiB), `"1.5GB"` (10**9) or a plain count of bytes.

    Raises:
        UserError: `text` is not a positive quantity with a known unit.
    """
    match = _QUANTITY.fullmatch(str(text))
    factor = _FACTORS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None or not 1 <= float(match[1]) * factor < 2**63:
        raise UserError(
            f"'{text}' is not an amount of memory; write a positive number with a unit, as in 24GiB or 600MiB"
        )
    return round(float(match[1]) * factor)


def parse_budget(text: str | int) -> int:
    """Bytes of a memory budget: as `parse_bytes`, and a number below 10,000 without a unit means GiB.

    Raises:
        UserError: as `parse_bytes`, and for fewer than 10,000 bytes.
    """
    nbytes = parse_bytes(f"{text}GiB" if is_bare(text) else text)
    if nbytes < BARE:
        raise UserError(f"'{text}' is {nbytes} bytes, less than any step takes; write it as in 24GiB or 600MiB")
    return nbytes


def is_bare(text: str | int) -> bool:
    """Whether `parse_budget` reads `text` as GiB because it has no unit."""
    match = _QUANTITY.fullmatch(str(text))
    return match is not None and not match[2] and float(match[1]) < BARE


def format_bytes(nbytes: int) -> str:
    """Formats bytes: GiB with two decimals, MiB with one below 1 GiB, KiB below 1 MiB, B below 1 KiB."""
    size = abs(nbytes)
    if size >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if size >= MIB:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes / KIB:.1f} KiB" if size >= KIB else f"{nbytes} B"


def format_at_least(nbytes: int) -> str:
    """Formats bytes, rounded up: `parse_bytes` never returns less than `nbytes`."""
    shown = nbytes
    while parse_bytes(text := format_bytes(shown)) < nbytes:
        shown += -(-nbytes // 10_000)
    return text


def format_change(share: float, digits: int = 1) -> str:
    """A change by a share, "+2.5%"; one that rounds to none has a plus."""
    return f"{round(share, digits + 2) + 0.0:+.{digits}%}"


def format_number(value: float) -> str:
    """Formats `value` to three significant digits, without an exponent for common magnitudes: 1,730; 0.046."""
    return f"{float(f'{value:.3g}'):,g}"
