"""`head`: the loss head of a language model in chunks of tokens that are recomputed, so that logits never exist whole.

With a vocabulary of 150 000 the logits, their fp32 copy, its log-softmax and their gradients are the peak of a LoRA
step, and no policy on blocks lowers it. Here, in training with labels, the output layer returns `Logits`, which
remember its input and what the model does to them on the way to the loss (scaling, soft-capping, a cast, the shift by
one); `cross_entropy` over them runs chunk by chunk under `torch.utils.checkpoint`. The idea is that of Liger-Kernel's
fused linear cross entropy (Hsu et al. 2024, arXiv:2410.10989), without a kernel. The model's own forward is what runs,
so what stands between output layer and loss stays right.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError

from .logits import Logits, local
from .standin import Installed, StandIn, warn_once

_LANGUAGE_MODEL = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")


class Deferring(StandIn):
    """A language model's forward; in training with labels its output has `logits=None`."""

    def __init__(self, module: nn.Module, layer: OutputLayer) -> None:
        super().__init__(module)
        self.layer = layer
        self.labels_at = list(inspect.signature(module.forward).parameters).index("labels")
        self.warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        if labels is None or not self.module.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            _say_compiled()
            return self.forward(*args, **kwargs)
        before, local.deferring = local.deferring, True
        self.layer.deferred = False
        try:
            output = self.forward(*args, **kwargs)
        finally:
            local.deferring = before
        if not self.layer.deferred and not self.warned:
            self.warned = True
            warnings.warn(
                f"policy 'head': the forward of {type(self.module).__name__} does not call its output layer as a "
                "module; its logits are computed as ever",
                stacklevel=2,
            )
        return _without_logits(output)


class OutputLayer(StandIn):
    """The layer from hidden states to logits: deferred where `Deferring` says so."""

    deferred = False

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not local.deferring or torch.compiler.is_compiling():
            return self.forward(hidden, *args, **kwargs)
        self.deferred = True
        # chunks call the module, not its forward: FSDP's hooks gather its weight, in recompute too
        return Logits(self.module, hidden, _width(self.module))


def install(model: nn.Module) -> Installed:
    """Chunk the loss head of the language model that `model` is or wraps (PEFT).

    Frozen, LoRA'd and tied output layers are all treated. Raises UserError, saying why, when there is no loss head to
    treat. Where Liger's fused loss is on, that is used and nothing is installed.
    """
    lm, layer = _find(model)
    kind = type(lm).__name__
    row = {"term": "head", "module": kind, "count": 1, "dropped": "logits", "kept": "the output layer's input"}
    if getattr(inspect.unwrap(lm.forward), "__module__", "").startswith("liger_kernel"):
        return Installed([], [{**row, "kept": "as Liger's fused loss, which is on, does"}])
    output_layer = OutputLayer(layer)
    return Installed([output_layer, Deferring(lm, output_layer)], [row])


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


def _width(layer: nn.Module) -> int:
    width = getattr(layer, "out_features", None)
    return width if isinstance(width, int) else len(layer.weight)  # type: ignore[arg-type]


def _without_logits(output: Any) -> Any:
    """The model's output with None in place of deferred logits."""
    if isinstance(output, tuple):
        return tuple(None if isinstance(value, Logits) else value for value in output)
    return type(output)(**{key: None if isinstance(value, Logits) else value for key, value in output.items()})


def _say_compiled() -> None:
    from torch._dynamo.comptime import comptime

    comptime(_warn_compiled)  # runs while the compiler traces, and takes no closure


def _warn_compiled(context: Any) -> None:
    warn_once("policy 'head' does nothing under torch.compile: the logits are computed whole")
