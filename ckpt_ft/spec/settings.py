"""The table of settings: what each setting of another library does to an answer.

`settings.ini` is the table: a section for each library and class, with every field that a user can set. An entry is
modelled (it sets one of our flags), without effect, left out of the answer, or refused. Section `*` has patterns that
hold for every library. `read_settings` applies the table to the content of a file, a command line or a live Trainer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError, did_you_mean

MODELLED, KEYS, NO_EFFECT, LIVE, REFUSED, VALUE = "modelled", "keys", "no effect", "live", "refused", "value"
LEFT_OUT, EVERY = "left out", "*"
_STARTS = {
    "-> ": MODELLED, "keys of ": KEYS, "no effect: ": NO_EFFECT, "live: ": LIVE, "left out: ": LEFT_OUT,
    "refused: ": REFUSED, "= ": VALUE,
}  # fmt: skip
_OFF = {"", "none", "null", "false", "no", "0", "0.0", "[]", "{}"}
_WORDS = {"true": True, "false": False, "null": None, "none": None}  # values that some files write as strings

# Kinds of training files -> the sections with their settings; the first section that has a name decides.
_ARGUMENTS = ("trl", "trl.model", "transformers")
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llm", "vlm", "text", "image_classification"), ("ckpt_ft", "recipes", "transformers")),
    **dict.fromkeys(("diffusion_unet", "diffusion_transformer"), ("ckpt_ft", "recipes.diffusion")),
    "trl": ("ckpt_ft", "trl.sft", *_ARGUMENTS),
    "dpo": ("ckpt_ft", "trl.dpo", *_ARGUMENTS),
    **dict.fromkeys(("orpo", "cpo", "simpo"), ("ckpt_ft", "trl.cpo", *_ARGUMENTS)),
    "kto": ("ckpt_ft", "trl.kto", *_ARGUMENTS),
    "reward": ("ckpt_ft", "trl.reward", *_ARGUMENTS),
    "grpo": ("ckpt_ft", "trl.rollouts", *_ARGUMENTS),
    "rloo": ("ckpt_ft", "trl.rollouts", *_ARGUMENTS),
    "axolotl": ("ckpt_ft", "axolotl"),
    "llama_factory": ("llama_factory", "transformers"),
    "llama_factory_v1": ("llama_factory.v1",),
    "diffusers": ("ckpt_ft", "diffusers"),
}
# Sections whose names are also flags of the command line, in order.
TYPED = ("ckpt_ft", "recipes", "transformers", "trl.sft", "trl", "trl.model", "transformers.quantization_config",
          "recipes.diffusion", "diffusers", "axolotl", "llama_factory")  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """What a setting does.

    Attributes:
        kind: MODELLED, KEYS, NO_EFFECT, LIVE (modelled for a live Trainer alone), LEFT_OUT or REFUSED; VALUE for one
            value of a modelled setting that has another name for the target.
        text: the target, the section of the keys, the reason, or the target's value.
        values: entries of single values, by their text.
    """

    kind: str
    text: str
    values: dict[str, Entry] = field(default_factory=dict)

    def of(self, value: Any) -> Entry:
        """Returns the entry of this setting at `value`: a setting that is not modelled has no effect if it is off."""
        text = (json.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)).strip().lower()
        if text in self.values:
            return self.values[text]
        if text in _OFF and self.kind in (LIVE, LEFT_OUT, REFUSED):
            return Entry(NO_EFFECT, "it is off")
        return self


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, Entry]]:
    """Returns the entries of every section, by the names of the settings."""
    parser = ConfigParser(delimiters="=", comment_prefixes="#", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keep case
    parser.read_string(Path(__file__).with_name("settings.ini").read_text(encoding="utf-8"))
    return {
        section: {name: _entry(text) for names, text in parser.items(section) for name in names.split(", ")}
        for section in parser.sections()
    }


def _entry(text: str) -> Entry:
    """The entry of a setting: its text, and a line for each of its values that differs."""
    first, *lines = text.splitlines()
    start = next(start for start in _STARTS if first.startswith(start))
    stated = [line.removeprefix("[").partition("] ") for line in lines]
    values = {value.strip('"'): _entry(other) for names, _, other in stated for value in names.split(", ")}
    return Entry(_STARTS[start], first.removeprefix(start), values)


# Prefixes that files put before the names of these sections.
_PREFIXES = {
    "accelerate.fsdp": "fsdp_",
    "accelerate.dynamo": "dynamo_",
    "accelerate.fp8": "fp8_",
    "accelerate.parallelism": "parallelism_config_",
    "deepspeed.zero_optimization": "stage3_",
}


def entry_of(name: str, sections: Iterable[str]) -> Entry | None:
    """Returns the entry of `name` in the first of `sections` that has it, else of a pattern; None if it is unknown."""
    for section in sections:
        entries = table()[section]
        plain = name.removeprefix(_PREFIXES.get(section, ""))
        if name in entries or plain in entries:
            return entries[name] if name in entries else entries[plain]
    return next((entry for pattern, entry in table()[EVERY].items() if fnmatchcase(name, pattern)), None)


def read_settings(
    content: Mapping[str, Any],
    sections: Sequence[str],
    source: str,
    left_out: dict[str, str] | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Returns the values of the modelled settings of `content`, by their targets; None means not given.

    Args:
        sections: sections of the table; the first that has a name decides.
        source: names the content in errors.
        left_out: takes the settings that the answer leaves out, with what each would move; None refuses them.
        prefix: the setting whose keys `content` has, with a dot.

    Raises:
        UserError: a setting is refused; without `left_out`, one is not modelled or unknown.
    """
    found: dict[str, Any] = {}
    for name, value in content.items():
        value = _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value
        known_entry = entry_of(name, sections)
        entry = (known_entry or Entry(LEFT_OUT, "")).of(value)
        if entry.kind in (LIVE, LEFT_OUT, REFUSED):
            why = entry.text or "no such setting is known" + did_you_mean(name, known_names(sections))
            if left_out is None or entry.kind == REFUSED:
                shown = value if isinstance(value, (str, int, float)) else "..."
                raise UserError(f"{source}: {prefix}{name}: {shown}: {why}")
            left_out[prefix + name] = why
        elif entry.kind == KEYS:
            keys = keys_of(value, f"{source}: {prefix}{name}")
            inner = read_settings(keys, entry.text.split(", "), source, left_out, f"{prefix}{name}.")
            for target, read in inner.items():
                found.setdefault(target, read)
        elif known_entry is not None and entry.kind in (MODELLED, VALUE):
            by_value = any(one.kind == VALUE for one in known_entry.values.values())
            if entry.kind == VALUE or (value is not None and not (by_value and value is False)):
                target, read = known_entry.text, entry.text if entry.kind == VALUE else value
                if known_entry.kind != MODELLED:  # but at this value, which turns a switch on
                    target, read = entry.text, True
                if target in _GATHERED:
                    found.setdefault(target, {})[name] = read
                elif target not in found or str(read).lower() not in _OFF:  # what is on is on, in any order
                    found[target] = read
    return found


