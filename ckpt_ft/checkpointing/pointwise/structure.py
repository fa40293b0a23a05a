"""Which modules make cheap calls, told by class and structure; no list of architectures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

_ACTIVATION_FILES = ("torch.nn.modules.activation", "transformers.activations", "diffusers.models.activations")
_NOT_ELEMENTWISE = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.RReLU)
_NORM_CLASS = re.compile(r"(RMS|Layer|Group|Batch)Norm")
# down(activation(gate(x)) * up(x)), the whole of the forward; the names are each model's own
_GATED = re.compile(
    r"(?:(\w+) = |return )self\.(\w+)\(self\.(\w+)\(self\.(\w+)\((\w+)\)\) \* self\.(\w+)\(\5\)\)(?: return \1)?"
)
_CONVOLUTION = nn.modules.conv._ConvNd
_CASTED = (nn.Linear, _CONVOLUTION)


def is_norm(module: nn.Module) -> bool:
    """A normalisation layer without children: torch's own, or a class that is named as one (LlamaRMSNorm)."""
    if isinstance(module, nn.SyncBatchNorm) or next(module.children(), None) is not None:
        return False  # SyncBatchNorm communicates: a second run in backward would need every rank to agree
    return isinstance(module, nn.modules.batchnorm._NormBase) or bool(_NORM_CLASS.search(type(module).__name__))


def is_activation(module: nn.Module) -> bool:
    """An elementwise activation module of torch, transformers or diffusers."""
    if isinstance(module, _NOT_ELEMENTWISE) or next(module.children(), None) is not None:
        return False
    return type(module).__module__ in _ACTIVATION_FILES


def is_dropout(module: nn.Module) -> bool:
    """torch's dropout layers that drop something."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def gated_names(module: nn.Module) -> tuple[str, str, str, str] | None:
    """(down, activation, gate, up) where the source of the module's forward says `GatedProduct` and no more."""
    if "forward" in module.__dict__ or not any(is_activation(child) for child in module.children()):
        return None
    names = _gated(type(module).forward)
    return names if names and all(isinstance(module._modules.get(name), nn.Module) for name in names) else None


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
    """A gated MLP, or a convolutional residual block that ends in BatchNorm, sum and activation."""
    children = list(module.children())
    if type(module).__module__ == "diffusers.models.activations":
        return any(_widths(child) for child in children)  # GEGLU, SwiGLU: the activation may be a method
    if not any(is_activation(child) for child in children):
        return False
    widths = [w for child in children if (w := _widths(child))]
    if any(out == 2 * other for _, out in widths for other, _ in widths):  # gate and value in one projection
        return True
    if len(widths) >= 3 and len(set(widths)) < len(widths):  # two parallel projections and the one back
        return True
    below = list(module.modules())
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in below) and (
        sum(isinstance(m, _CONVOLUTION) for m in below) >= 2
    )


def takes_casts(module: nn.Module) -> bool:
    """A layer that autocast runs in half precision and no more: torch's linear or convolution, GPT-2's Conv1D.

    A subclass with a forward of its own may go by its input's dtype, or compute with its weight in fp32 first.
    """
    own = type(module).forward.__module__
    return own.startswith("torch.nn.modules") if isinstance(module, _CASTED) else type(module).__name__ == "Conv1D"


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) features of a linear layer, also one that PEFT or a quantiser stands in for."""
    inside, outside = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (inside, outside) if isinstance(inside, int) and isinstance(outside, int) else None
