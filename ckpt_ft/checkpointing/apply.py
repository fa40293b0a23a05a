"""Installs a policy on a model: `apply_policy(model, policy) -> AppliedPolicy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy

from . import rng
from .applied_policy import MARK, AppliedPolicy, BeneathPolicy, CompileBudget, all_applied, policies_on, refuse_overlap
from .blocks import SEGMENTED, find_blocks, named_blocks, regions
from .guard import Guard
from .kv_cache import caching_models
from .libraries import INT8, is_a
from .module_contents import has, modules_in
from .recompute import Checkpointed
from .segments import Segment, SegmentMember
from .selective import Selection
from .towers import Part, parts_of
from .verify import Schedule

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def apply_policy(
    model: nn.Module,
    policy: str | dict[str, Any] | Policy,
    *,
    verify: str | int | Schedule = "first",
    blocks: Sequence[str] = (),
) -> AppliedPolicy:
    """Install `policy` on `model`, in place, instead of a policy that the model already has.

    The replaced policy is removed for good: its own `remove()` then does nothing. If `policy` is refused, the earlier
    one stays. A model and a part of it cannot both have a policy; separate parts can. Applying the same policy with
    `swap` again changes nothing.

    `model` is any transformers, PEFT-wrapped or diffusers model, or an `nn.Module` that holds a list of repeated
    blocks, on any device. Parameters, buffers and state-dict keys stay as they are. The library's own checkpointing is
    switched off as long as the policy is applied.

    In a verified step, backward checks that each restored tensor has the bits that forward saved; a difference
    raises `VerificationError` at the end of backward, before an optimizer can step (see verify.py).

    Args:
        verify: which steps are verified. "first": the first two, every 1,000th, and the first after a change of mode
            or of the structure of arguments; "always"; "never"; or a number N: the first and every N-th.
        blocks: names of the modules that are the blocks, in the order in which they run, for a model that has
            them as attributes and not in a list. By default they are found by structure.

    Returns:
        AppliedPolicy: has the covered modules, `explain()` and `remove()`.

    Raises:
        UserError: the policy is malformed, matches nothing in this model, or overlaps with one that is applied to a
            part of the model or to a model that this is part of. Later, in forward with gradients: the library's own
            checkpointing has been switched on as well.
    """
    policy, schedule = Policy.parse(policy), Schedule.parse(verify)
    if policy.auto:
        raise UserError(
            "policy 'auto': `ckpt-ft plan` or plan(...) chooses a policy for a budget; give the one that it chose"
        )
    replaced: AppliedPolicy | None = model.__dict__.get(MARK)
    if (
        replaced is not None
        and policy.swap
        and (replaced.policy, replaced.verification.schedule) == (policy, schedule)
    ):
        return replaced  # the weights in host memory need not fit on the device, not even for a moment
    if replaced is not None:
        replaced.pause()
    applied = AppliedPolicy(model, policy, schedule)
    try:
        refuse_overlap(applied)
        setattr(model, MARK, applied)
        _install(applied, blocks)
    except BaseException:
        applied.remove()
        if replaced is not None:
            replaced.resume()
        raise
    if replaced is not None:
        replaced.remove()
    all_applied.add(applied)
    return applied


def remove_policy(model: nn.Module) -> None:
    """Remove every policy that is applied to `model` or to a part of it."""
    for applied in policies_on(model):
        applied.remove()


def applied_policy(model: nn.Module) -> AppliedPolicy | None:
    """The policy that is applied to `model` or to a part of it, if any."""
    return next(iter(policies_on(model)), None)


def _install(applied: AppliedPolicy, blocks: Sequence[str]) -> None:
    policy, model = applied.policy, applied.model
    for module in list[Any](modules_in(model)):
        if has(module, "gradient_checkpointing") and module.gradient_checkpointing is True:
            module.gradient_checkpointing = False
            applied.switched_off.append(module)
        if is_a(module, INT8) and module.weight.CB is not None:  # else its first forward would do it
            module.init_8bit_state()
            module.state.is_training = module.training
    if policy.acts_on_blocks:
        if any(map(is_lazy, model.parameters())):
            raise UserError(
                f"policy '{policy}': {type(model).__name__} has lazy layers, whose first call makes their weights; "
                "call it once before the policy is applied"
            )
        applied.found = named_blocks(model, blocks) if blocks else find_blocks(model)
    applied.parts = parts_of(policy, model, applied.found)
    if policy.checkpoints:
        _install_checkpoints(applied)
    _install_engines(applied)
    if policy.head or applied.found.blocks:
        guard = Guard(model, policy, refuses=policy.checkpoints or policy.discards)  # last, and so outermost
        applied.around.append(guard)
        names = {module: name for name, module in model.named_modules()}
        engines = [stand_in for engine in applied.engines for stand_in in engine.stand_ins]
        for stand_in in (*applied.installed, *engines, guard):
            stand_in.name, stand_in.verification = names.get(stand_in.module, ""), applied.verification
    applied.around += [BeneathPolicy(applied, m) for m in modules_in(model) if has(m, "set_use_kernels")]
    if policy.budget is not None:
        if policy.budget < 1 and rng.has_dropout(model):
            raise UserError(
                f"policy '{policy}': {type(model).__name__} has dropout, and under torch.compile's activation memory "
                "budget the gradients of a model with dropout are silently wrong (pytorch/pytorch#190717); set its "
                "dropout (LoRA's included) to 0, or take another policy"
            )
        applied.around.append(CompileBudget(policy.budget))


def _install_checkpoints(applied: AppliedPolicy) -> None:
    parts = [part for part in applied.parts if part.policy.checkpoints]
    for part in parts:
        _install_part(applied, part)
    for module, inner in caching_models(applied.model):
        hook = partial(applied.turn_off_cache, inner)
        applied.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    if any(part.policy.save or part.policy.scope in SEGMENTED for part in parts):
        applied.hooks.append(applied.model.register_forward_hook(applied._warn_once))


def _install_part(applied: AppliedPolicy, part: Part) -> None:
    kind = type(applied.model).__name__
    runs = regions(part.policy, part.found, f"the {part.tower} tower of {kind}" if part.tower else kind)
    applied.segments += len(runs) if part.policy.scope in SEGMENTED else 0
    for run in runs:
        segment = Segment() if part.policy.scope in SEGMENTED and len(run) > 1 else None
        for region in run:
            if any(stand_in.module is region.module for stand_in in applied.installed):
                continue  # one module under two names
            selection = _selection(applied, part.policy, region.module)
            if segment is None:
                stand_in = Checkpointed(region.module, selection)
            else:
                stand_in = SegmentMember(region.module, selection, segment, last=region is run[-1])
            applied.installed.append(stand_in)
            applied.regions.append(region)


def _selection(applied: AppliedPolicy, policy: Policy, module: nn.Module) -> Selection | None:
    """Returns what a region keeps: the policy's op groups, and the choice of experts, which a second run could change.

    Regions that keep the same outputs share one selection, because torch.compile compiles anew for every object.
    """
    experts = {getattr(inner, key) for inner in modules_in(module) for key in _EXPERT_COUNTS if has(inner, key)}
    counts = frozenset(count for count in experts if isinstance(count, int) and count > 1)
    save = (*policy.save, "router") if counts and "router" not in policy.save else policy.save
    if not save:
        return None
    if (save, counts) not in applied.selections:
        applied.selections[save, counts] = Selection(save, counts)
    return applied.selections[save, counts]


def _install_engines(applied: AppliedPolicy) -> None:
    policy, model = applied.policy, applied.model
    tiled: list[nn.Module] = []
    if policy.tile is not None:
        from . import tile

        applied.engines.append(tile.install(model, applied.found.blocks, policy.tile))
        tiled = [stand_in.module for stand_in in applied.engines[-1].stand_ins]
    if policy.discards:
        from .pointwise import install as pointwise

        under = _modules(part for part in applied.parts if part.policy.pointwise)
        others = _modules(part for part in applied.parts if part.tower and not part.policy.pointwise)
        checkpoints = [region.module for region in applied.regions]
        applied.engines.append(pointwise.install(model, under, skip=[*checkpoints, *others.values(), *tiled]))
    if policy.head:
        from . import head

        applied.engines.append(head.install(model))
    if policy.swap is not None:
        from . import swap

        applied.engines.append(swap.install(model, applied.found.blocks, policy.swap))
    if policy.offload:
        from . import offload

        applied.engines.append(offload.install(model, applied.found.blocks))


def _modules(parts: Iterable[Part]) -> dict[str, nn.Module]:
    return {name: module for part in parts for name, module in part.modules.items()}
