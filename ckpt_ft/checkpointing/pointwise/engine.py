"""The engine of `pointwise`: discards outputs of cheap calls after forward and rebuilds them once in backward.

A *cheap call* is, for example, a norm, an activation or a product. While it runs, a saved-tensor hook replaces every
tensor that its autograd nodes save by a `Discarded` handle, and its output's storage gets a `Claim`. If a later node
(a matmul, a convolution, another cheap call) saves a tensor on that storage, the hook replaces this tensor by a
handle, too. Only the inputs of the call are kept; an input that another cheap call computed is itself a handle. The
first handle that backward unpacks re-runs the call once, and each handle takes its tensor from that run. Autograd
frees a handle, and so its tensor, when the handle's node is done.

The graph is the same as in a plain forward pass, so the same kernels compute gradients in the same order. There is no
custom backward, no nested backward call and no dispatch mode. Compare output-discarding recomputation in Megatron-Core
(`megatron/core/tensor_parallel/random.py`, `CheckpointWithoutOutput`), In-Place ABN (Bulò et al. 2018,
arXiv:1712.02616) for BatchNorm + ReLU, and `torch/utils/checkpoint.py` for matching saved tensors by order.

The hooks run for every saved tensor of a model, so their code is optimized for the interpreter.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter

from ckpt_ft.checkpointing import rng
from ckpt_ft.checkpointing.autocast import any_autocast, autocast_as, autocast_now
from ckpt_ft.checkpointing.tensor_identity import (
    View,
    counter_of,
    counts_with,
    is_wrapper,
    looked_at,
    version_of,
    view_of,
    written_to,
)
from ckpt_ft.checkpointing.verify import TensorComparison, Verification
from ckpt_ft.compat.autograd import pop_hooks, push_hooks, set_grad, top_hooks
from ckpt_ft.compat.tensors import write_count
from ckpt_ft.errors import UserError

CLAIM = "_ckpt_ft_claim"
_KEPT = "_ckpt_ft_kept"  # on a storage: the pass in which an autograd node saved it
_rebuilding = threading.RLock()  # backward has one thread per device

# argument types that cannot change between forward and backward
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.Size, Module)

Versioned = tuple[torch.Tensor, int]  # a tensor and its version when it was saved


class CheapCall:
    """A call that is cheap to run again: here an operator, in `ModuleCall` a norm, an activation or a dropout.

    Attributes:
        forward: the function of the first run.
        inplace: it overwrites its first argument with its output.
        name: qualified name of the module; "" for an operator.
        kind: class of the module, or the operator.
        random: it draws random numbers.
    """

    name, random = "", False

    def __init__(self, forward: Callable[..., Any], inplace: bool = False) -> None:
        self.forward, self.inplace, self.kind = forward, inplace, forward.__name__

    def __repr__(self) -> str:
        return self.kind

    def unread(self) -> Iterable[torch.Tensor | None]:
        """Return tensors that the call's nodes save but backward does not read."""
        return ()

    def state(self) -> Any:
        """Return the state of the first call that `rerun` needs: parameters, mode."""

    def rerun(self, state: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Build the same graph on the same inputs as `forward` did, without its side effects.

        Raises RuntimeError if a tensor in `state` was modified in place since.
        """
        return self.forward(*args, **kwargs)


_CAST = CheapCall(torch.Tensor.to)


class Proof:
    """In a verified step: fingerprints of what one run of a cheap call saved, to compare with the second run."""

    __slots__ = ("comparison", "read", "slots", "unread")

    def __init__(self, verification: Verification, call: CheapCall) -> None:
        self.comparison = TensorComparison(verification, call.name, call.kind)
        self.unread = {id(buffer) for buffer in call.unread()}
        self.slots: list[int | None] = []  # one per tensor that the call's own nodes saved, in order
        self.read: dict[tuple[int, View], int] = {}  # slots of views of outputs that other nodes saved

    def saved(self, tensor: torch.Tensor, compared: bool) -> None:
        """Record that a node of the call saved `tensor`, to be compared unless backward does not read it."""
        compared = compared and id(tensor) not in self.unread
        self.slots.append(self.comparison.saved(tensor) if compared else None)

    def saved_output(self, index: int, view: View, tensor: torch.Tensor) -> None:
        """Record that another node saved `tensor`, a view of the call's `index`-th output."""
        if (index, view) not in self.read:
            self.read[index, view] = self.comparison.saved(tensor)

    def rebuilt(self, saved: list[torch.Tensor]) -> None:
        """Compare the second run's saved tensors with the first's, and replace those that backward cannot use."""
        for index, slot in enumerate(self.slots):
            if slot is not None:
                saved[index] = self.comparison.restored(slot, saved[index])

    def missing(self, why: str) -> list[torch.Tensor]:
        """Return zeros in place of the saved tensors, which were not rebuilt (see `TensorComparison.absent`)."""
        return [torch.empty(0) if slot is None else self.comparison.absent(slot, why) for slot in self.slots]

    def rebuilt_output(self, key: tuple[int, View], tensor: torch.Tensor) -> torch.Tensor:
        """Compare a rebuilt view of an output with the recorded one; return the tensor that backward uses."""
        return self.comparison.restored(self.read[key], tensor)


class Discarded:
    """A handle that replaces the `index`-th tensor that the cheap call's own nodes saved."""

    __slots__ = ("index", "source")

    def __init__(self, source: CheapRun, index: int) -> None:
        self.source: CheapRun | torch.Tensor = source
        self.index = index

    def get(self) -> torch.Tensor:
        """Return the tensor; the first request rebuilds all tensors of its cheap call."""
        if type(run := self.source) is CheapRun:
            if run.args is not None:  # the lock is taken once for a call, not for each handle
                run.rebuild()
            tensor = run.saved[self.index]
            if tensor is not None:  # else another thread has just taken it
                self.source, run.saved[self.index] = tensor, None
        return self.source  # type: ignore[return-value]


class DiscardedOutput(Discarded):
    """A handle that replaces a view of a cheap call's `index`-th output saved by a node outside the call."""

    __slots__ = ("__weakref__", "view")

    def __init__(self, source: CheapRun, index: int, view: View) -> None:
        super().__init__(source, index)
        self.view = view

    def get(self) -> torch.Tensor:
        if type(self.source) is CheapRun:
            self.source.rebuild()
        return self.source  # type: ignore[return-value]


# what the hooks keep of a saved tensor; a partial calls the hooks around the model (offload, `save_on_cpu`)
Packed = Discarded | partial[torch.Tensor] | Versioned


class Claim:
    """Marks a storage as a cheap call's output, which can be rebuilt unless it is modified in place."""

    __slots__ = ("casts", "counter", "index", "run", "version")

    def __init__(self, run: CheapRun, index: int, output: torch.Tensor) -> None:
        self.run, self.index = run, index
        self.version = write_count(output)  # views and detached aliases share the version counter
        # outputs of `unsafe_chunk` have their own counters from 0; after a write, counters must be compared
        self.counter = counter_of(output) if self.version else None
        self.casts: dict[Any, CheapRun] | None = None

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, an alias of the storage, still has the values of the cheap call's output."""
        if write_count(tensor) != self.version or self.run.args is None:
            return False
        return self.counter is None or counts_with(self.counter, tensor)

    def discard(self, tensor: torch.Tensor) -> DiscardedOutput:
        """Return a handle that replaces `tensor`, which the claim covers."""
        run = self.run
        handle = DiscardedOutput(run, self.index, view_of(tensor))
        run.readers.append(weakref.ref(handle))
        if run.proof is not None:
            run.proof.saved_output(self.index, handle.view, tensor)
        return handle


class Input:
    """A tensor argument of a cheap call."""

    __slots__ = ("held", "requires_grad")

    def __init__(self, held: Packed, requires_grad: bool) -> None:
        self.held, self.requires_grad = held, requires_grad

    def get(self) -> torch.Tensor:
        """Return a leaf with the input's value."""
        tensor = unpack(self.held).detach()
        return tensor.requires_grad_() if self.requires_grad else tensor


class CheapRun:
    """One run of a cheap call in one forward pass, and the handles that depend on it."""

    __slots__ = (
        "args", "autocast", "call", "count", "depth", "kwargs", "proof", "random", "readers", "saved", "state",
    )  # fmt: skip

    def __init__(
        self,
        call: CheapCall,
        args: list[Any],
        kwargs: dict[str, Any],
        depth: int,
        device: torch.device,
        proof: Proof | None = None,
    ) -> None:
        self.call, self.depth, self.proof = call, depth, proof
        self.args: list[Any] | None = args  # None once rebuilt
        self.kwargs = kwargs
        self.count = 0  # of the tensors that the call's own nodes saved
        self.saved: list[torch.Tensor | None] = []  # those, rebuilt; each until its handle takes it
        self.readers: list[weakref.ref[DiscardedOutput]] = []
        self.state = call.state()
        self.random = rng.snapshot(device) if call.random else None
        self.autocast = autocast_now(device.type) if any_autocast() else ()

    def rebuild(self) -> None:
        """Run the call again if it has not been, fill every handle that is still needed, and release the inputs."""
        with _rebuilding:
            if self.args is not None:
                self._rebuild(self.args)

    def _rebuild(self, inputs: list[Any]) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                "double backward (create_graph=True) through an activation that the policy 'pointwise' discarded; "
                "take another policy: 'full', 'head', 'tile' and 'offload' allow it"
            )
        args = [value.get() if type(value) is Input else value for value in inputs]
        kwargs = self.kwargs and {k: v.get() if type(v) is Input else v for k, v in self.kwargs.items()}
        saved: list[torch.Tensor] = []
        set_grad(True)
        push_hooks(saved.append, _never)
        try:
            if self.call.inplace:  # other nodes may read the rebuilt input
                args[0] = args[0].clone()
            if not self.autocast and self.random is None and not any_autocast():
                output = self.call.rerun(self.state, args, kwargs)
            else:
                with autocast_as(self.autocast), _random_as(self.random):
                    output = self.call.rerun(self.state, args, kwargs)
        finally:
            pop_hooks()
            set_grad(False)
        if len(saved) != self.count:
            message = (
                f"{self.call} saved {self.count} tensors for backward in forward but {len(saved)} when "
                "recomputed: it does not repeat itself, so 'pointwise' cannot treat it"
            )
            if self.proof is None:
                raise RuntimeError(message)
            saved[:] = self.proof.missing(message)
        elif self.proof is not None:
            self.proof.rebuilt(saved)
        self.saved = [t if t.grad_fn is None else t.detach() for t in saved]  # a node would keep the call's inputs
        saved.clear()  # breaks a cycle: the tensors' nodes refer to the hook, which refers to the list
        self._fill_readers(output if isinstance(output, tuple) else (output,))
        self.args, self.kwargs, self.readers, self.random = None, {}, [], None
        self.proof = None

    def _fill_readers(self, outputs: tuple[Any, ...]) -> None:
        shared: dict[tuple[int, View], torch.Tensor] = {}
        for reference in self.readers:
            if (handle := reference()) is not None:
                key = (handle.index, handle.view)
                tensor = shared.get(key)
                if tensor is None:
                    tensor = looked_at(outputs[handle.index], handle.view)
                    if self.proof is not None:
                        tensor = self.proof.rebuilt_output(key, tensor)
                    shared[key] = tensor
                handle.source = tensor


