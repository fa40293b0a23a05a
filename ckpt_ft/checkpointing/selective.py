"""Selective activation checkpointing: keeps the outputs of selected operators inside a checkpointed region.

Like `torch.utils.checkpoint.create_selective_checkpoint_contexts`, it uses two dispatch modes: the first run keeps
outputs, and the second run returns them in the same order. It differs from PyTorch's version in three ways:

* an output that is modified in place afterwards is recomputed and raises no error;
* if an operator draws random numbers (attention with dropout) and is skipped in the second run, the generator is set
  to its state after the operator in the first run, so later operators draw the same numbers;
* an operator outside all groups costs one dictionary look-up per run.

Under torch.compile, PyTorch's own contexts are used with the same selection, because the compiler supports them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ckpt_ft.compat.tensors import (
    DispatchKey,
    OpOverload,
    TorchDispatchMode,
    excluded,
    storage_pointer,
    tree_map_only,
    write_count,
)

from . import offload, rng
from .dropped_tensors import RunComplete
from .offload import Saved
from .ops import check_op_name, group_of
from .tensor_identity import counter_of

_RECOMPUTE = object()
# views that do not share their input's version counter
_UNSAFE_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}


class Selection:
    """Selects the operators whose outputs a region keeps.

    Args:
        save: op groups and op names, as in `Policy.save`.
        expert_counts: numbers of experts in the region; they identify the router's matmul by its output width.
    """

    def __init__(self, save: tuple[str, ...], expert_counts: frozenset[int] = frozenset()) -> None:
        self.fraction = next((int(group.partition("/")[2]) for group in save if "/" in group), 1)
        self.groups = tuple(group.partition("/")[0] for group in save)
        self.expert_counts = expert_counts
        self.fired: set[str] = set()
        self._rules: dict[Any, str | None] = {}
        for group in self.groups:
            if "." in group:
                check_op_name(group)

    def rule(self, func: Any) -> str | None:
        """Return the selected group that contains the operator, or None."""
        try:
            return self._rules[func]
        except KeyError:
            self._rules[func] = group = self._find(str(func))
            return group

    def _find(self, op: str) -> str | None:
        named = [group for group in self.groups if "." in group and (op == group or op.rpartition(".")[0] == group)]
        if named:
            return named[0]
        group = group_of(op)
        if group == "matmul" and group not in self.groups and self.expert_counts and "router" in self.groups:
            return "router"
        return group if group in self.groups else None

    def keeps(self, group: str, out: Any, seen: int) -> bool:
        """Whether to keep `out`, the output of the `seen`-th operator of `group` in its region."""
        if group == "router" and isinstance(out, torch.Tensor):  # keep only the router's matmul
            return out.dim() > 0 and out.shape[-1] in self.expert_counts
        return group != "matmul" or seen % self.fraction == 0

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        kept: _Kept = defaultdict(list)
        return _Keeping(self, kept), _Replaying(kept)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rules": {}}  # operators cannot be pickled; this is a cache


_Kept = defaultdict[Any, list[Any]]  # operator -> an entry for each of its calls


def compiled_contexts(selection: Selection) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts that torch.compile supports, for `context_fn` of `torch.utils.checkpoint.checkpoint`.

    A checkpoint with a graph break inside is not compiled; it gets the contexts of eager regions.
    """
    if not torch.compiler.is_compiling():
        return selection.contexts()
    return create_selective_checkpoint_contexts(_CompiledChoice(selection))


class _CompiledChoice:
    """The same selection as a policy function of PyTorch's own selective checkpointing."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.seen: dict[tuple[bool, str], int] = defaultdict(int)

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        group = self.selection.rule(func)
        if group is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.selection.fired.add(group)
        key = (ctx.is_recompute, group)
        self.seen[key] += 1
        keep = self.selection.keeps(group, getattr(ctx, "op_output", None), self.seen[key] - 1)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keeping(_Mode):
    def __init__(self, selection: Selection, kept: _Kept) -> None:
        super().__init__()
        self.selection, self.kept = selection, kept
        self.seen: dict[str, int] = defaultdict(int)
        self.by_storage: dict[int, _KeptOutput] = {}

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.by_storage = {}  # otherwise a returned output would stay alive with the second graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        group = self.selection.rule(func)
        if group is None:
            out = func(*args, **(kwargs or {}))
            if func in _UNSAFE_VIEWS:
                for view in out if isinstance(out, (list, tuple)) else (out,):
                    self.watch(args[0], view)
            return out
        draws = torch.Tag.nondeterministic_seeded in func.tags if isinstance(func, OpOverload) else False
        before = rng.snapshot(args[0].device) if draws else None
        out = func(*args, **(kwargs or {}))
        seen = self.seen[group]
        self.seen[group] += 1
        self.selection.fired.add(group)
        if not torch.is_inference_mode_enabled() and self.selection.keeps(group, out, seen):  # no versions there
            after = rng.snapshot(args[0].device) if before is not None else None
            entry: Any = _KeptOutput(out, after if after != before else None)
            if isinstance(out, torch.Tensor):
                self.by_storage[storage_pointer(out.untyped_storage())] = entry
        else:
            entry = _RECOMPUTE
        self.kept[func].append(entry)
        return out

    def watch(self, viewed: torch.Tensor, view: torch.Tensor) -> None:
        """Watch a view of a kept output that has its own version counter: a linear layer's result, a GRU's gates."""
        entry = self.by_storage.get(storage_pointer(viewed.untyped_storage()))
        if entry is not None:
            entry.watch(view)


class _Replaying(_Mode):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept
        self.next: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self.next = dict.fromkeys(self.kept, 0)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = self.next.get(func)
        if index is None:
            return func(*args, **(kwargs or {}))
        calls = self.kept[func]
        if index >= len(calls):
            if isinstance(sys.exc_info()[1], RunComplete):  # which the forward has caught
                return func(*args, **(kwargs or {}))
            raise RuntimeError(
                f"{func} ran more often in recomputation than in forward; the region depends on outside state"
            )
        self.next[func] = index + 1
        entry = calls[index]
        if entry is _RECOMPUTE or not entry.intact():
            return func(*args, **(kwargs or {}))
        calls[index] = _RECOMPUTE  # it is released; a second backward (retain_graph) makes it anew
        return entry.hand_back()


class _KeptOutput:
    """An operator's output, detached from the first run's graph, with the generator's state after the operator."""

    def __init__(self, out: Any, after: rng.Snapshot | None) -> None:
        self.after = after
        self.kept: list[Saved] = []
        self.views: list[tuple[torch.Tensor, int]] = []
        with _counted():
            self.out = tree_map_only(torch.Tensor, self.keep, out)

    def keep(self, x: torch.Tensor) -> Saved:
        saved = offload.keep(x)
        self.kept.append(saved)
        return saved

    def watch(self, view: torch.Tensor) -> None:
        with _counted():
            self.views.append((counter_of(view), write_count(view)))

    def intact(self) -> bool:
        """Whether the output was not modified in place since; this includes writes after it was offloaded."""
        return all(saved.intact() for saved in self.kept) and all(write_count(x) == v for x, v in self.views)

    def hand_back(self) -> Any:
        if self.after is not None:
            self.after.restore()
        return tree_map_only(Saved, Saved.get, self.out)


def _counted() -> AbstractContextManager[None]:
    """Return a guard under which `detach` below autograd shares the version counter and does not start a new one."""
    guard: AbstractContextManager[None] = excluded(DispatchKey.ADInplaceOrView, False)
    return guard
