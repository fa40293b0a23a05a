"""A trace as JSON and back: one row of numbers per storage and op, with each text stored once.

The document lists the columns of its rows under "fields" and all texts under "texts"; in a row, a text is its position
in that list. A step of 20,000 events is about 1 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace

# The columns of a row, in order, and the type of each: the fields of Storage and Op.
STORAGE_COLUMNS = {
    "nbytes": int, "category": str, "op": str, "module": str, "phase": str, "stream": str, "owner": str,
    "host": int, "host_kind": str,
}  # fmt: skip
OP_COLUMNS = {
    "name": str, "flops": int, "nbytes": int, "dtype": str, "phase": str, "module": str, "at": int, "kernels": int,
    "stream": str, "wire": int, "shape": tuple, "around": str, "group": tuple,
}  # fmt: skip


def dumps(trace: StepTrace) -> str:
    texts: dict[str, int] = {}  # insertion order is index order

    def rows(records: Iterable[object], columns: Mapping[str, type]) -> list[list[Any]]:
        values = map(attrgetter(*columns), records)
        return [[texts.setdefault(v, len(texts)) if isinstance(v, str) else v for v in row] for row in values]

    document = {
        "device": trace.device,
        "gpu": asdict(trace.gpu) if trace.gpu else None,
        "fields": {"storages": list(STORAGE_COLUMNS), "ops": list(OP_COLUMNS)},
        "storages": rows(trace.storages, STORAGE_COLUMNS),
        "ops": rows(trace.ops, OP_COLUMNS),
        "events": trace.events,
        "marks": trace.marks,
        "micro_batches": trace.micro_batches,
        "launch": asdict(trace.launch) if trace.launch else None,
        "alloc_conf": trace.alloc_conf,
        "notes": trace.notes,
        "source": trace.source,
        "texts": texts,
    }
    return json.dumps({**document, "texts": list(texts)}, separators=(",", ":"))


def loads(text: str) -> dict[str, Any]:
    """The document that `dumps` wrote, with the texts back in the rows of its storages and ops."""
    document: dict[str, Any] = json.loads(text)
    texts = document.pop("texts")
    del document["fields"]

    def rows(name: str, columns: Mapping[str, type]) -> list[tuple[Any, ...]]:
        kinds = columns.values()
        return [
            tuple(texts[v] if kind is str else kind(v) for v, kind in zip(row, kinds, strict=False))
            for row in document[name]  # older documents have no host
        ]

    document |= {"storages": rows("storages", STORAGE_COLUMNS), "ops": rows("ops", OP_COLUMNS)}
    return document | {"marks": [(at, name) for at, name in document["marks"]]}
