"""Models with fused kernels of Liger, or of cut cross entropy, for traces.

`apply` replaces layers by class, as liger_kernel.transformers.monkey_patch patches an instance (liger-kernel 0.8.5);
`for_live_models` replaces the functions that Liger has patched already. The kernels are in `liger_kernels.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ckpt_ft.compat.modules import children_of
from ckpt_ft.errors import UserError, did_you_mean

from .liger_kernels import (
    IGNORED,
    CrossEntropy,
    CutCrossEntropy,
    FusedLinearCrossEntropy,
    GatedProduct,
    LayerNorm,
    RMSNorm,
    Rotation,
)


@dataclass(frozen=True)
class Family:
    """What `apply_liger_kernel_to_<model type>` replaces in a model by default.

    Attributes:
        in_place: whether its RMS norms overwrite the gradient that backward gives them.
        last_in_place: whether the norm before the head does.
        plain_norms: names of norms that stay as they are.
        product: the gated product of its MLPs and experts: "swiglu" or "geglu"; "" if they stay as they are.
        fused_gate: whether gate and up come from one projection.
        rope: whether the rotation is replaced.
        times: bytes of the logits that the fused loss holds at a time, over those of the hidden states.
    """

    in_place: bool = True
    last_in_place: bool = False
    plain_norms: tuple[str, ...] = ()
    product: str = "swiglu"
    fused_gate: bool = False
    rope: bool = True
    loss: str = "fused_linear_cross_entropy"
    times: int = 1


_GEMMA = Family(product="geglu")
_LATER_GEMMA = Family(product="geglu", in_place=False)
_OLMO = Family(in_place=False, last_in_place=True, plain_norms=("q_norm", "k_norm"))
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "smollm3", "ministral", "mistral", "qwen2", "qwen3"), Family()),
    "hunyuan_v1_dense": Family(plain_norms=("query_layernorm", "key_layernorm")),
    "granite": Family(loss="cross_entropy"),
    "phi3": Family(fused_gate=True),
    "glm4": Family(in_place=False, fused_gate=True, rope=False),
    "exaone4": Family(in_place=False),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
    "gemma": _GEMMA,
    **dict.fromkeys(("gemma2", "gemma3_text"), _LATER_GEMMA),
    **dict.fromkeys(("mixtral", "qwen3_moe"), Family()),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Family(rope=False)),
    "qwen3_next": Family(in_place=False, rope=False),
    "gpt_oss": Family(product="", times=8),
}
KERNELS = ("rope", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")


def apply(model: Any, asked: Mapping[str, bool]) -> None:
    """Replaces the layers of a transformers model by stand-ins for Liger's, by class: no module is added or wrapped.

    Args:
        asked: kernels by their names in `liger_kernel_config`, on or off; the family's defaults hold for others. As in
            Liger, names that the family does not have are ignored.

    Raises:
        UserError: a model whose kernels are not modelled, or both kinds of cross entropy.
    """
    kind = str(model.config.model_type)
    family = FAMILIES.get(kind)
    if family is None:
        raise UserError(
            f"Liger's kernels of '{kind}' are not modelled; leave them out, or take one of: {', '.join(FAMILIES)}",
            use_liger_kernel=False,
            liger_kernel_config="",
        )
    strange = [name for name in asked if name not in KERNELS and name != "layer_norm"]
    if strange:
        raise UserError(f"no Liger kernel '{strange[0]}'{did_you_mean(strange[0], KERNELS)} ({', '.join(KERNELS)})")
    _check_language_model(model, "Liger's kernels")
    on = dict.fromkeys(("rms_norm", family.product, family.loss), True) | {"rope": family.rope} | dict(asked)
    replaces = bool(family.product) and on[family.product]
    if on.get("cross_entropy") and on.get("fused_linear_cross_entropy"):
        raise UserError("Liger's cross_entropy and fused_linear_cross_entropy: turn one of them off")
    if on["rope"] and not family.rope:
        raise UserError(f"Liger has no rope kernel for {kind}; leave `rope` out")
    modelling = sys.modules[type(model).__module__]
    for name, module in list(model.named_modules()):
        own = type(module).__name__
        if on["rms_norm"] and own.endswith("RMSNorm") and name.rpartition(".")[2] not in family.plain_norms:
            last = family.last_in_place and name.endswith("model.norm")
            module.__class__ = _norm(type(module), family.in_place or last)
        elif replaces and own.endswith("MLP"):
            module.__class__ = _mlp(type(module), family.fused_gate)
        elif replaces and own.endswith("Experts"):
            off = '{"swiglu": false}'
            raise UserError(
                f"Liger's experts are not modelled; give --liger-kernel-config '{off}'", liger_kernel_config=off
            )
        elif on["rope"] and own.endswith("Attention") and hasattr(modelling, "apply_rotary_pos_emb"):
            module.__class__ = _attention(type(module), modelling)
    if on.get("fused_linear_cross_entropy"):
        model.__class__ = _language_model(type(model), FusedLinearCrossEntropy, family.times)
    elif on.get("cross_entropy"):
        model.__class__ = _language_model(type(model), CrossEntropy)


@contextmanager
def applied(model: Any, asked: Mapping[str, bool]) -> Iterator[None]:
    """`apply`, taken back on exit."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # in PEFT's wrapper
    before = [(module, type(module)) for module in model.modules()]
    try:
        if not any(_is_ligers(module) for module, _ in before):
            apply(model, asked)
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def _is_ligers(module: nn.Module) -> bool:
    return getattr(inspect.unwrap(module.forward), "__module__", "").startswith("liger_kernel")


