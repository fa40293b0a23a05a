"""Checkpoints consecutive blocks as one segment: only the first block's input is kept (Chen et al. 2016, section 3).

The model loops over its blocks and passes each a mask and keyword arguments, so a segment cannot be one wrapper
module. Instead, the blocks share a sequence of calls: saved-tensor hooks drop the tensors that the blocks save, and
the first unpack in backward re-runs all blocks in order. A block joins the sequence of the preceding block if its
arguments contain that block's output, either the same tensor or an alias of it (the hooks of FSDP2 and ZeRO-3 create
aliases of a block's inputs). Otherwise it starts its own sequence, and results stay correct.

The second run bypasses FSDP2's hooks. It gathers the weights that FSDP2 has resharded, for each block while the
preceding block runs; the weights stay gathered until the block's own backward, which reshards them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpt_ft.compat.tensors import storage_pointer, write_count
from ckpt_ft.policy import SWAPPED

from .arguments import Call, changeable, leaves, nothing, rebuild
from .dropped_tensors import DroppedTensors, pop_hooks, push_hooks
from .libraries import FSDP2, is_a
from .recompute import Checkpointed, FirstRun, SecondRun, runs
from .selective import Selection
from .tensor_identity import view_of


class Segment:
    """What a segment's blocks share: a weak reference to their sequence of calls, which saved tensors keep alive."""

    def __init__(self) -> None:
        self.current: Callable[[], _CallSequence | None] = nothing
        self.joined = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, ()


class SegmentMember(Checkpointed):
    def __init__(self, module: nn.Module, selection: Selection | None, segment: Segment, last: bool) -> None:
        super().__init__(module, selection)
        self.segment, self.last = segment, last

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return super().run(args, kwargs)
        contexts = runs(self, args, kwargs)
        given = [*leaves(args), *leaves(kwargs)]
        sequence = self.segment.current()
        if sequence is None or not sequence.feeds(given):
            sequence = _CallSequence()
        else:
            self.segment.joined += 1
        out = sequence.call(self, contexts, given, args, kwargs)
        self.segment.current = nothing if self.last else weakref.ref(sequence)
        return out


class _Link:
    """An argument that is an output of an earlier call in the sequence, or an alias of one."""

    __slots__ = ("call", "leaf", "storage", "version")

    def __init__(self, tensor: torch.Tensor, call: int, leaf: int) -> None:
        self.storage, self.version = weakref.ref(tensor.untyped_storage()), write_count(tensor)
        self.call, self.leaf = call, leaf

    def is_to(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, which has the same `_key`, is that output and was not modified since the call."""
        return self.storage() is tensor.untyped_storage() and self.version == write_count(tensor)


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is the same for all aliases while their storage is alive."""
    return storage_pointer(tensor.untyped_storage()), tensor.requires_grad, view_of(tensor)


def _outputs(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the leaves of a block's output and of its mutable container arguments, which it may have modified."""
    written = [leaf for value in (*args, *kwargs.values()) if changeable(value) for leaf in leaves(value)]
    return [*leaves(out), *written]


class _CallSequence(DroppedTensors):
    """Calls of blocks whose saved tensors are dropped in forward and recomputed by re-running all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[nn.Module, Call]] = []
        self.outputs: dict[tuple[Any, ...], _Link] = {}

    def feeds(self, given: list[Any]) -> bool:
        """Whether the leaves of a block's arguments contain an output of the last call."""
        last = len(self.calls) - 1
        return any((link := self.link(leaf)) is not None and link.call == last for leaf in given)

    def link(self, leaf: Any) -> _Link | None:
        link = self.outputs.get(_key(leaf)) if _is_variable(leaf) and leaf.layout is torch.strided else None
        return link if link is not None and link.is_to(leaf) else None

    def call(
        self,
        member: SegmentMember,
        contexts: tuple[FirstRun, SecondRun],
        given: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        aliases: dict[int, torch.Tensor] = {}

        def kept(leaf: Any) -> Any:  # keeps no tensor of the graph, because its nodes would keep this sequence alive
            if not _is_variable(leaf):
                return leaf
            link = self.link(leaf)
            if link is None and id(leaf) not in aliases:
                aliases[id(leaf)] = alias = leaf.detach().requires_grad_(leaf.requires_grad)
                if not vars(alias):
                    vars(alias).update(vars(leaf))
            return link or aliases[id(leaf)]

        call = Call(member.forward, contexts, member.inputs, *rebuild((args, kwargs), kept))
        call.given = args, kwargs
        self.calls.append((member.module, call))
        push_hooks(self.pack, self.unpack)
        try:
            out = call()
        finally:
            pop_hooks()
        known, returned = {id(leaf) for leaf in given}, len([*leaves(out)])
        for index, leaf in enumerate(_outputs(out, args, kwargs)):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            if index < returned or id(leaf) not in known:
                self.outputs[_key(leaf)] = _Link(leaf, len(self.calls) - 1, index)
        return out

    def repeat(self) -> None:
        made: list[list[Any]] = []  # the outputs of each call

        def leaf_of_rerun(leaf: Any) -> Any:
            return made[leaf.call][leaf.leaf] if type(leaf) is _Link else leaf

        gathered = _gathered(self.calls[0][0])
        for (_, call), following in zip(self.calls, [*self.calls[1:], None], strict=True):
            gathered()
            if following is not None:
                gathered = _gathered(following[0])
            made.append(call.rerun(leaf_of_rerun, _outputs))


def _gathered(block: nn.Module) -> Callable[[], None]:
    """Start gathering the FSDP2-sharded parameters of `block`; return a function that waits for them.

    Weights in host memory (`swap`) are copied to the device when this function is called.
    """
    if (swapped := block.__dict__.get(SWAPPED)) is not None:
        return partial(swapped.swapper.use, swapped.number)
    unshard: Any = block.unshard if is_a(block, FSDP2) else None
    return nothing if unshard is None else unshard(async_op=True).wait


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)
