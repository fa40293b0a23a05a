"""Where autograd writes gradients in place, but not under a dispatch mode.

A tensor that several ops used gets the sum of their gradients. The engine adds into the first one when nobody else
holds it, except under a dispatch mode: there every tensor counts as a subclass, and the sum is a new tensor
[torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace; aten/src/ATen/TensorSubclassLikeUtils.h]. So it is with
gradients that go to their places among zeros: of gather, sort, topk and the like, as large as what they were taken
from [torch/csrc/autograd/FunctionsManual.cpp, aten/src/ATen/native/TensorAdvancedIndexing.cpp]. The record tells what
happens without the mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ADD = torch.ops.aten.add.Tensor
_ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
_PLACED = ("scatter_add.default", "scatter.src", "put.default", "index_add.default", "index_put.default")
IN_PLACE = frozenset(f"aten.{name}" for name in ("add.Tensor", *_PLACED))  # what may be


def is_in_place(func: Any, args: tuple[Any, ...], made_by: Callable[[Tensor], str]) -> bool:
    """Whether this call of one of IN_PLACE in backward writes into its first argument.

    Call it from a mode's `__torch_dispatch__`, which may hold `args` but not the tensors in them.

    made_by: the name of the op that a tensor is from.
    """
    return adds_in_place(args) if func is ADD else _is_placed(args, made_by)


def _is_placed(args: tuple[Any, ...], made_by: Callable[[Tensor], str]) -> bool:
    """Whether autograd's own code, not a function of the user's, puts values among zeros that it has just made."""
    node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    return node is not None and node.name()[-1:].isdigit() and made_by(args[0]) in _ZEROS


def adds_in_place(args: tuple[Any, ...]) -> bool:
    """Whether this call of ADD in backward is the engine's, and its first argument its own.

    Call it from a mode's `__torch_dispatch__`, which may hold `args` but not the tensors in them.
    """
    return not torch.is_grad_enabled() and _is_whole(args[0]) and _owners(args) == owners_of_a_sum()


def _is_whole(tensor: Tensor) -> bool:
    """Whether a strided tensor is all of its memory, and has some."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize > 0


def _owners(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """How many hold the first argument: its C++ object, its storage, its Python object."""
    storage = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return args[0]._use_count(), storage, sys.getrefcount(args[0])


@cache
def owners_of_a_sum() -> tuple[int, int, int]:
    """What adds_in_place counts where nobody but the engine holds the gradient, which depends on PyTorch's version.

    A backward of its own finds it: call it once before the modes are on.
    """
    found: list[tuple[int, int, int]] = []

    class Ask(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func is ADD and torch._C._current_graph_task_id() >= 0:
                found.append(_owners(args))
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        y = (x.sin() + x.cos()).sum()
        with Ask():
            y.backward()
    return found[0]
