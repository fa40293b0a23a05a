"""Reads `adapter_config.json`, a PEFT configuration: the adapter's type, size and modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.validation import library_reads, load_entries

from .settings import keys_of, read_settings, table

if TYPE_CHECKING:
    from peft import PeftConfig

ADAPTER_CONFIG = "adapter_config.json"
# Keys of a saved configuration that do not affect training.
_OF_A_CHECKPOINT = ("inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping")


def read_peft(given: str, asked: str, left_out: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns the content of the file `given`, of that file in the directory `given`, or of the JSON text `given`.

    Args:
        asked: names it in errors.
        left_out: that of `read_settings`.

    Raises:
        UserError: the file cannot be read, is not a PEFT configuration, or asks for what is not modelled.
    """
    path = Path(given) / ADAPTER_CONFIG if not given.startswith("{") and Path(given).is_dir() else Path(given)
    content = keys_of(given, asked) if given.startswith("{") else load_entries(path, asked, "a configuration of PEFT")
    if not isinstance(content.get("peft_type"), str):
        raise UserError(f"{asked}: no configuration of PEFT: it names no peft_type")
    named = {name: value for name, value in content.items() if name in table()["peft"]}
    read_settings(named, ["peft"], asked, left_out)
    return dict(content)


def configuration(content: Mapping[str, Any], asked: str) -> PeftConfig:
    """Returns a PEFT configuration with this content for a new training run, also if the content is a checkpoint's.

    Raises:
        UserError: PEFT does not know the type, or the type does not have an option.
    """
    from peft import get_peft_config

    kind = _kind(content, asked)
    with library_reads(asked):
        return get_peft_config({k: v for k, v in content.items() if k not in _OF_A_CHECKPOINT} | {"peft_type": kind})


def takes(content: Mapping[str, Any], name: str, asked: str) -> bool:
    """Whether configurations of this PEFT type have a field `name`."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return name in {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[_kind(content, asked)])}


def _kind(content: Mapping[str, Any], asked: str) -> Any:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = content["peft_type"]
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        known = ", ".join(sorted(PEFT_TYPE_TO_CONFIG_MAPPING))
        raise UserError(f"{asked}: PEFT has no kind {kind} ({known})")
    return kind
