"""Layers of other libraries in a live model that a trace cannot run as they are.

bitsandbytes' kernels take no fake tensors, so its layers are swapped for stand-ins. PEFT's FRoD moves weights to the
host during a step, which a trace does not see.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .quantised_layers import BLOCK, Int8Linear, NF4Linear


@contextmanager
def swap_library_layers(model: nn.Module) -> Iterator[None]:
    """Swap the 4- and 8-bit layers of `model` for stand-ins of the same layout; put them back on exit."""
    made: dict[nn.Module, nn.Module | None] = {}
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    bitsandbytes = sys.modules.get("bitsandbytes")
    try:
        for parent in list(model.modules()) if bitsandbytes is not None else ():
            for name, layer in list(parent._modules.items()):
                if layer is None:
                    continue
                if layer not in made:
                    made[layer] = _stand_in(layer, bitsandbytes)
                stand_in = made[layer]
                if stand_in is not None:
                    swapped.append((parent, name, layer))
                    parent._modules[name] = stand_in
        yield
    finally:
        for parent, name, layer in swapped:
            parent._modules[name] = layer


def _stand_in(layer: nn.Module, bitsandbytes: Any) -> nn.Module | None:
    """The stand-in for a layer with a quantised weight; None for any other layer."""
    made: NF4Linear | Int8Linear
    with torch.device("meta"):
        if isinstance(layer, bitsandbytes.nn.Linear4bit) and isinstance(layer.weight, bitsandbytes.nn.Params4bit):
            state = layer.weight.quant_state
            if state is None or state.blocksize != BLOCK:
                return None
            compute = layer.compute_dtype or state.dtype
            made = NF4Linear(_linear(layer, state.dtype), compute, bool(state.nested), layer.weight.dtype)
            made.clones = False  # PEFT's layer around it clones the output itself
        elif isinstance(layer, bitsandbytes.nn.Linear8bitLt) and layer.weight.dtype is torch.int8:
            made = Int8Linear(_linear(layer))
        else:
            return None
    made.bias = layer.bias
    if not layer.weight.untyped_storage().nbytes():  # its data waits in host memory (swap)
        made.weight.untyped_storage().resize_(0)
    return made.train(layer.training)


def _linear(layer: nn.Linear, dtype: torch.dtype | None = None) -> nn.Linear:
    return nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=dtype)


def left_on_host(model: nn.Module) -> Iterator[torch.Tensor]:
    """The base weights that FRoD keeps on the host during a step on a GPU: if it is asked to, and has no dropout.

    [peft/tuners/frod/layer.py, runtime_offload_base_weight]
    """
    layer: Any
    for layer in model.modules():
        asked = getattr(layer, "runtime_offload_base_weight", None) or {}
        if any(asked.values()) and all(isinstance(layer.frod_dropout[name], nn.Identity) for name in asked):
            yield layer.get_base_layer().weight
