"""Installs a policy on a model: `apply_policy(model, policy) -> AppliedPolicy`."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy

from . import rng
from .blocks import Blocks, find_blocks
from .compile_budget import CompileBudget
from .explain import Coverage, explain
from .guard import Guard
from .recompute import Checkpointed
from .scopes import Region, regions
from .segments import Segment, SegmentMember
from .selective import Selection
from .standin import Installed, OneDevice
from .standing import MARK, made, policies_on, refuse_overlap

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class AppliedPolicy:
    """A policy as it stands on a model.

    Attributes:
        policy: the policy.
        model: the model that `apply_policy` was given.
        covered: qualified names of the modules that are re-run in backward.
        uncovered: names of the blocks in which nothing is re-run.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.policy = policy
        self.model = model
        self.found = Blocks()
        self.regions: list[Region] = []
        self.installed: list[Checkpointed] = []
        self.engines: list[Installed] = []
        self.selections: list[Selection] = []
        self.guard: Guard | None = None
        self.one_device: OneDevice | None = None
        self.hooks: list[Any] = []
        self.switched_off: list[nn.Module] = []
        self.compile_budget: CompileBudget | None = None
        self.removed = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of the model has a policy of its own."""
        self.__dict__.update(state)
        made.add(self)

    @property
    def standing(self) -> bool:
        """Whether it acts: False once it was removed or replaced, and while it is suspended."""
        return self.model.__dict__.get(MARK) is self

    @property
    def covered(self) -> list[str]:
        return [region.name for region in self.regions]

    @property
    def uncovered(self) -> list[str]:
        inside = {block for region in self.regions for block in region.blocks}
        return [name for name in self.found.blocks if name not in inside]

    def explain(self) -> str:
        """A table: which modules, how many of them are re-run, what is kept inside them, and what the engines do."""
        return explain(
            Coverage(
                self.policy,
                self.model,
                blocks=self.found.blocks,
                uncovered=self.uncovered,
                rerun=[region.module for region in self.regions],
                segments=len({id(part.segment) for part in self.installed if isinstance(part, SegmentMember)}),
                alone=sum(not isinstance(part, SegmentMember) for part in self.installed),
                engines=self.engines,
            )
        )

    def remove(self) -> None:
        """Restore the model exactly as it was before `apply_policy`; a second call does nothing."""
        if self.standing:
            self.pause()
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.engines, self.installed, self.switched_off = [], [], [], []
        self.guard = self.compile_budget = self.one_device = None
        self.removed = True

    def pause(self) -> None:
        """Take everything off that acts, until `resume`; see `suspended`. Hooks stay: they look at `standing`."""
        if self.guard is not None:
            self.guard.remove()
        for engine in reversed(self.engines):
            engine.pause()
        for region in reversed(self.installed):
            region.remove()
        for module in self.switched_off:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        if self.one_device is not None:
            self.one_device.remove()
        if self.compile_budget is not None:
            self.compile_budget.take_off()
        del self.model.__dict__[MARK]

    def resume(self) -> None:
        """Undo `pause`."""
        setattr(self.model, MARK, self)
        for module in self.switched_off:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        for region in self.installed:
            region.put_back()
        for engine in self.engines:
            engine.resume()
        if self.guard is not None:
            self.guard.put_back()
        if self.one_device is not None:
            self.one_device.put_back()
        if self.compile_budget is not None:
            self.compile_budget.put_on()

    def never_fired(self) -> list[str]:
        """Op groups of `save:` that kept nothing so far in any region."""
        fired = {group for selection in self.selections for group in selection.fired}
        return [group for group in self.policy.save if group.partition("/")[0] not in fired]

    def _before_pretrained(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook of a transformers model."""
        return _without_kv_cache(module, args, kwargs) if self.standing else None

    def _warn_once(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model: after the first forward what was asked for should have happened."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.standing:
            return
        self.hooks.pop().remove()
        for group in self.never_fired():
            reason = (
                ": attention runs as plain matmuls here (attn_implementation 'eager'?)" if group == "attention" else ""
            )
            warnings.warn(
                f"policy '{self.policy}': no operator of '{group}' ran in any checkpointed region{reason}",
                stacklevel=2,
            )
        segments = {id(part.segment): part.segment for part in self.installed if isinstance(part, SegmentMember)}
        if segments and not any(segment.joined for segment in segments.values()):
            warnings.warn(
                f"policy '{self.policy}': no block was given the output of the one before it (under FSDP?), so each "
                "block is a checkpoint of its own, as under 'full'",
                stacklevel=2,
            )


def apply_policy(model: nn.Module, policy: str | dict[str, Any] | Policy) -> AppliedPolicy:
    """Install `policy` on `model`, in place; a policy that is on it already is replaced.

    The one that was replaced is removed for good: its own `remove()` then does nothing. If `policy` is refused, it
    stays. A model and a part of it cannot have a policy each; parts beside each other can.

    `model` is any transformers, PEFT-wrapped or diffusers model, or an `nn.Module` that holds a list of repeated
    blocks, on any device. Parameters, buffers and state-dict keys stay as they are. The library's own checkpointing is
    switched off as long as the policy stands.

    Returns:
        AppliedPolicy: what is covered, `explain()`, `remove()`.

    Raises:
        UserError: the policy is malformed, matches nothing in this model, or meets one that stands on a part of the
            model or on a model that this is part of. Later, in forward with gradients: the library's own
            checkpointing has been switched on as well.
    """
    policy = Policy.parse(policy)
    if policy.auto:
        raise UserError("policy 'auto' must be chosen first: run plan(...) and apply the policy it picked")
    replaced: AppliedPolicy | None = model.__dict__.get(MARK)
    if replaced is not None:
        replaced.pause()
    applied = AppliedPolicy(model, policy)
    try:
        refuse_overlap(applied)
        setattr(model, MARK, applied)
        _install(applied)
    except BaseException:
        applied.remove()
        if replaced is not None:
            replaced.resume()
        raise
    if replaced is not None:
        replaced.remove()
    made.add(applied)
    return applied


def remove_policy(model: nn.Module) -> None:
    """Take off every policy that stands on `model` or on a part of it."""
    for applied in policies_on(model):
        applied.remove()


def applied_policy(model: nn.Module) -> AppliedPolicy | None:
    """The policy that stands on `model` or on a part of it, if any."""
    return next(iter(policies_on(model)), None)


def _install(applied: AppliedPolicy) -> None:
    policy, model = applied.policy, applied.model
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
            applied.switched_off.append(module)
    if policy.checkpoints or policy.pointwise or policy.offload:
        applied.found = find_blocks(model)
    if policy.checkpoints or policy.pointwise or policy.offload or policy.head:
        applied.one_device = OneDevice(model, str(policy))
    if policy.checkpoints:
        _install_checkpoints(applied)
    _install_engines(applied)
    if policy.checkpoints or policy.pointwise:
        applied.guard = Guard(model, policy)  # last, and so outermost
    if policy.budget is not None:
        if policy.budget < 1 and rng.has_dropout(model):
            raise UserError(
                f"policy '{policy}': {type(model).__name__} has dropout, and under torch.compile's activation memory "
                "budget the gradients of a model with dropout are silently wrong (pytorch/pytorch#190717); set its "
                "dropout (LoRA's included) to 0, or take another policy"
            )
        applied.compile_budget = CompileBudget(policy.budget)
        applied.compile_budget.put_on()


def _install_checkpoints(applied: AppliedPolicy) -> None:
    policy = applied.policy
    runs = regions(applied)
    for run in runs:
        segment = Segment() if policy.scope in ("segments", "sqrt") and len(run) > 1 else None
        for region in run:
            if any(part.module is region.module for part in applied.installed):
                continue  # one module under two names
            selection = _selection(policy, region.module)
            if selection is not None:
                applied.selections.append(selection)
            if segment is None:
                wrapper = Checkpointed(region.module, selection)
            else:
                wrapper = SegmentMember(region.module, selection, segment, last=region is run[-1])
            applied.installed.append(wrapper)
            applied.regions.append(region)
    for module in _outermost_pretrained(applied.model):
        applied.hooks.append(module.register_forward_pre_hook(applied._before_pretrained, with_kwargs=True))
    if policy.save or policy.scope in ("segments", "sqrt"):
        applied.hooks.append(applied.model.register_forward_hook(applied._warn_once))


def _selection(policy: Policy, module: nn.Module) -> Selection | None:
    """What a region keeps: the policy's op groups, and always the choice of experts: made twice, it may differ."""
    experts = {getattr(inner, key, None) for inner in module.modules() for key in _EXPERT_COUNTS}
    counts = frozenset(count for count in experts if isinstance(count, int) and count > 1)
    save = (*policy.save, "router") if counts and "router" not in policy.save else policy.save
    return Selection(save, counts) if save else None


def _install_engines(applied: AppliedPolicy) -> None:
    policy, model = applied.policy, applied.model
    if policy.pointwise:
        from .pointwise import install as pointwise

        checkpoints = [region.module for region in applied.regions]
        applied.engines.append(pointwise.install(model, {"": model}, skip=checkpoints))
    if policy.head:
        from . import head

        applied.engines.append(head.install(model))
    if policy.offload:
        from . import offload

        applied.engines.append(offload.install(model, applied.found.blocks))


def _outermost_pretrained(module: nn.Module) -> Iterable[nn.Module]:
    """The outermost transformers models in `module` that can return a KV cache."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is not None and isinstance(module, kind):
        if "use_cache" in inspect.signature(module.forward).parameters:
            yield module
        return
    for child in module.children():
        yield from _outermost_pretrained(child)


def _without_kv_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook: no KV cache while training; generation keeps it."""
    if not (module.training and torch.is_grad_enabled()):
        return None
    if kwargs.get("past_key_values") is not None:
        raise UserError(
            f"{type(module).__name__} was given past_key_values in training (prefix tuning?): a block that is re-run "
            "would append to them twice; train without a checkpointing policy, or with 'pointwise'"
        )
    return args, {**kwargs, "use_cache": False}
