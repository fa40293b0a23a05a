"""`head`: computes a language model's loss in chunks of tokens with recomputation, so that full logits never exist.

With a vocabulary of 150,000, the logits, their fp32 copy, the log-softmax and their gradients are the peak of a LoRA
step, and no policy on blocks reduces it. In training with labels, the output layer returns `Logits`. They store the
layer's input and the model's operations between output layer and loss (scaling, soft-capping, a cast, the shift by
one). `cross_entropy` of them runs in chunks under `torch.utils.checkpoint`. The idea is from Liger-Kernel's fused
linear cross entropy (Hsu et al. 2024, arXiv:2410.10989), without its kernel. The model's own forward runs, so
model-specific code between output layer and loss stays in effect.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from ckpt_ft.errors import UserError, WorkFailed

from .deferred_logits import Logits, OutputLayer, local
from .standin import Installed, StandIn, Treated, say_compiled, warn_once

_LANGUAGE_MODEL = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")


class Deferring(StandIn):
    """Replaces a language model's forward; in training with labels, the output's logits are `NoLogits`."""

    def __init__(self, module: nn.Module, layer: OutputLayer) -> None:
        super().__init__(module)
        self.layer = layer
        self.labels_at = list(inspect.signature(module.forward).parameters).index("labels")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        if not self.module.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        kind = type(self.module).__name__
        if labels is None:
            warn_once(f"policy 'head': the forward of {kind} is called without labels; its logits are computed whole")
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            say_compiled("head")
            return self.forward(*args, **kwargs)
        before, local.deferring = local.deferring, True
        self.layer.called = False
        try:
            output = self.forward(*args, **kwargs)
        finally:
            local.deferring = before
        if not self.layer.called:
            warn_once(
                f"policy 'head': the forward of {kind} does not call its output layer as a module; its logits are "
                "computed whole"
            )
        return _without_logits(output)


class NoLogits:
    """Placeholder for logits that were never computed; any use raises an error with the reason."""

    def __repr__(self) -> str:
        return "NoLogits()"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, *_: Any) -> NoReturn:
        raise _LogitsAsked()

    __getitem__ = __iter__ = __getattr__

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise _LogitsAsked()


class _LogitsAsked(WorkFailed, AttributeError):
    """An AttributeError as well, so that `hasattr` returns False."""

    def __init__(self) -> None:
        super().__init__(
            "policy 'head' computes no logits in a training step with labels, so there are none in the model's "
            "output; leave 'head' out where something reads them"
        )


def install(model: nn.Module) -> Installed:
    """Compute the loss of the language model `model`, which may be wrapped (PEFT), in chunks.

    Frozen, LoRA and tied output layers are supported. Raises UserError with the reason if there is no supported loss
    head. If Liger's or TRL's fused loss is enabled, the model uses it and nothing is installed.
    """
    lm, layer = _find(model)
    row = Treated(type(lm).__name__, 1, "logits", "the output layer's input")
    fused = _fused_loss_of(lm)
    if fused:
        return Installed("head", [], [replace(row, kept=f"{fused} is on, which keeps no logits either")])
    output_layer = OutputLayer(layer)
    return Installed("head", [output_layer, Deferring(lm, output_layer)], [row])


def fused_loss(model: nn.Module) -> str:
    """The name of a fused loss (Liger's, TRL's) that already does what `head` does, or ""; raises like `install`."""
    return _fused_loss_of(_find(model)[0])


def _fused_loss_of(lm: nn.Module) -> str:
    if getattr(inspect.unwrap(lm.forward), "__module__", "").startswith("liger_kernel"):
        return "Liger's fused loss"
    if stand_in := getattr(type(lm), "fused_loss", ""):
        return str(stand_in)
    # functools.wraps copies the model's names to TRL's forward, but its globals are TRL's
    home = getattr(lm.forward, "__globals__", {}).get("__name__", "")
    return "TRL's chunked loss" if home.startswith("trl.") else ""


def _find(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    from transformers import PreTrainedModel

    lms = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    for lm in lms:
        layer = lm.get_output_embeddings()
        if layer is None:
            continue
        if not type(lm).__name__.endswith(_LANGUAGE_MODEL) or "labels" not in inspect.signature(lm.forward).parameters:
            raise UserError(
                f"policy 'head': {type(lm).__name__} is no causal, masked or encoder-decoder language model that "
                "takes labels; leave 'head' out of the policy"
            )
        return lm, layer
    raise UserError(
        f"policy 'head': {type(model).__name__} has no output layer over a vocabulary"
        f"{'' if lms else ' (it is no transformers model)'}; leave 'head' out of the policy"
    )


def _without_logits(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(NoLogits() if isinstance(value, Logits) else value for value in output)
    return type(output)(**{key: NoLogits() if isinstance(value, Logits) else value for key, value in output.items()})
