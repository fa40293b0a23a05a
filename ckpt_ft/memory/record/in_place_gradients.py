"""Finds the ops in backward that autograd runs in place without a dispatch mode, and out of place under one.

A tensor that several ops used receives the sum of their gradients. Autograd adds into the first gradient if nothing
else refers to it, except under a dispatch mode: there every tensor counts as a subclass, and the sum is a new tensor
[torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace; aten/src/ATen/TensorSubclassLikeUtils.h]. The same is
true of gradients that are written into a tensor of zeros: those of gather, sort and topk, as large as the tensor that
was read [torch/csrc/autograd/FunctionsManual.cpp, aten/src/ATen/native/TensorAdvancedIndexing.cpp]. The record shows
a step without the mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.compat.autograd import current_node, graph_task
from ckpt_ft.compat.tensors import TorchDispatchMode, no_modes, storage_pointer, storage_uses, tensor_uses

ADD = torch.ops.aten.add.Tensor
_ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
_PLACED = ("scatter_add.default", "scatter.src", "put.default", "index_add.default", "index_put.default")
IN_PLACE = frozenset(f"aten.{name}" for name in ("add.Tensor", *_PLACED))  # candidates


def is_in_place(func: Any, args: tuple[Any, ...], made_by: Callable[[Tensor], str]) -> bool:
    """Whether this call of one of IN_PLACE in backward is autograd's, and would write into its first argument.

    That is a gradient that nothing else holds, or zeros that autograd, not a user's function, has just allocated.
    It counts references: call it from a mode's `__torch_dispatch__`, which may hold `args` but not the tensors in it.

    made_by: returns the name of the op that allocated a tensor.
    """
    if torch.is_grad_enabled():
        return False
    if func is ADD:
        return covers_storage(args[0]) and _reference_counts(args) == counts_of_a_sum()
    node = current_node()
    return node is not None and node.name()[-1:].isdigit() and made_by(args[0]) in _ZEROS


def covers_storage(tensor: Tensor) -> bool:
    """Whether a strided tensor covers all of its storage, and is not empty."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize > 0


def _reference_counts(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """References to the first argument: to its C++ object, its storage, its Python object."""
    storage = storage_uses(storage_pointer(args[0].untyped_storage()))
    return tensor_uses(args[0])(), storage, sys.getrefcount(args[0])


@cache
def counts_of_a_sum() -> tuple[int, int, int]:
    """The reference counts of a gradient that only autograd holds, which depend on PyTorch's version.

    They are measured in a small backward: call this once before any mode is active.
    """
    found: list[tuple[int, int, int]] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func is ADD and graph_task() >= 0:
                found.append(_reference_counts(args))
            return func(*args, **(kwargs or {}))

    with no_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        y = (x.sin() + x.cos()).sum()
        with Count():
            y.backward()
    return found[0]