@contextmanager
def for_live_models() -> Iterator[None]:
    """Runs the stand-ins wherever a model calls Liger's autograd functions, whose kernels need a GPU."""
    ops: Any = sys.modules.get("liger_kernel.ops")
    rope: Any = sys.modules.get("liger_kernel.transformers.rope")
    with ExitStack() as stack:
        for name, stand_in in _LIVE.items() if ops is not None else ():
            if hasattr(ops, name):
                stack.enter_context(patch.object(getattr(ops, name), "apply", stand_in))
        if rope is not None:
            stack.enter_context(
                patch.object(rope, "dispatch", lambda op, q, k, cos, sin, *rest: rotate(q, k, cos, sin))
            )
        yield


# Liger's functions -> stand-ins with the same positional arguments; of losses Liger takes four results
_LIVE: dict[str, Any] = {
    "LigerRMSNormFunction": lambda x, weight, eps, offset=0.0, casting="llama", in_place=True, *args: RMSNorm.apply(
        x, weight, casting, in_place
    ),
    "LigerLayerNormFunction": lambda x, weight, bias, eps: LayerNorm.apply(x, weight, bias),
    "LigerSiLUMulFunction": lambda gate, up, *scales: GatedProduct.apply(gate, up),
    "LigerGELUMulFunction": GatedProduct.apply,
    "LigerRopeFunction": lambda *args: rotate(*args),
    "LigerCrossEntropyFunction": lambda logits, target, *args: (
        CrossEntropy.apply(logits, target, *(args[4:5] or ["mean"])), None, None, None,
    ),
    "LigerFusedLinearCrossEntropyFunction": lambda hidden, weight, target, bias=None, *args: (
        FusedLinearCrossEntropy.apply(hidden, weight, target, bias, *(args[4:5] or ["mean"]), *args[13:14]),
        None, None, None,
    ),
}  # fmt: skip


def apply_cut_cross_entropy(model: Any) -> None:
    """Replaces the loss of a language model by cut cross entropy, as axolotl's plugin does."""
    _check_language_model(model, "cut cross entropy")
    model.__class__ = _language_model(type(model), CutCrossEntropy)


def _check_language_model(model: Any, what: str) -> None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not type(model).__name__.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        raise UserError(f"{what}: {type(model).__name__} is no language model with an output layer; leave it out")


_once: Any = functools.cache  # one class for all layers of a kind: blocks that are alike stay alike


