"""Which layers of a model bitsandbytes holds in 4 or 8 bits, as transformers chooses them when it loads one."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module], skip: tuple[str, ...] | None) -> None:
    """Put `make(layer)` in the place of each linear layer that bitsandbytes would have one for.

    skip: last parts of the names of layers that stay; None for those that transformers leaves as they are.
    """
    stays = _of_transformers(model) if skip is None else lambda name: name.rpartition(".")[2] in skip
    for name, module in list(model.named_modules()):
        layer = _as_linear(module)
        if layer is not None and not stays(name):
            model.set_submodule(name, make(layer))


def _of_transformers(model: nn.Module) -> Callable[[str], bool]:
    """Of a name, whether its layer stays: output layers, tied ones, those kept in float32 (T5's `wo`)."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        return lambda name: name.rpartition(".")[2] == "lm_head"
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return lambda name: not should_convert_module(name, kept)


def _as_linear(module: nn.Module) -> nn.Linear | None:
    """A linear layer; GPT-2's `Conv1D`, whose weight lies the other way, as one; None for every other module."""
    if type(module) is nn.Linear:
        return module
    if type(module).__name__ != "Conv1D" or not type(module).__module__.startswith("transformers."):
        return None
    weight = module.get_parameter("weight").detach().t().contiguous()
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), module.get_parameter("bias")
    return linear
