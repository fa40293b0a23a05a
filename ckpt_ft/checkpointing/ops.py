"""The op group of a dispatched operator, whose output `save:` keeps, and the check of single operators' names."""

from __future__ import annotations

from functools import cache

import torch

from ckpt_ft.compat.tensors import schema_of
from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.policy import OP_GROUPS, OP_PATTERNS

GROUPS = {f"aten.{name}.default": group for group, names in OP_GROUPS.items() for name in names}


@cache
def group_of(op: str) -> str | None:
    """Return the group of the operator named `op` (the `str` of its overload), or None."""
    if op in GROUPS:
        return GROUPS[op]
    for group, pattern in OP_PATTERNS.items():
        if pattern.match(op):
            return group
    return None


def check_op_name(name: str) -> None:
    """Raise UserError unless this torch has the operator `name` (`aten.bmm.default`) and it allocates its output."""
    namespace, op, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        known = [name.split(".")[1] for name in GROUPS] if namespace == "aten" else []
        suggestion = did_you_mean(op, known, f"{namespace}.{{}}")
        raise UserError(f"save: this torch ({torch.__version__}) has no operator '{name}'{suggestion}")
    unknown = [part for part in overload if part not in packet.overloads()]
    if unknown:
        raise UserError(f"save: '{namespace}.{op}' has no overload '{unknown[0]}' ({', '.join(packet.overloads())})")
    overloads = [getattr(packet, part) for part in overload or packet.overloads()]
    schemas = [schema_of(overload) for overload in overloads]
    if any(schema.is_mutable and not any(argument.is_out for argument in schema.arguments) for schema in schemas):
        raise UserError(f"save: '{name}' writes into its input; there is no output of its own to keep")
    results = [result.alias_info for schema in schemas for result in schema.returns]
    if torch.ops.aten._unsafe_view.default in overloads or any(info and not info.is_write for info in results):
        raise UserError(
            f"save: '{name}' gives a view of its input, which holds no memory of its own to keep; name the operator "
            "that makes the tensor (aten.mm, aten.clone)"
        )