def _like(kind: Any, forward: Callable[..., Any], **more: Any) -> type[Any]:
    """A subclass of `kind` with another forward, that is printed, and found by name, as `kind` is."""
    names = {"forward": functools.wraps(kind.forward)(forward), "__module__": kind.__module__, **more}
    return type(kind.__name__, (kind,), names)


@_once
def _norm(kind: Any, in_place: bool) -> type[Any]:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        return RMSNorm.apply(hidden_states, self.weight, "llama", in_place)

    return _like(kind, forward)


@_once
def _mlp(kind: Any, fused_gate: bool) -> type[Any]:
    def forward(self: Any, x: Tensor) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if fused_gate else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(GatedProduct.apply(gate, up))

    return _like(kind, forward)


@_once
def _attention(kind: Any, modelling: Any) -> type[Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with patch.object(modelling, "apply_rotary_pos_emb", rotate):
            return kind.forward(self, *args, **kwargs)

    return _like(kind, forward)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Query and key with their rotary positions, in place of transformers' `apply_rotary_pos_emb`."""
    return Rotation.apply(q, k, cos, sin)


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = IGNORED, reduction: str = "mean") -> Any:
    """Liger's cross entropy, in place of PyTorch's, as transformers' losses call it."""
    return CrossEntropy.apply(logits, target, reduction)


@_once
def _language_model(kind: Any, loss_function: Any, times: int = 1) -> Any:
    """A language model whose loss is fused.

    In training the loss is computed from the hidden states and the output layer's weight, which the model reads
    without a call of that layer. Logits have no width, so that the rest of the model's forward allocates nothing.
    """
    takes = inspect.signature(kind.forward).parameters
    name = "cut cross entropy" if loss_function is CutCrossEntropy else "Liger's fused loss"

    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if args and "labels" in takes and list(takes).index("labels") <= len(args):
            bound = inspect.signature(kind.forward).bind(self, *args, labels=labels, **kwargs)
            kwargs, args = {k: v for k, v in bound.arguments.items() if k not in ("self", "labels", "kwargs")}, ()
        shifted = kwargs.get("shift_labels")
        if not self.training or (labels is None and shifted is None):
            return kind.forward(self, *args, labels=labels, **kwargs)
        if loss_function is CrossEntropy:
            with patch.object(F, "cross_entropy", cross_entropy):
                return kind.forward(self, *args, labels=labels, **kwargs)
        counted = kwargs.pop("num_items_in_batch", None)
        ignored = kwargs.pop("ignore_index", IGNORED)
        kwargs.pop("shift_labels", None)
        head, losses = self.get_output_embeddings(), []

        def loss_of(hidden: Tensor) -> Tensor:
            target: Any = shifted
            if labels is not None and shifted is None:
                target = F.pad(labels, (0, 1), value=ignored)[..., 1:].contiguous()
            reduction = "mean" if counted is None else "sum"
            flat = hidden.view(-1, hidden.shape[-1])
            if isinstance(head.weight, DTensor):  # accelerate shards it beside adapters alone, and it is not called
                raise UserError(
                    f"{name}: the output layer is divided over GPUs where it reads it; leave one of them out",
                    cut_cross_entropy=False,
                    use_liger_kernel=False,
                    liger_kernel_config="",
                )
            operands = flat, head.weight, target.view(-1), head.bias
            loss = loss_function.apply(*operands, reduction, *([times] if times > 1 else []))
            losses.append(loss if counted is None else loss / counted)
            return hidden.new_empty(*hidden.shape[:-1], 0)

        layer = nn.Module()
        layer.forward = loss_of
        above, name = next(
            (m, name) for m in self.modules() for name, inner in children_of(m).items() if inner is head
        )
        with patch.dict(children_of(above), {name: layer}):
            out = kind.forward(self, *args, labels=None, **kwargs)
        out.loss, out.logits = losses[0], None
        if getattr(out, "aux_loss", None) is not None:
            out.loss = out.loss + self.router_aux_loss_coef * out.aux_loss
        return out

    return _like(kind, forward, fused_loss="" if loss_function is CrossEntropy else name)
