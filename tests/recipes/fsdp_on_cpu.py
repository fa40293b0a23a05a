"""Runs a recipe under FSDP2 on CPU ranks: `torchrun ... fsdp_on_cpu.py recipes/llm.py FLAGS`.

accelerate enables FSDP only for ranks with an accelerator, although FSDP2 runs on gloo; here CPU ranks are presented
to it as GPU ranks. torch's ring attention gets the CPU's kernel, which it does not know. transformers loads shards on
a CPU as views, which keep the whole weight in memory; they are copied, as they are on a GPU.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from ckpt_ft.memory.distributed.sequence_parallel import rings_on_cpu
from ckpt_ft.training.session import Session

_start = PartialState.__init__


def _as_if_on_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
    _start(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


_apply = Session.apply


@torch.no_grad()
def _apply_to_own_shards(self: Session, model: torch.nn.Module) -> None:
    for parameter in [p for p in model.parameters() if isinstance(p, DTensor)]:
        shard = parameter._local_tensor
        if 0 < shard.numel() < parameter.numel() and shard.untyped_storage().nbytes() >= parameter.nbytes:
            shard.set_(shard.clone())
    _apply(self, model)


if __name__ == "__main__":
    Session.apply = _apply_to_own_shards  # type: ignore[method-assign]
    PartialState.__init__ = _as_if_on_gpus  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    with rings_on_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