def claim_on(tensor: torch.Tensor) -> Claim | None:
    claim: Claim | None = getattr(tensor.untyped_storage(), CLAIM, None)
    return claim if claim is not None and claim.covers(tensor) else None


def unpack(packed: Packed) -> torch.Tensor:
    kind = type(packed)
    if kind is partial:
        return packed()  # type: ignore[operator]
    if kind is not tuple:
        return packed.get()  # type: ignore[union-attr]
    tensor, version = packed  # type: ignore[misc]
    if version >= 0 and write_count(tensor) != version:
        raise written_to(tensor, version, view_of(tensor))
    return tensor


@contextmanager
def _random_as(first: rng.Snapshot | None) -> Iterator[None]:
    if first is None:
        yield
        return
    now = first.now()
    first.restore()
    try:
        yield
    finally:
        now.restore()


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the graph of a recompute is never run backward")


# A rebuild may require another one, and so on in a chain (the residual stream of a ResNet stage). The bound limits
# Python's stack depth and the memory that a chain uses at once; an output beyond it is kept.
MAX_CHAIN = 32


class Pass:
    """One forward pass of a model: its saved-tensor hooks, and the cheap call that is running, if any."""

    def __init__(self, marks_kept: bool, verification: Verification | None = None) -> None:
        self.current: CheapRun | None = None
        self.verification = verification  # None if the step is not verified
        self.kept: object | None = object() if marks_kept else None  # marks storages that some node saves anyway
        # autograd calls only the innermost pair of hooks
        self.outer = top_hooks(False)

    def pack(self, tensor: torch.Tensor) -> Packed:
        """The pack hook; it receives the tensor itself, including its `grad_fn`."""
        run = self.current
        if run is not None:
            index = run.count
            run.count = index + 1
            parameter = type(tensor) is Parameter
            if run.proof is not None:
                run.proof.saved(tensor, compared=not parameter)
            # a parameter is in memory anyway
            return (tensor, write_count(tensor)) if parameter else Discarded(run, index)
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None  # a sparse tensor has several
        claim: Claim | None = getattr(storage, CLAIM, None)
        if claim is not None and claim.covers(tensor):
            return claim.discard(tensor)
        if self.kept is not None and storage is not None:
            setattr(storage, _KEPT, self.kept)
        if self.outer is not None:
            return self._pack_by_outer_hooks(tensor)
        # a node's own output is detached, so that it does not keep the node alive
        return tensor if tensor.grad_fn is None else tensor.detach(), write_count(tensor)

    def _pack_by_outer_hooks(self, tensor: torch.Tensor) -> partial[torch.Tensor]:
        pack, unpack = self.outer
        return partial(unpack, pack(tensor))

    def is_free(self, tensor: torch.Tensor) -> bool:
        """Whether keeping `tensor` costs no memory: it can be rebuilt, or an autograd node saves it anyway."""
        storage = tensor.untyped_storage()
        return claim_on(tensor) is not None or (self.kept is not None and getattr(storage, _KEPT, None) is self.kept)

    def run(self, call: CheapCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a cheap call, discard the tensors that it saves for backward, and claim its outputs."""
        if call.inplace and not args:
            return call.forward(**kwargs)
        device, depth, storages = None, 0, []
        held: list[Any] = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            if not isinstance(value, torch.Tensor):
                if not isinstance(value, _CONSTANTS):  # its contents could change before backward
                    return call.forward(*args, **kwargs)
                held.append(value)
                continue
            device = value.device
            storages.append(storage := value.untyped_storage())
            claim: Claim | None = getattr(storage, CLAIM, None)
            if claim is not None and claim.run.depth < MAX_CHAIN and claim.covers(value):
                depth = max(depth, claim.run.depth + 1)
                held.append(Input(claim.discard(value), value.requires_grad))
            elif call.inplace and not held:  # it will be overwritten and cannot be rebuilt
                return call.forward(*args, **kwargs)
            else:
                alias = value.detach()
                kept = (alias, version_of(alias)) if self.outer is None else self._pack_by_outer_hooks(alias)
                held.append(Input(kept, value.requires_grad))
        if device is None:
            return call.forward(*args, **kwargs)
        named = dict(zip(kwargs, held[len(args) :], strict=True)) if kwargs else kwargs
        proof = None if self.verification is None else Proof(self.verification, call)
        self.current = run = CheapRun(call, held[: len(args)] if kwargs else held, named, depth, device, proof)
        try:
            output = call.forward(*args, **kwargs)
        finally:
            self.current = None
        for index, value in enumerate(output if isinstance(output, tuple) else (output,)):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                # an output that aliases an input (Identity, a cast to the same dtype) is not rebuilt by this call;
                # a view of a DTensor or a jagged tensor cannot be rebuilt from its storage
                if (call.inplace or not any(storage is other for other in storages)) and not is_wrapper(value):
                    setattr(storage, CLAIM, Claim(run, index, value))
        return output

    def cast(self, claim: Claim, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast `tensor`, which the claim covers, to another dtype; backward rebuilds one copy for all casts."""
        key = (dtype, view_of(tensor))
        claim.casts = {} if claim.casts is None else claim.casts
        run = claim.casts.get(key)
        if run is None or run.args is None:
            held = Input(claim.discard(tensor), tensor.requires_grad)
            run = claim.casts[key] = self._casting(held, dtype, claim.run.depth + 1, tensor.device)
        return self._cast(tensor, dtype, run)

    def cast_parameter(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Cast `parameter` to another dtype; the copy is discarded and rebuilt in backward."""
        held = Input((parameter, write_count(parameter)), parameter.requires_grad)
        return self._cast(parameter, dtype, self._casting(held, dtype, 0, parameter.device))

    def _casting(self, held: Input, dtype: torch.dtype, depth: int, device: torch.device) -> CheapRun:
        proof = None if self.verification is None else Proof(self.verification, _CAST)
        return CheapRun(_CAST, [held, dtype], {}, depth, device, proof)

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype, run: CheapRun) -> torch.Tensor:
        copy = tensor.to(dtype)  # the node of a cast saves nothing
        setattr(copy.untyped_storage(), CLAIM, Claim(run, 0, copy))
        return copy
