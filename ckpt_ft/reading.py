"""JSON that we wrote, read back: it may have been edited, cut, or be someone else's."""

from __future__ import annotations

from typing import Annotated, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from ckpt_ft.errors import UserError

_MOST = 2**62  # bytes or counts: larger numbers are no figures
Count = Annotated[int, Ge(1), Le(_MOST)]
Bytes = Annotated[int, Ge(0), Le(_MOST)]
Seconds = Annotated[float, Gt(0), Lt(float("inf"))]

T = TypeVar("T")


def read_json(kind: type[T], text: str | bytes, source: str, meant: str) -> T:
    """A `kind`, a dataclass, from what `json.dumps(asdict(it))` made, each field of its type; others are passed over.

    meant: what `source` should have been, for the error.

    Raises:
        UserError: it is not; says which field and why.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{source}: not {meant} ({place + ': ' if place else ''}{first['msg']})") from error
