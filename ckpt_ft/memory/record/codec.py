"""A trace as JSON and back: rows of numbers under the names of their fields, texts listed once."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, fields
from typing import Any

from ckpt_ft.memory.gpus import GPU
from ckpt_ft.spec.launch import Launch

from .events import Op, Storage
from .recorded import Recorded


def dumps(trace: Recorded) -> str:
    """Everything recorded."""
    texts: dict[str, int] = {}

    def row(record: Storage | Op) -> list[Any]:
        return [texts.setdefault(v, len(texts)) if isinstance(v, str) else v for v in astuple(record)]

    document = {
        "device": trace.device,
        "gpu": asdict(trace.gpu) if trace.gpu else None,
        "fields": {"storages": [f.name for f in fields(Storage)], "ops": [f.name for f in fields(Op)]},
        "storages": [row(storage) for storage in trace.storages],
        "ops": [row(op) for op in trace.ops],
        "events": trace.events,
        "marks": trace.marks,
        "micro_batches": trace.micro_batches,
        "launch": asdict(trace.launch) if trace.launch else None,
        "alloc_conf": trace.alloc_conf,
        "notes": trace.notes,
        "source": trace.source,
        "texts": texts,  # insertion order is index order
    }
    return json.dumps({**document, "texts": list(texts)}, separators=(",", ":"))


def loads(text: str) -> dict[str, Any]:
    """The fields of the trace that `dumps` wrote."""
    document = json.loads(text)
    texts = document["texts"]
    launch = document["launch"]
    return {
        "device": document["device"],
        "storages": [Storage(n, *(texts[i] for i in rest)) for n, *rest in document["storages"]],
        "events": document["events"],
        "ops": [_op(texts, row) for row in document["ops"]],
        "marks": [(at, name) for at, name in document["marks"]],
        "notes": document["notes"],
        "gpu": GPU(**document["gpu"]) if document["gpu"] else None,
        "micro_batches": document["micro_batches"],
        "launch": Launch.from_dict(launch) if launch else None,
        "alloc_conf": document["alloc_conf"],
        "source": document["source"],
    }


def _op(texts: list[str], row: list[Any]) -> Op:
    name, flops, nbytes, dtype, phase, module, at, kernels, stream, wire, shape, around = row
    here = texts[dtype], texts[phase], texts[module], at, kernels, texts[stream], wire
    return Op(texts[name], flops, nbytes, *here, tuple(shape), texts[around])
