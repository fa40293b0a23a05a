"""Verifies at run time that backward computes with the tensors that forward saved, bit for bit.

A policy restores the tensors that backward asks for by other means (a second run of a block, a rebuilt norm, a copy
from host memory, a chunk of the loss), and PyTorch compares at most shapes. In a *verified* step each engine compares
fingerprints of the saved and the restored tensor (`fingerprint.py`) on the device. The result is read once, when
backward ends and before an optimizer can step. A difference raises `VerificationError`.

How an engine uses it, where `verification` belongs to the policy on the model (`AppliedPolicy.verification`):

    comparison = verification.region("layers.3", module)      # in forward; None if this step is not verified
    slot = comparison.saved(tensor)                           # in forward, for each tensor that is dropped or parked
    comparison.restored(slot, tensor)                         # in backward, when the tensor is put back

`saved` must be called before anything can write into the tensor, and `restored` with the tensor that backward uses.
Nothing else is needed: the first `restored` of a backward queues the reading of the flags at its end. If several
ranks train one model, they read the flags of a scheduled step together, and all of them raise.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError

from ckpt_ft.compat.autograd import engine, graph_task, top_hooks
from ckpt_ft.compat.distributed import join_config
from ckpt_ft.compat.tensors import FakeTensor
from ckpt_ft.errors import UserError, WorkFailed, one_line

from .arguments import leaves
from .fingerprint import Layout, can_hash, fingerprint, layout_change, without_interception
from .tensor_identity import version_of

_queue = engine.queue_callback  # callbacks for the end of the running backward


class VerificationError(WorkFailed):
    """Backward would have computed with other numbers than forward did. No weight has been changed.

    Attributes:
        region: qualified name of the first region, in the order of forward, that differs.
        operator: the autograd node that made the first tensor that differs; "" for a module's input or state.
        differs: what differs, such as "values" or "shape".
    """

    def __init__(self, message: str, region: str, operator: str, differs: str) -> None:
        super().__init__(message)
        self.region, self.operator, self.differs = region, operator, differs


@dataclass(frozen=True)
class Schedule:
    """Which steps are verified.

    Attributes:
        first: number of steps at the beginning of a run.
        every: verify each step whose number is a multiple of this; 0 for none.
        changes: also verify the first call of a region in a mode, or with a structure of arguments.
    """

    first: int
    every: int
    changes: bool

    @classmethod
    def parse(cls, value: str | int | Schedule) -> Schedule:
        """A schedule from "first", "always", "never" or a number N (every N-th step, and the first).

        Raises:
            UserError: it is none of these.
        """
        if isinstance(value, Schedule):
            return value
        named = {"first": cls(2, 1000, True), "always": cls(0, 1, False), "never": cls(0, 0, False)}
        if isinstance(value, str) and value in named:
            return named[value]
        if not isinstance(value, bool) and isinstance(value, (int, str)) and str(value).isdecimal() and int(value) > 0:
            return cls(1, int(value), True)
        raise UserError(f"verify={value!r}: give 'first', 'always', 'never' or a number of steps such as 100")

    def due(self, step: int) -> bool:
        """Whether to verify the `step`-th step; the first is 1, and 0 is none."""
        return 0 < step <= self.first or (self.every > 0 and step > 0 and step % self.every == 0)


class TensorComparison:
    """Fingerprints of what one call of a region saved, and flags of what was put back."""

    __slots__ = ("differing", "index", "kind", "name", "slots", "verification")

    def __init__(self, verification: Verification, name: str, kind: str) -> None:
        self.verification, self.name, self.kind = verification, name, kind
        self.index = verification.comparisons = verification.comparisons + 1  # in the order of forward
        self.slots: list[tuple[Layout, torch.Tensor | None, str]] = []  # with the operator that made the tensor
        self.differing: list[tuple[int, torch.Tensor | str]] = []  # by slot: a flag, or what differs

    def saved(self, tensor: torch.Tensor, what: str = "") -> int:
        """Fingerprint a tensor that forward saves, of any layout and subclass; return its slot.

        what: names the tensor in errors; by default the autograd node that made it does.
        """
        layout, hashed = fingerprint(tensor)
        node = tensor.grad_fn if not what and tensor.requires_grad else None
        self.slots.append((layout, hashed, what or ("" if node is None else node.name())))
        return len(self.slots) - 1

    def restored(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        """Compare a tensor that was put back in backward with the one saved in `slot`.

        Returns the tensor that backward uses until its end, so that a rank with an error still takes part in
        collectives: `tensor`, or zeros with the right shape, dtype and strides.

        Raises:
            VerificationError: no such zeros can be made for a tensor of another kind.
        """
        layout, hashed = fingerprint(tensor)
        known, before, _ = self.slots[slot]
        if layout != known:
            return self.absent(slot, layout_change(known, layout))
        if before is not None and hashed is not None:
            self.differs(slot, before.to(hashed.device, non_blocking=True) != hashed)
        return tensor

    def absent(self, slot: int, differs: str) -> torch.Tensor:
        """Note that the tensor of `slot` was not put back; return zeros in its place (see `restored`)."""
        layout, hashed, _ = self.slots[slot]
        if layout[0] is not torch.Tensor or len(layout) != 2 or hashed is None:
            raise self.failed(slot, differs)
        self.differs(slot, differs)
        (dtype, shape, strides), device = layout[1], hashed.device
        left = iter(strides)
        every = [next(left, 1) if size > 1 else 1 for size in shape]
        return torch.empty_strided(shape, every, dtype=dtype, device=device).zero_()

    def differs(self, slot: int, differs: torch.Tensor | str) -> None:
        """Record a difference, or a flag of whether values differ, for the end of backward."""
        self.differing.append((slot, differs))
        self.verification.compared(self)

    def failed(self, slot: int, differs: str) -> VerificationError:
        """Return the error for a tensor without which backward cannot go on, such as an absent one."""
        return self.verification.error([(self, slot, differs)])


class SavedTensorProof:
    """Saved-tensor hooks inside those of a checkpoint, for one call of a region that it runs twice.

    Autograd calls only the innermost pair of hooks, so these call the checkpoint's. They compare a tensor when the
    second run saves it. When backward asks for it, they check that nothing wrote into it since, because autograd's
    own check is off under hooks.
    """

    def __init__(self, comparison: TensorComparison) -> None:
        self.comparison = comparison
        self.slots: list[int] = []
        self.versions: dict[int, int] = {}
        self.next = 0
        self.missing = ""  # why a second run did not restore all tensors
        self.hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def enter_first_run(self) -> None:
        """Fingerprint what is saved from here on, until `exit`."""
        outer_pack, outer_unpack = top_hooks(False)

        def pack(tensor: torch.Tensor) -> tuple[int, Any]:
            slot = self.comparison.saved(tensor)
            self.slots.append(slot)
            return slot, outer_pack(tensor)

        def unpack(packed: tuple[int, Any]) -> torch.Tensor:
            slot, inner = packed
            if self.missing:
                return self.comparison.absent(slot, self.missing)
            try:
                tensor: torch.Tensor = outer_unpack(inner)
            except CheckpointError as error:
                self.missing = f"the second run saved other tensors ({one_line(error, 200)})"
                return self.comparison.absent(slot, self.missing)
            if self.versions.get(slot, version := version_of(tensor)) != version:
                self.comparison.differs(slot, "it was written in place after it was saved for backward")
            return tensor

        self._enter(pack, unpack)

    def enter_second_run(self) -> None:
        """Compare what is saved from here on, in the order of the first run, until `exit`."""
        outer_pack, outer_unpack = top_hooks(False)
        self.next = 0

        def pack(tensor: torch.Tensor) -> Any:
            if self.next < len(self.slots):
                slot = self.slots[self.next]
                self.next += 1
                if tensor.dtype is not torch.uint8 or tensor.dim() != 1:  # a workspace of an LSTM's or norm's kernel,
                    tensor = self.comparison.restored(slot, tensor)  # which does not write all of its bytes
                self.versions[slot] = version_of(tensor)
            return outer_pack(tensor)

        self._enter(pack, outer_unpack)

    def _enter(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self.hooks.__enter__()

    def exit(self) -> None:
        if self.hooks is not None:
            self.hooks.__exit__()
            self.hooks = None


class Verification:
    """The verification of one policy on one model: the schedule, the number of steps and the open comparisons.

    A step is a forward of the whole model with gradients (a micro-batch), and its backward.
    """

    def __init__(self, schedule: Schedule, policy: str) -> None:
        self.schedule, self.policy = schedule, policy
        self.steps = self.comparisons = 0  # so far
        self.active = False  # whether a verified forward of the whole model is running
        self.inside = False  # whether any forward of the whole model is running
        self._order: list[TensorComparison] = []  # those compared in the running backward
        self._queued: set[int] = set()  # graph tasks at whose end the flags will be read
        self._together: set[int] = set()  # the same, with the flags of other ranks

    def __reduce__(self) -> tuple[Any, ...]:  # a copied model begins with its first step
        return Verification, (self.schedule, self.policy)

    def begin_step(self) -> None:
        """Count a step: a forward of the whole model begins, with gradients and not compiled."""
        self.steps += 1
        self.inside = True
        self.active = self.schedule.due(self.steps) and can_hash()

    def end_forward(self) -> None:
        self.inside = self.active = False

    def region(self, name: str, module: nn.Module, calls: int = 0, changed: bool = False) -> TensorComparison | None:
        """A comparison for one call of a region, or None if the call is not verified.

        Args:
            name: qualified name of the module in the model.
            calls: number of this call of the region, 1 for the first. It replaces the step if blocks are called
                outside of the model's own forward.
            changed: whether the region was never called in this mode, or with this structure of arguments, before.
        """
        if not (self.active or (changed and self.schedule.changes) or (not self.inside and self.schedule.due(calls))):
            return None
        return TensorComparison(self, name, type(module).__name__) if self.active or can_hash() else None

    def compared(self, comparison: TensorComparison) -> None:
        """Note that `comparison` has flags; they are read at the end of the running backward, or now if none runs."""
        if not (self._order and self._order[-1] is comparison):
            self._order.append(comparison)
        task = graph_task()
        if task == -1:
            self.read_flags()
        elif task not in self._queued:
            self._queued.add(task)
            _queue(lambda: self.read_flags(task))

    def read_flags_together(self, model: nn.Module, output: Any) -> None:
        """In a scheduled step of one rank of several: end the backward of `output` with `read_flags` on all of them.

        Ranks that train `model` together run its forward and backward equally often, whatever their regions compare,
        so each rank takes part in the collective.
        """
        if not self.active or not dist.is_initialized() or dist.get_world_size() == 1:
            return

        def begins(grad: torch.Tensor | None, device: torch.device) -> None:  # None for an output that no loss uses
            task = graph_task()
            if task not in self._together:
                self._together.add(task)  # queued twice, to run behind the callbacks of FSDP2 and DDP
                _queue(lambda: _queue(lambda: self.read_flags(task, device, _groups(model))))

        for leaf in leaves(output):
            is_real = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
            if is_real and leaf.grad_fn is not None:
                leaf.register_hook(partial(begins, device=leaf.device))

    def read_flags(
        self, task: int = -1, device: torch.device | None = None, groups: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        """Read the flags of everything compared so far, and on `device` whether another rank in `groups` found one.

        Raises:
            VerificationError: a value differs, here or on another rank.
        """
        self._queued.discard(task)
        if device is None and task in self._together:
            return  # it will be called once more
        self._together.discard(task)
        comparisons, self._order = list(dict.fromkeys(self._order)), []
        found = [(comparison, slot, differs) for comparison in comparisons for slot, differs in comparison.differing]
        for comparison in comparisons:
            comparison.differing = []
        wrong = [(comparison, slot, differs) for comparison, slot, differs in found if isinstance(differs, str)]
        flags = [(comparison, slot, flag) for comparison, slot, flag in found if isinstance(flag, torch.Tensor)]
        for at in dict.fromkeys(flag.device for _, _, flag in flags):
            there = [found for found in flags if found[2].device == at]
            with without_interception():
                read = torch.stack([flag for _, _, flag in there]).tolist()
            wrong += [(one, slot, "values") for (one, slot, _), is_set in zip(there, read, strict=True) if is_set]
        rank = _failed_rank(bool(wrong), device, groups)
        if wrong:
            raise self.error(wrong)
        if rank >= 0:
            raise VerificationError(
                f"policy '{self.policy}': on rank {rank} backward would compute with other numbers than forward did; "
                "the message of that rank says where. No rank took an optimizer step.", "", "", f"rank {rank}",
            )  # fmt: skip

    def error(self, wrong: list[tuple[TensorComparison, int, str]]) -> VerificationError:
        """Return the error for slots of comparisons that differ; it shows the first one in the order of forward."""
        comparison, slot, differs = min(wrong, key=lambda found: (found[0].index, found[1]))
        regions = dict.fromkeys(one for one, _, _ in wrong)
        slots = {at for one, at, _ in wrong if one is comparison}
        layout, _, operator = comparison.slots[slot]
        what = f"made by {operator}" if operator.endswith(("Backward", *"0123456789")) else operator or "an input"
        lines = [
            f"policy '{self.policy}': backward would compute with other numbers than forward did. No optimizer step "
            "was taken.",
            f"  where: {comparison.name or 'the model'} ({comparison.kind}), saved tensor {slot + 1} of "
            f"{len(comparison.slots)}, {what}: {_described(layout)}",
            f"  what differs: {differs} ({len(slots)} of its saved tensors, {len(regions)} "
            f"region{'s' if len(regions) > 1 else ''})",
        ]
        draws, others = "", "'offload' or 'pointwise', which re-run no block"
        if "pointwise" in self.policy:
            draws, others = " or are drawn in a norm", "'offload', which recomputes nothing"
        lines += [
            "  usual causes: forward changes a variable outside of its modules (a global, a class attribute, one of a "
            "closure) or a numpy array, or other code changed one between forward and backward; an argument or a "
            f"saved tensor was written in place; random numbers came from a generator outside of the model{draws}",
            f"  what to do: make the block depend on its arguments, parameters and buffers alone; or try {others}, "
            "or 'modules:attention' and 'modules:mlp', which re-run parts of it. "
            "check_parity(model, batch, 'pointwise') of ckpt_ft tests a policy on one step; so do --ac_check of a "
            "recipe and `ckpt-ft check`",
        ]
        return VerificationError("\n".join(lines), comparison.name, operator, differs)


def _groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups of the ranks that train `model` together; empty if this process trains it alone.

    Empty also where another rank may not take part, so that this one would wait for it: for a part of what DDP wraps
    or of what DeepSpeed's engine of ZeRO-1 and ZeRO-2 runs, and for DDP with uneven inputs (`join`).
    """
    engines = sys.modules.get("deepspeed.runtime.engine")
    kinds = (DistributedDataParallel, *((engines.DeepSpeedEngine,) if engines else ()))
    wrappers = [one for one in gc.get_objects() if issubclass(type(one), kinds) and model in (one, one.module)]
    for one in wrappers:
        if isinstance(one, DistributedDataParallel):
            return [] if join_config(one).enable else [one.process_group]
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh.get_all_groups()
        if (group := getattr(parameter, "ds_process_group", None)) is not None:  # ZeRO-3
            return [group]
    return [engine.seq_data_parallel_group for engine in wrappers]  # ZeRO-1 and ZeRO-2


def _failed_rank(failed: bool, device: torch.device | None, groups: Sequence[dist.ProcessGroup]) -> int:
    """The highest rank of `groups` that has failed, or -1."""
    if not groups:
        return -1
    with without_interception():
        rank = torch.tensor(dist.get_rank() if failed else -1, device=device)
        for group in groups:
            dist.all_reduce(rank, dist.ReduceOp.MAX, group)
        return int(rank)


NEVER = Verification(Schedule(0, 0, False), "")  # for modules on which no policy is installed


def _described(layout: Layout) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for dtype, shape, _ in layout[1:])
