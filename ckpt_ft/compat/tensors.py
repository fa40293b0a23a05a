"""Tensors, their storages, fake tensors, and the modes that see operators."""

from typing import TYPE_CHECKING

from . import Table

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

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
TorchDispatchMode: torch.utils._python_dispatch.TorchDispatchMode
    sees every operator below autograd
without_fakes: torch._subclasses.fake_tensor.unset_fake_temporarily
    returns the fake mode that is active, without an operator
no_dispatch: torch._C._DisableTorchDispatch
no_modes: torch.utils._python_dispatch._disable_current_modes
    operators that are not the step's; the second also for code that enters modes itself
no_torch_functions: torch._C.DisableTorchFunction
no_subclasses: torch._C.DisableTorchFunctionSubclass
    hide what runs inside from modes and subclasses above autograd
excluded: torch._C._SetExcludeDispatchKeyGuard
DispatchKey: torch._C.DispatchKey ADInplaceOrView AutocastCPU CompositeImplicitAutograd
    leave a step of dispatch out, such as autocast
is_traceable_wrapper_subclass: torch.utils._python_dispatch.is_traceable_wrapper_subclass
    tensors whose memory is in other tensors
OpOverload: torch._ops.OpOverload
schema_of: torch._ops.OpOverload()._schema
    an operator's name, arguments and results
tree_leaves: torch.utils._pytree.tree_leaves
tree_map: torch.utils._pytree.tree_map
tree_map_only: torch.utils._pytree.tree_map_only
    tensors in nested lists and dicts, and in classes that libraries have registered
write_count: torch.Tensor()._version
set_write_counts: torch._C._autograd._unsafe_set_version_counter
    a tensor that was written in place since autograd saved it
gradient_hooks: torch.Tensor()._backward_hooks
accumulated_hooks: torch.Tensor()._post_accumulate_grad_hooks
    a fake gets the user's hooks of the tensor that it stands for
swap_contents: torch._C._swap_tensor_impl
    turns a tensor into a fake in place; `torch.utils.swap_tensors` refuses tensors with weak references
make_subclass: torch.Tensor._make_subclass
    makes a fake tensor in a third of the time of its constructor
storage_pointer: torch.UntypedStorage()._cdata
    tells storages apart; the object in Python may be a new one, at the address of a former one
storage_uses: torch._C._storage_Use_Count
tensor_uses: torch.Tensor()._use_count
    whether autograd adds a gradient in place: nothing else refers to it
suggest_memory_format: torch._prims_common.suggest_memory_format
    the layout of a result of BatchNorm
kernels_found: torch._ops.OpOverload()._dispatch_cache
    kernels that a trace registers are gone after it
""",
)
