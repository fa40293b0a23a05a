"""AppliedPolicy, and functions that find the policies on a model, reject overlapping ones and suspend them."""

from __future__ import annotations

import textwrap
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.export.notebook import fragment, paragraph, table_html
from ckpt_ft.policy import Policy
from ckpt_ft.tables import WIDTH, Table, as_text

from .blocks import Blocks, Region, submodules
from .guard import Guard
from .kv_cache import given_cache, tied_by_cache
from .module_contents import modules_in
from .recompute import Checkpointed
from .segments import SegmentMember
from .selective import Selection
from .standin import Installed, StandIn
from .towers import Part, find_towers
from .verify import NEVER, Schedule, Verification


class CompileBudget:
    """torch.compile's activation memory budget: one setting of the process, restored by `remove`."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.put_back()

    def put_back(self) -> None:
        from ckpt_ft.compat.compiler import functorch_config as config

        self.before, config.activation_memory_budget = config.activation_memory_budget, self.value

    def remove(self) -> None:
        from ckpt_ft.compat.compiler import functorch_config as config

        config.activation_memory_budget = self.before


class BeneathPolicy:
    """A transformers model's `set_use_kernels`, which `train()` and `eval()` call: it replaces the forwards of layers.

    While it runs, the policy's stand-ins are off; they then call the new forwards.
    """

    def __init__(self, applied: AppliedPolicy, model: Any) -> None:
        self.applied, self.model = applied, model
        self.put_back()

    def put_back(self) -> None:
        self.model.set_use_kernels = self

    def remove(self) -> None:
        del self.model.set_use_kernels

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        engines = [engine for engine in self.applied.engines if engine.term != "swap"]  # which would load all weights
        stand_ins: list[Any] = [*self.applied.installed, *engines]
        for one in reversed(stand_ins):
            one.remove()
        try:
            type(self.model).set_use_kernels(self.model, *args, **kwargs)
        finally:
            for one in stand_ins:
                one.put_back()


MARK = "_ckpt_ft_applied"  # the model attribute that refers to the applied policy


class AppliedPolicy:
    """A policy that is applied to a model. It can be explained, paused and removed.

    Attributes:
        covered: qualified names of the modules that are re-run in backward.
        uncovered: names of the blocks in which nothing is re-run.
        verification: the steps that are verified, and the number of steps so far.
    """

    def __init__(self, model: nn.Module, policy: Policy, verify: Schedule = NEVER.schedule) -> None:
        self.policy = policy
        self.verification = Verification(verify, str(policy))
        self.model = model
        self.found = Blocks()
        self.parts: list[Part] = []
        self.regions: list[Region] = []
        self.segments = 0
        self.installed: list[Checkpointed] = []
        self.engines: list[Installed] = []
        self.selections: dict[Any, Selection] = {}  # by what they keep
        self.around: list[Guard | CompileBudget | BeneathPolicy] = []  # installed last
        self.hooks: list[Any] = []
        self.modules = 0  # their number when it was found out
        self.tied = False  # whether two share a place in a KV cache
        self.switched_off: list[nn.Module] = []
        self.removed = self.warned = False

    def __repr__(self) -> str:
        blocks = f"{len(self.found.blocks) - len(self.uncovered)} of {len(self.found.blocks)} blocks are re-run"
        return f"AppliedPolicy('{self.policy}' on {type(self.model).__name__}: {blocks})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the policy of a copied model."""
        self.__dict__.update(state)
        all_applied.add(self)

    @property
    def is_active(self) -> bool:
        """Whether the policy is active; False after it is removed or replaced, and while it is suspended."""
        return self.model.__dict__.get(MARK) is self

    @property
    def covered(self) -> list[str]:
        return [region.name for region in self.regions]

    @property
    def uncovered(self) -> list[str]:
        inside = {block for region in self.regions for block in region.blocks}
        return [name for name in self.found.blocks if name not in inside]

    @property
    def notes(self) -> list[str]:
        """One line for each term that changes nothing in this model, with the reason."""
        idle = [(engine.term, engine.rows[0].kept) for engine in self.engines if not engine.stand_ins]
        return [f"policy '{term}' changes nothing here: {reason}" for term, reason in idle if reason]

    def explain(self) -> str:
        """Return a table of module classes, how many are re-run, what they keep, and what each engine does."""
        notes = [textwrap.fill(note, WIDTH, break_on_hyphens=False) + "\n" for note in _coverage_notes(self)]
        return as_text(_coverage_tables(self)) + "".join(notes)

    def _repr_html_(self) -> str:
        first, *others = _coverage_tables(self)
        parts = map(table_html, (replace(first, title=""), *others))
        return fragment(first.title, *parts, *map(paragraph, _coverage_notes(self)))

    def remove(self) -> None:
        """Restore the model exactly as it was before `apply_policy`; a second call does nothing."""
        if self.is_active:
            self.pause()
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.engines, self.installed, self.around, self.switched_off = [], [], [], [], []
        self.removed = True

    def pause(self) -> None:
        """Deactivate the policy until `resume` (see `suspended`). Hooks stay registered: they check `is_active`."""
        for one in reversed((*self.installed, *self.engines, *self.around)):
            one.remove()
        for module in self.switched_off:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        del self.model.__dict__[MARK]

    def resume(self) -> None:
        setattr(self.model, MARK, self)
        for module in self.switched_off:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        for one in (*self.installed, *self.engines, *self.around):
            one.put_back()

    def never_fired(self) -> list[str]:
        """Return the op groups of `save:` that have kept no output in any region so far."""
        fired = {group for selection in self.selections.values() for group in selection.fired}
        groups = dict.fromkeys(group for part in self.policy.parts.values() for group in part.save)
        return [group for group in groups if group.partition("/")[0] not in fired]

    def turn_off_cache(
        self, inner: bool, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook of a transformers model, which an outer model calls if `inner` (see kv_cache.py)."""
        if not (self.is_active and module.training and torch.is_grad_enabled()):
            return None
        if self.modules != (modules := len(modules_in(self.model))):  # layers may be tied at any time
            self.modules, self.tied = modules, tied_by_cache(self.model)
        if self.tied or given_cache(kwargs) or (inner and kwargs.get("use_cache")):
            return None
        return args, {**kwargs, "use_cache": False}

    def _warn_once(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model: after the first forward pass, warn about terms of the policy with no effect."""
        compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if self.warned or compiled or not torch.is_grad_enabled() or not self.is_active:
            return
        self.warned = True
        self.hooks[-1].remove()
        for group in self.never_fired():
            reason = self._attention_as_matmuls() if group == "attention" else ""
            warnings.warn(
                f"policy '{self.policy}': no operator of '{group}' ran in any checkpointed region{reason}",
                stacklevel=2,
            )
        segments = [stand_in.segment for stand_in in self.installed if isinstance(stand_in, SegmentMember)]
        if segments and not any(segment.joined for segment in segments):
            warnings.warn(
                f"policy '{self.policy}': no block was given the output of the one before it (the model reshapes it "
                "in between, or a hook casts it), so each block is a checkpoint of its own, as under 'full'",
                stacklevel=2,
            )

    def _attention_as_matmuls(self) -> str:
        if not any(submodules(name, block, "attention") for name, block in self.found.blocks.items()):
            return ""
        return ": attention runs as plain matmuls here (attn_implementation 'eager'? or, on the CPU, dropout in it?)"


all_applied: weakref.WeakSet[AppliedPolicy] = weakref.WeakSet()  # a submodule has no reference to its parent


def policies_on(model: nn.Module) -> list[AppliedPolicy]:
    """Return the policies that are applied to `model` or to parts of it."""
    return [module.__dict__[MARK] for module in model.modules() if MARK in module.__dict__]


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Suspend every policy on `model` and its parts, and restore them on exit.

    Policies applied meanwhile are removed on exit. Policies that are removed meanwhile are not restored.
    """
    policies = policies_on(model)
    for applied in reversed(policies):
        applied.pause()
    try:
        yield
    finally:
        for other in policies_on(model):
            other.remove()
        for applied in policies:
            if not applied.removed:
                applied.resume()


def refuse_overlap(applied: AppliedPolicy) -> None:
    """Raise UserError if a policy is applied to a model that contains `applied.model`, or to a part of it."""
    model, kind = applied.model, type(applied.model).__name__
    for other in all_applied:
        if other.is_active and model in modules_in(other.model):
            raise UserError(
                f"policy '{applied.policy}': {kind} is part of a {type(other.model).__name__} that "
                f"has the policy '{other.policy}'; remove() that one first, or apply one policy to the whole"
            )
    for module in modules_in(model):
        forward = module.__dict__.get("forward")
        if MARK in module.__dict__ or (isinstance(forward, StandIn) and forward.acts):
            name = next(name for name, inner in model.named_modules() if inner is module)
            raise UserError(
                f"policy '{applied.policy}': a part of {kind} has a policy already ({name}, "
                f"{type(module).__name__}); remove() that one first, or apply policies to separate parts"
            )


# -- what `explain` shows ---------------------------------------------------------------------------------------------


def _coverage_tables(of: AppliedPolicy) -> list[Table]:
    """Return the table of covered modules, followed by a table for each engine."""
    header: tuple[str, ...] = ("module", "count", "re-run", "kept for backward")
    text: tuple[int, ...] = (0, 3)
    cells: list[tuple[str, ...]] = [row for part in of.parts for row in _coverage(of, part)]
    if of.policy.towers:
        header, text = ("tower", *header), (0, 1, 4)
        cells = [(part.tower, *row) for part in of.parts for row in _coverage(of, part)]
    found = [Table(f"Policy {of.policy} on {type(of.model).__name__}", header, cells, text=text)]
    for engine in of.engines:
        dropped = [(row.module, str(row.count), row.dropped, row.kept) for row in engine.rows]
        found.append(Table(engine.term, ("module", "count", "dropped", "kept"), dropped, text=(0, 2, 3)))
    return found


def _coverage(of: AppliedPolicy, part: Part) -> list[tuple[str, str, str, str]]:
    """Return a row for each class of re-run modules in a part of the model, then for each class of other blocks."""
    inside = ", ".join(part.policy.save) or "input only"
    modules = {region.module: region.blocks[0] for region in of.regions}
    rerun = Counter(type(module).__name__ for module, block in modules.items() if block in part.found.blocks)
    blocks = Counter(type(block).__name__ for block in part.found.blocks.values())
    open_blocks = Counter(type(of.found.blocks[name]).__name__ for name in of.uncovered if name in part.found.blocks)
    kept_open = "see pointwise" if part.policy.pointwise else "everything"
    rows = []
    for kind, count in rerun.items():
        total = blocks.get(kind, count)
        kept = inside if count == total else f"{inside}; others {kept_open}"
        rows.append((kind, str(total), str(count), kept))
    unseen = {kind: count for kind, count in open_blocks.items() if kind not in rerun}
    return rows + [(kind, str(count), "0", kept_open) for kind, count in unseen.items()]


def _coverage_notes(of: AppliedPolicy) -> list[str]:
    total, policy = len(of.found.blocks), of.policy
    notes = []
    if policy.checkpoints:
        notes.append(f"{total - len(of.uncovered)} of {total} blocks are re-run, whole or in part")
    if of.segments:
        notes.append(f"in {of.segments} segments: only the first block's input of each is kept")
    if policy.budget is not None:
        notes.append("budget takes effect under torch.compile only")
    towers = find_towers(of.model, dict(of.found.blocks))
    if len(towers) > 1 or policy.towers:
        each = (f"{tower.name} {', '.join(tower.modules)} ({len(tower.blocks)} blocks)" for tower in towers)
        notes.append(f"towers: {'; '.join(each)}")
    return notes
