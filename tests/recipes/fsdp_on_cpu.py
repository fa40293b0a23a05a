"""Runs a recipe under FSDP2 on CPU ranks: `torchrun ... fsdp_on_cpu.py recipes/llm.py FLAGS`.

accelerate enables FSDP only for ranks with an accelerator, although FSDP2 runs on gloo; here CPU ranks are presented
to it as GPU ranks. torch's ring attention gets the CPU's kernel, which it does not know.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from ckpt_ft.memory.distributed.sequence_parallel import rings_on_cpu

_start = PartialState.__init__


def _as_if_on_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
    _start(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = _as_if_on_gpus  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    with rings_on_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
