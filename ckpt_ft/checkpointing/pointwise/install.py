"""`pointwise`: outputs of norms, activations, gated products and dropout are not kept for backward but rebuilt in it.

No block is run twice and no dispatch mode is active. What stands in memory between forward and backward is what the
dear operators (matmuls, attention, convolutions) made and the residual stream; see discard.py for how and
structure.py for what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ckpt_ft.checkpointing.parameters import modules_in
from ckpt_ft.checkpointing.standin import Installed, StandIn, Treated, warn_once
from ckpt_ft.errors import UserError

from .cheap_calls import CastInput, GatedProduct, ModuleCall, Products, local
from .discard import Pass
from .rebuild import unpack
from .rotary import RotaryAttention, is_rotary_attention
from .structure import gated_names, has_products, is_activation, is_dropout, is_norm, takes_casts


class Watched(StandIn):
    """The model's forward with the saved-tensor hooks around it."""

    def __init__(self, module: nn.Module, notes_kept: bool) -> None:
        super().__init__(module)
        self.notes_kept = notes_kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _say_compiled()
            return self.forward(*args, **kwargs)
        if not torch.is_grad_enabled() or local.running is not None:
            return self.forward(*args, **kwargs)
        local.running = running = Pass(self.notes_kept)
        try:
            with torch.autograd.graph.saved_tensors_hooks(running.pack, unpack):
                return self.forward(*args, **kwargs)
        finally:
            local.running = None
            running.kept = None


def install(model: nn.Module, modules: Mapping[str, nn.Module], skip: Iterable[nn.Module] = ()) -> Installed:
    """Discard the outputs of the cheap calls in `modules`, which lie inside of `model`, in every forward of `model`.

    `skip` names modules, with all that is in them, to leave alone: those that are re-run as a whole. Raises UserError
    when there is no such call. Under torch.compile the model runs as it is: the compiler's own partitioner
    recomputes such outputs already.
    """
    skipped = {id(inner) for module in skip for inner in modules_in(module)}
    chosen = {id(m): m for top in modules.values() for m in modules_in(top) if id(m) not in skipped}
    rows: Counter[tuple[str, str, str]] = Counter()
    stand_ins: list[StandIn] = []
    stand_in: StandIn
    for module in chosen.values():
        if is_norm(module) or is_activation(module) or is_dropout(module):
            stand_in, dropped, kept = ModuleCall(module, model), "output", "input"
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
    notes_kept = any(s.needs_free_input for s in stand_ins if isinstance(s, ModuleCall))
    stand_ins.append(Watched(model, notes_kept))
    described = [Treated(module, count, dropped, kept) for (module, dropped, kept), count in sorted(rows.items())]
    return Installed("pointwise", stand_ins, described)


def _say_compiled() -> None:
    from torch._dynamo.comptime import comptime

    comptime(_warn_compiled)  # runs while the compiler traces, and takes no closure


def _warn_compiled(context: Any) -> None:
    warn_once("policy 'pointwise' does nothing under torch.compile: its partitioner decides what is recomputed")
