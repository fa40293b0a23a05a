"""The kinds of report that a run writes."""

from __future__ import annotations

KINDS = ("json", "md", "html", "png")
