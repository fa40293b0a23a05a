"""Tensors, their storages, fake tensors, and the modes that see operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import Table

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
FakeTensor: torch._subclasses.fake_tensor.FakeTensor
FakeTensorMode: torch._subclasses.fake_tensor.FakeTensorMode
    the tensors of a trace: shapes without data
DataDependentOutputException: torch._subclasses.fake_tensor.DataDependentOutputException
DynamicOutputShapeException: torch._subclasses.fake_tensor.DynamicOutputShapeException
    name the operator that needs values of a fake tensor
no_dispatch: torch._C._DisableTorchDispatch
no_modes: torch.utils._python_dispatch._disable_current_modes
    operators that are not the step's; the second also for code that enters modes itself
gradient_hooks: torch.Tensor()._backward_hooks
accumulated_hooks: torch.Tensor()._post_accumulate_grad_hooks
    a fake gets the user's hooks of the tensor that it stands for
swap_contents: torch._C._swap_tensor_impl
    turns a tensor into a fake in place; `torch.utils.swap_tensors` refuses tensors with weak references
""",
)
