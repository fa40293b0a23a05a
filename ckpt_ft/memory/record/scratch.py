"""Scratch of CPU kernels: memory that they take and give back inside, where dispatch does not see it.

oneDNN copies its operands into blocked layouts, result included, and works in a scratchpad besides. How much depends
on the algorithm that it takes for this CPU's instructions and threads [aten/src/ATen/native/mkldnn/Conv.cpp; oneDNN,
"Memory format propagation", "Primitive attributes: scratchpad"]; attention takes a block of scores for each thread
[native/cpu/FlashAttentionKernel.cpp]. Matmuls in half precision are converted where the CPU has no instructions for
them. No table of formulas holds on two machines, so the kernels are asked, by
PyTorch's own record of allocations on this thread.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from .casts import AFTER as CASTS
from .opinfo import After, Rule

aten = torch.ops.aten

MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)  # those in half precision
KERNELS = (
    *MATMULS,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
# Of the CPU, allocations alone. The profiler behind torch.profiler sees the same, and takes milliseconds to start.
_MEMORY = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())


def takes_scratch(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of one of KERNELS is worth asking."""
    return func not in MATMULS or args[-1].dtype in (torch.bfloat16, torch.float16)


def observed(call: Callable[[], Any]) -> tuple[Any, int]:
    """What `call` returns, and the bytes that it had at most beside what it left; 0 under a profiler of the user's."""
    if _profiler_enabled():
        return call(), 0
    _enable_profiler_legacy(_MEMORY)
    try:
        out = call()
    finally:
        records = _disable_profiler_legacy()
    changes = [event.cpu_memory_usage() for thread in records for event in thread if event.kind() == "memory_alloc"]
    held = list(accumulate(changes, initial=0))
    return out, max(held) - held[-1]


def measured() -> tuple[dict[Any, Rule], dict[Any, After]]:
    """For a Tracker of real tensors: run each of KERNELS under the profiler, then record what it took."""
    taken = 0

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal taken
        if not takes_scratch(func, args):
            taken = 0
            return func(*args, **kwargs)
        out, taken = observed(lambda: func(*args, **kwargs))
        return out

    def record(tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if taken:
            tracker.scratch(taken, str(func))

    return dict.fromkeys(KERNELS, run), {**CASTS, **dict.fromkeys(KERNELS, record)}
