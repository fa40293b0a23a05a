"""Checks once whether the Hub answers; if it does not, the libraries read the local cache.

By default, the Hub client retries six times over half a minute for every file, and prints a line for each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckpt_ft.workloads.model_config import hub_answers

# Flags whose value may be the name of a Hub repository.
_NAMES = (
    "model_name_or_path", "dataset_name", "pretrained_model_name_or_path", "pretrained_vae_model_name_or_path",
    "train_data_dir",
)  # fmt: skip


def read_cache_where_offline(groups: Iterable[Any]) -> None:
    """Switch the Hub libraries to offline mode, with a note, if `groups` of flags name something that is not a local
    path and the Hub does not answer."""
    from huggingface_hub import constants

    given = [getattr(group, name, None) for group in groups for name in _NAMES]
    named = [name for name in given if name and not Path(name).exists()]
    if not named or constants.HF_HUB_OFFLINE or hub_answers():
        return
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for subprocesses
    datasets = sys.modules.get("datasets.config")
    if datasets is not None:
        datasets.HF_HUB_OFFLINE = datasets.HF_DATASETS_OFFLINE = True  # type: ignore[attr-defined]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"note: {constants.ENDPOINT} does not answer; {', '.join(named)}: from the cache here", file=sys.stderr)
