"""The app of the Space; the package `ckpt_ft` lies beside this file."""

import os
from pathlib import Path

from ckpt_ft.cli.app import launch

if __name__ == "__main__":
    os.environ.setdefault("CKPT_FT_CACHE", str(Path(__file__).parent / "cache"))  # with the answers of `make space`
    launch(host="0.0.0.0")
