"""`pointwise`: drops outputs of norms, activations, gated products and dropout, and rebuilds them in backward.

Blocks are not re-run and no dispatch mode is active. Between forward and backward, memory holds the outputs of the
expensive operators (matmuls, attention, convolutions) and the residual stream. This file decides which modules are
treated; engine.py drops and rebuilds.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ckpt_ft.checkpointing.blocks import linear_widths
from ckpt_ft.checkpointing.module_contents import modules_in
from ckpt_ft.checkpointing.standin import Installed, StandIn, Treated
from ckpt_ft.compat.modules import children_of
from ckpt_ft.errors import UserError

from .cheap_calls import (
    DROPOUTS,
    ROTATION,
    CastInput,
    GatedProduct,
    ModuleCall,
    Products,
    RotaryAttention,
    as_written,
    local,
)
from .engine import Pass, unpack

_ACTIVATION_FILES = ("torch.nn.modules.activation", "transformers.activations", "diffusers.models.activations")
_NOT_ELEMENTWISE = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.RReLU)
_NORM_CLASS = re.compile(r"(RMS|Layer|Group|Batch|Instance)Norm")
# matches a forward that is only down(activation(gate(x)) * up(x)); each model has its own names
_GATED = re.compile(
    r"(?:(\w+) = |return )self\.(\w+)\(self\.(\w+)\(self\.(\w+)\((\w+)\)\) \* self\.(\w+)\(\5\)\)(?: return \1)?"
)
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_CASTED = (nn.Linear, *_CONVOLUTIONS)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalization layer without children: torch's own, or a class named like one (LlamaRMSNorm).

    One that draws random numbers or writes its state raises an error when it is rebuilt, or in a verified step.
    """
    if isinstance(module, nn.SyncBatchNorm) or next(module.children(), None) is not None:
        return False  # SyncBatchNorm communicates, so all ranks would have to recompute it at the same time
    return bool(_NORM_CLASS.search(type(module).__name__))


def is_activation(module: nn.Module) -> bool:
    """Whether it is an elementwise activation module of torch, transformers or diffusers."""
    if isinstance(module, _NOT_ELEMENTWISE) or next(module.children(), None) is not None:
        return False
    return type(module).__module__ in _ACTIVATION_FILES


def is_dropout(module: nn.Module) -> bool:
    return isinstance(module, DROPOUTS) and module.p > 0


def is_rotary_attention(module: nn.Module) -> bool:
    """Whether the module has norms and its forward is a Python function that calls `apply_rotary_pos_emb`."""
    function = as_written(module.forward)
    return (
        type(function) is FunctionType
        and ROTATION in function.__code__.co_names
        and callable(function.__globals__.get(ROTATION))
        and any(is_norm(child) for child in module.children())
    )


def gated_names(module: nn.Module) -> tuple[str, str, str, str] | None:
    """Return the names (down, activation, gate, up) if the forward's source is that of a `GatedProduct`."""
    if "forward" in module.__dict__ or not any(is_activation(child) for child in module.children()):
        return None
    names = _gated(type(module).forward)
    if names is None or not all(isinstance(children_of(module).get(name), nn.Module) for name in names):
        return None
    return names if is_activation(children_of(module)[names[1]]) else None


@cache
def _gated(forward: Callable[..., Any]) -> tuple[str, str, str, str] | None:
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return None
    _, _, body = source.partition(":\n")
    found = _GATED.fullmatch(" ".join(body.split()))
    return found and found.group(2, 3, 4, 6)  # type: ignore[return-value]


def has_products(module: nn.Module) -> bool:
    """Whether it is a gated MLP, or a convolutional residual block that ends in BatchNorm, sum and activation."""
    children = list(module.children())
    if type(module).__module__ == "diffusers.models.activations":
        return any(linear_widths(child) for child in children)  # GEGLU, SwiGLU: the activation may be a method
    if not any(is_activation(child) for child in children):
        return False
    widths = [w for child in children if (w := linear_widths(child))]
    if any(out == 2 * other for _, out in widths for other, _ in widths):  # gate and value in one projection
        return True
    if len(widths) >= 3 and len(set(widths)) < len(widths):  # two parallel projections and an output projection
        return True
    below = list(module.modules())
    return any("BatchNorm" in type(m).__name__ for m in below) and (
        sum(isinstance(m, _CONVOLUTIONS) for m in below) >= 2
    )


def takes_casts(module: nn.Module) -> bool:
    """Whether autocast runs the whole layer in half precision: torch's linear or convolution, GPT-2's Conv1D.

    A subclass with its own forward may depend on its input's dtype, or use its weight in fp32.
    """
    if isinstance(module, _CASTED):
        return type(module).forward.__module__.startswith("torch.nn.modules")
    return type(module).__name__ == "Conv1D"


class ModelWithHooks(StandIn):
    """Replaces the model's forward and runs it inside the saved-tensor hooks."""

    def __init__(self, module: nn.Module, marks_kept: bool) -> None:
        super().__init__(module)
        self.marks_kept = marks_kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.idle("pointwise") or local.running is not None:
            return self.forward(*args, **kwargs)
        local.running = running = Pass(self.marks_kept, self.verification if self.verification.active else None)
        try:
            with torch.autograd.graph.saved_tensors_hooks(running.pack, unpack):
                return self.forward(*args, **kwargs)
        finally:
            local.running = None
            running.kept = None


def install(model: nn.Module, modules: Mapping[str, nn.Module], skip: Iterable[nn.Module] = ()) -> Installed:
    """Discard the outputs of the cheap calls in `modules`, which are submodules of `model`, in every forward pass.

    The modules in `skip` and their submodules are left unchanged, because they are re-run as a whole. Raises UserError
    if there is no such call. Under torch.compile this does nothing, because the compiler's partitioner already
    recomputes such outputs.
    """
    skipped = {id(inner) for module in skip for inner in modules_in(module)}
    found = (m for top in modules.values() for m in modules_in(top) if not isinstance(m, torch.jit.ScriptModule))
    chosen = {id(m): m for m in found if id(m) not in skipped}
    rows: Counter[tuple[str, str, str]] = Counter()
    stand_ins: list[StandIn] = []
    stand_in: StandIn
    for module in chosen.values():
        if is_norm(module) or is_activation(module) or is_dropout(module):
            stand_in = ModuleCall(module, model)
            dropped, kept = "output", "input"
        elif (names := gated_names(module)) is not None:
            stand_in, dropped, kept = GatedProduct(module, names), "gated product", "gate and up projections"
        elif is_rotary_attention(module):
            stand_in, dropped, kept = RotaryAttention(module), "rotated queries and keys", "their norms' inputs"
        elif has_products(module):
            stand_in, dropped, kept = Products(module), "products and residual sums", "their operands"
        else:
            continue
        stand_ins.append(stand_in)
        rows[type(module).__name__, dropped, kept] += 1
    if not stand_ins:
        raise UserError(
            f"policy 'pointwise': {type(model).__name__} has no norm, activation, gated MLP or dropout of a "
            "kind that it knows, outside of checkpoints; leave 'pointwise' out of the policy"
        )
    stand_ins += [CastInput(module) for module in modules_in(model) if takes_casts(module)]
    marks_kept = any(s.needs_free_input for s in stand_ins if isinstance(s, ModuleCall))
    stand_ins.append(ModelWithHooks(model, marks_kept))
    described = [Treated(module, count, dropped, kept) for (module, dropped, kept), count in sorted(rows.items())]
    return Installed("pointwise", stand_ins, described)
