"""Writes configurations of models for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """Writes `config` to config.json in `folder` and returns the file's path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)
