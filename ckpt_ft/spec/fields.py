"""Declares the fields of a `TrainingSpec`: default, help, range and the flags that set a field.

A part of the spec is a frozen dataclass whose fields are declared by `setting`. Annotations carry the ranges
(`annotated_types`) and the choices (`Literal`). pydantic checks them whenever a part is created. It is imported only
then, so that `ckpt-ft --help` can read the declarations without it.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from dataclasses import field as dataclass_field
from functools import lru_cache
from typing import Any, Literal, Union

from ckpt_ft.errors import UserError, did_you_mean, one_line
from ckpt_ft.units import GIB, KIB, MIB, is_bare, parse_budget

_META = "setting"
_UNITS = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "": 1}


@dataclass(frozen=True)
class Switch:
    """A flag without a value that sets a field: `--bf16` sets `mixed_precision` to "bf16".

    Attributes:
        name: the flag, with underscores.
        weak: another flag for the same field wins; otherwise two values for one field are an error.
    """

    name: str
    value: Any
    help: str
    weak: bool = False


@dataclass(frozen=True)
class Setting:
    """The declaration of a field, in addition to its type and default.

    Attributes:
        label: the field in error messages; its name in words if empty.
        rule: what is allowed, or what is not and why, for error messages.
        key: the name of the field in `TrainingSpec.of` and `edit`; the attribute's name if empty.
        flag: the name of its flag on the command line, with underscores; None for a field without one.
        typed: the flag's name on our command line, if it differs.
        also: other names of that flag on our command line.
        read: converts the flag's text to the value; None if the type does it.
        write: converts the value to the flag's text, the inverse of `read`.
        flag_type: type of the flag's value, if it differs from the field's.
        default_text: the default as `--help` shows it.
        switches: flags without a value that also set this field.
        implies: other fields that the flag sets if they are not given.
        needs: another field of the same part, without which this one would have no effect.
    """

    help: str
    label: str = ""
    rule: str = ""
    key: str = ""
    flag: str | None = ""
    typed: str = ""
    also: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], str] = str
    flag_type: Any = None
    default_text: str = ""
    switches: tuple[Switch, ...] = ()
    implies: Mapping[str, Any] = dataclass_field(default_factory=dict)
    needs: str = ""


def setting(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field with its `Setting`; `more` are other attributes of that class."""
    return dataclass_field(default=default, metadata={_META: Setting(help, **more)})


@dataclass(frozen=True)
class Declared:
    """A field of a part of the spec, as declared."""

    key: str  # unique among all parts
    part: str  # the attribute of TrainingSpec
    name: str  # the attribute of the part
    type: Any
    default: Any
    setting: Setting

    @property
    def flag(self) -> str | None:
        """The name of its flag, with underscores; None without one."""
        return self.setting.flag if self.setting.flag is None else self.setting.flag or self.key

    @property
    def option(self) -> str:
        """Its option on the command line, for a field that has one."""
        return option_of(self.setting.typed or str(self.flag))

    @property
    def label(self) -> str:
        """The field in error messages, which also readers of files and of live trainers raise."""
        return self.setting.label or self.key.replace("_", " ")

    @property
    def flag_type(self) -> Any:
        """The builtin type of the flag's value."""
        return self.setting.flag_type or _plain(self.type)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values of a `Literal` field; () for others."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()


def option_of(name: str) -> str:
    """Returns the command-line option of the flag `name`."""
    return f"--{name.replace('_', '-')}"


def declared_in(part: type, attribute: str) -> list[Declared]:
    """The fields of `part`, the dataclass of a spec's attribute `attribute`."""
    types = typing.get_type_hints(part, include_extras=True)
    stated: dict[str, Setting] = {own.name: own.metadata[_META] for own in fields(part)}
    return [
        Declared(stated[own.name].key or own.name, attribute, own.name, types[own.name], own.default, stated[own.name])
        for own in fields(part)
    ]


def _plain(kind: Any) -> Any:
    """Returns `int` for `Annotated[int, Ge(1)] | None`; `str` for a Literal of strings."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _plain(typing.get_args(kind)[0])
    if origin in (Union, types.UnionType):
        return _plain(next(option for option in typing.get_args(kind) if option is not type(None)))
    return type(typing.get_args(kind)[0]) if origin is Literal else kind


class Part:
    """Base class of the spec's parts: pydantic checks the fields on creation and converts them to their types.

    Raises:
        UserError: a field has an invalid value; one line with the given value and the allowed ones.
    """

    def __post_init__(self) -> None:
        from pydantic import ValidationError

        kind: Any = type(self)
        stated = {own.name: own for own in declared_in(kind, "")}
        given = {name: getattr(self, name) for name in stated}
        try:
            checked = _model_of(kind).model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise UserError(_refusal(stated[name], given[name], first)) from error
        for name in stated:
            object.__setattr__(self, name, getattr(checked, name))
        for name, own in stated.items():
            if own.setting.needs and getattr(self, name) != own.default and not getattr(self, own.setting.needs):
                needed = stated[own.setting.needs].label
                raise UserError(f"{own.label}: it has no effect without {needed}; give both, or leave it out")
        refuse(self.problems())

    def problems(self) -> dict[str, object]:
        """What is wrong with the fields together: the message of each combination, and whether it is there."""
        return {}


def refuse(problems: Mapping[str, object]) -> None:
    """Raises UserError with the first message of `problems` whose value is true."""
    if problem := next((text for text, is_so in problems.items() if is_so), ""):
        raise UserError(problem)


@lru_cache
def _model_of(part: type[Any]) -> Any:
    from pydantic import ConfigDict, create_model

    asked: dict[str, Any] = {own.name: (own.type, own.default) for own in declared_in(part, "")}
    return create_model(part.__name__, __config__=ConfigDict(arbitrary_types_allowed=True, extra="forbid"), **asked)


def _refusal(stated: Declared, given: Any, error: Any) -> str:
    label = stated.label
    if stated.choices:
        allowed = [str(choice) for choice in stated.choices if choice != ""]
        rule = f"; {stated.setting.rule}" if stated.setting.rule else ""
        return f"{label} '{given}'{did_you_mean(str(given), allowed)} ({', '.join(allowed)}){rule}"
    if error["type"] == "less_than_equal":
        return f"{label} {given}: at most {error['ctx']['le']}"
    return f"{label} {given}: {stated.setting.rule or one_line(error['msg'], 200)}"


def names_of_text(text: str) -> tuple[str, ...]:
    """Returns comma-separated names; `",".join` is the inverse."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def size_of_text(text: str) -> tuple[int, int]:
    """Returns (width, height) of "640x480" or, for a square, "640".

    Raises:
        UserError: the text has another form.
    """
    sides = text.lower().split("x")
    if not (len(sides) in (1, 2) and all(side.strip().isdecimal() for side in sides)):
        raise UserError(f"--image-size {text}: give width and height in pixels, 640x480 for example")
    return int(sides[0]), int(sides[-1])


def bytes_of_text(flag: str) -> Callable[[str], int]:
    """Returns a reader of amounts of memory for `flag`. It reads a bare number as GiB, with a note on stderr."""

    def read(text: str) -> int:
        if is_bare(text):
            print(f"note: {flag} {text} is taken as {text} GiB", file=sys.stderr)
        return parse_budget(text)

    return read


def text_of_bytes(nbytes: int) -> str:
    """Formats bytes in the largest unit that gives a whole number: 24GiB, 150MiB."""
    unit, size = next((unit, size) for unit, size in _UNITS.items() if nbytes % size == 0)
    return f"{nbytes // size}{unit}"