def known_names(sections: Sequence[str]) -> set[str]:
    """The names that `sections` have, and those that the patterns of every library begin with."""
    return {name.strip("*_") for section in (*sections, EVERY) for name in table()[section]}


def leave_out(left_out: dict[str, str] | None, name: str, why: str, source: str) -> None:
    """Notes in `left_out` that the answer is without a setting. Raises UserError if there is no `left_out`."""
    if left_out is None:
        raise UserError(f"{source}{name}: {why}")
    left_out[name] = why


def lines_of(left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what `read_settings` left out in lines: the settings with the same reason, and the reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in left_out.items():
        reasons.setdefault(why, []).append(name)
    return tuple(f"{', '.join(names)}: {why}" for why, names in reasons.items())


def keys_of(value: Any, what: str) -> Mapping[str, Any]:
    """Returns a mapping that a file gives as such or as JSON text."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{what}: '{value[:60]}' is not JSON") from error
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{what}: {str(value)[:60]}: give 'key: value' lines")
    return {str(key): inner for key, inner in value.items()}


@lru_cache(maxsize=1)
def _names() -> dict[str, tuple[str, ...]]:
    """Maps every name of a flag to all its names with the same values; our own name is first."""
    found: dict[str, list[str]] = {}
    for section in TYPED:
        for name, entry in table()[section].items():
            is_synonym = name not in _OTHER_MEANING and entry.text not in _COLLECTED
            if entry.kind == MODELLED and not entry.values and is_synonym:
                found.setdefault(entry.text, [entry.text]).append(name)
    rows = [tuple(dict.fromkeys(row)) for row in found.values()]
    return {name: row for row in rows for name in row}


_GATHERED = ("trainer_args", "fsdp_options")  # settings by their own names, which TRL and FSDP read
_COLLECTED = (*_GATHERED, "evaluation")  # several settings, each with values of its own, are read into these
_OTHER_MEANING = ("batch_size", "neat_packing")  # names of other libraries that mean another flag of ours


def names_of(name: str) -> tuple[str, ...]:
    """Returns all names of the flag `name`, ours first; dashes are read as underscores."""
    plain = name.replace("-", "_")
    return _names().get(plain, (plain,))


def known_as(name: str, known: Collection[str]) -> str:
    """Returns the name in `known` of the flag `name`; `name` itself if it is in `known` or no name matches."""
    plain = name.replace("-", "_")
    return plain if plain in known else next((other for other in names_of(plain) if other in known), name)


def typed_as(name: str) -> str:
    """Returns the command-line name of the flag `name`, with dashes."""
    return names_of(name)[0].replace("_", "-")
