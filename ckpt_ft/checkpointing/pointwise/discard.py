"""The engine of `pointwise`: outputs of cheap calls are discarded after forward and rebuilt once when backward asks.

A *cheap call* is a norm, an activation, a product. While it runs, a saved-tensor hook puts a `Discarded` handle in
place of every tensor that its autograd nodes save. Its output's storage is marked with a `Claim`; when a later node (a
matmul, a convolution, another cheap call) saves a tensor on that storage, it gets a handle as well. What is kept is
the call's inputs, which are handles themselves where another cheap call made them. The first handle that backward
opens makes the call again, once, and fills all of them; autograd drops a handle, and so the tensor, when its node is
done. rebuild.py has the handles and the second run.

The graph stays the one that the plain forward builds, so gradients come from the same kernels in the same order: there
is no custom backward, no nested backward call and no dispatch mode. Compare output-discarding recomputation in
Megatron-Core (`megatron/core/tensor_parallel/random.py`, `CheckpointWithoutOutput`), In-Place ABN (Bulò et al. 2018,
arXiv:1712.02616) for BatchNorm + ReLU, and `torch/utils/checkpoint.py` for the matching of saved tensors by order.

Every tensor that a model saves comes through here, so what runs per tensor is written for the interpreter's sake.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn import Parameter

from ckpt_ft.checkpointing.tensor_identity import is_wrapper, version_of, view_of

from .rebuild import CLAIM, CheapCall, Claim, Discarded, Frame, Handed, Input, Saved, claim_on

# A rebuild may need another, and so on down a chain (the residual stream of a ResNet stage). The bound keeps that
# short in Python's stack and in the memory that the chain fills at once; beyond it the output is kept.
MAX_CHAIN = 32


class Pass:
    """One forward pass of a model: the hooks that what its nodes save goes through, and the cheap call that runs."""

    def __init__(self, notes_kept: bool) -> None:
        self.frame: Frame | None = None
        # storages that some node keeps anyway; by address, as it decides what there is to gain and never a value
        self.kept: set[int] | None = set() if notes_kept else None
        # hooks do not nest by themselves: only the innermost pair is called
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(self, tensor: torch.Tensor) -> Discarded | Handed | Saved:
        """The saved-tensor hook; it sees the tensor itself, `grad_fn` and all."""
        frame = self.frame
        if frame is not None:
            if type(tensor) is Parameter:  # stays anyway
                frame.internals.append(None)
                return tensor, tensor._version
            handle = Discarded(frame)
            frame.internals.append(weakref.ref(handle))
            return handle
        storage = None if tensor.is_sparse else tensor.untyped_storage()  # a sparse one has two, and no cheap call's
        claim: Claim | None = getattr(storage, CLAIM, None)
        if claim is not None and claim.covers(tensor):
            return claim.discard(tensor)
        if self.kept is not None and storage is not None:
            self.kept.add(storage._cdata)
        if self.outer is not None:
            return self._hand_on(tensor)
        # a node that keeps its own output would keep itself alive
        return (tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def _hand_on(self, tensor: torch.Tensor) -> Handed:
        pack, unpack = self.outer
        return Handed(pack(tensor), unpack)

    def is_free(self, tensor: torch.Tensor) -> bool:
        """Whether holding `tensor` costs nothing: it can be rebuilt, or a node of the graph keeps it anyway."""
        storage = tensor.untyped_storage()
        return claim_on(tensor) is not None or (self.kept is not None and storage._cdata in self.kept)

    def run(self, call: CheapCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a cheap call; what it saves for backward is discarded and its outputs are claimed."""
        device, depth, storages = None, 0, []
        held: list[Any] = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            if not isinstance(value, torch.Tensor):
                held.append(value)
                continue
            device = value.device
            storages.append(storage := value.untyped_storage())
            claim: Claim | None = getattr(storage, CLAIM, None)
            if claim is not None and claim.frame.depth < MAX_CHAIN and claim.covers(value):
                depth = max(depth, claim.frame.depth + 1)
                held.append(Input(claim.discard(value), value.requires_grad))
            elif call.inplace and not held:  # about to be overwritten, and cannot be rebuilt
                return call.forward(*args, **kwargs)
            else:
                alias = value.detach()
                kept = (alias, version_of(alias)) if self.outer is None else self._hand_on(alias)
                held.append(Input(kept, value.requires_grad))
        if device is None:
            return call.forward(*args, **kwargs)
        named = dict(zip(kwargs, held[len(args) :], strict=True)) if kwargs else kwargs
        self.frame = frame = Frame(call, held[: len(args)] if kwargs else held, named, depth, device)
        try:
            output = call.forward(*args, **kwargs)
        finally:
            self.frame = None
        for index, value in enumerate(output if isinstance(output, tuple) else (output,)):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                # one that aliases an input (Identity, a conversion to the same dtype) is not this call's to rebuild;
                # a view of a DTensor or a jagged tensor cannot be made again from its storage
                if (call.inplace or not any(storage is other for other in storages)) and not is_wrapper(value):
                    setattr(storage, CLAIM, Claim(frame, index, value))
        return output

    def cast(self, claim: Claim, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`tensor`, which the claim covers, in another dtype; in backward all its copies are one."""
        key = (dtype, view_of(tensor))
        claim.casts = {} if claim.casts is None else claim.casts
        frame = claim.casts.get(key)
        if frame is None or frame.args is None:
            held = Input(claim.discard(tensor), tensor.requires_grad)
            frame = Frame(_Cast(dtype), [held], {}, claim.frame.depth + 1, tensor.device)
            claim.casts[key] = frame
        copy = tensor.to(dtype)  # its node saves nothing
        setattr(copy.untyped_storage(), CLAIM, Claim(frame, 0, copy))
        return copy

    def cast_parameter(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """`parameter` in another dtype, not kept either."""
        held = Input((parameter, parameter._version), parameter.requires_grad)
        frame = Frame(_Cast(dtype), [held], {}, 0, parameter.device)
        copy = parameter.to(dtype)
        setattr(copy.untyped_storage(), CLAIM, Claim(frame, 0, copy))
        return copy


class _Cast:
    """The conversion of a tensor to another dtype, as a cheap call."""

    random = inplace = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy."""
        return tensor.to(self.dtype)

    def state(self) -> None:
        """Nothing to know."""

    def again(self, state: None, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """The copy again."""
        return args[0].to(self.dtype)
