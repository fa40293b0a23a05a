"""How many positions a language model has, and how rotary positions are stretched for longer sequences."""

from __future__ import annotations

from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec

STRETCHES = ("linear", "dynamic", "yarn")  # `rope_type` of transformers that need nothing but a factor
_OFFSET = 4  # a table may have a few more rows: two in OPT


def trained_positions(config: Any) -> int:
    """The number of positions that the model was trained on, from its text configuration; 0 if it states none."""
    text = config.get_text_config()
    stated = getattr(text, "max_target_positions", None) or getattr(text, "max_position_embeddings", None) or 0
    return max(int(stated), 0)  # XLNet's -1 means no limit


def is_rotary(config: Any) -> bool:
    """Whether positions are rotations computed for any length [transformers/modeling_rope_utils.py]."""
    return bool(getattr(config.get_text_config(), "rope_parameters", None))


def position_limit(model: Any) -> int:
    """The longest sequence that the model can process; 0 if there is no limit.

    Learned and precomputed positions are a table with a row for each position. Rotary positions, ALiBi and recurrent
    layers have none.
    """
    from torch import nn

    most = trained_positions(model.config)
    if not most or is_rotary(model.config):
        return 0
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes = rows | {size for buffer in model.buffers() for size in buffer.shape}
    return most if any(most <= size <= most + _OFFSET for size in sizes) else 0


def stretch_positions(config: Any, rope_scaling: str, length: int) -> None:
    """Set the RoPE scaling of a configuration for sequences of `length` tokens, as transformers reads it.

    Args:
        rope_scaling: one of `STRETCHES`; "" and "none" change nothing. The factor is `length` over the number of
            positions that the model was trained on.

    Raises:
        UserError: the model has no rotary positions, or its configuration scales them already.
    """
    if rope_scaling not in STRETCHES:
        return
    trained = trained_positions(config)
    if not is_rotary(config) or not trained:
        raise UserError(f"rope scaling {rope_scaling}: a {config.model_type} has no rotary positions to scale")
    if length <= trained:
        return
    for layers, stated in _ropes(config).items():
        kind = stated.get("rope_type", "default")
        if kind != "default":
            raise UserError(
                f"rope scaling {rope_scaling}: the configuration has rope_type {kind} already; give none to keep it"
            )
        if "sliding" not in layers:  # a sliding window is no longer than before
            stated |= {"rope_type": rope_scaling, "factor": length / trained}
            stated |= {"original_max_position_embeddings": trained} if rope_scaling == "yarn" else {}


def with_rope_scaling(spec: TrainingSpec, config: Any, length: int) -> TrainingSpec:
    """Returns `spec` for sequences of `length` tokens, as a recipe takes it: beyond the positions with a scaling."""
    spec = spec.edit(seq_length=length)
    beyond = 0 < trained_positions(config) < length and is_rotary(config)
    return spec.edit(rope_scaling="none") if beyond and not spec.model.rope_scaling else spec


def beyond_note(config: Any, rope_scaling: str, length: int) -> str:
    """A sentence about sequences that are longer than those that the model was trained on; "" if they are not."""
    trained = trained_positions(config)
    if not trained or length <= trained or not is_rotary(config):
        return ""
    said = f"sequences of {length} tokens: the model was trained on {trained} positions"
    if rope_scaling in STRETCHES:
        return f"{said}; rope_scaling {rope_scaling} with factor {length / trained:.4g}"
    kinds = sorted({str(rope.get("rope_type", "default")) for rope in _ropes(config).values()} - {"default"})
    if kinds:
        return f"{said}; its configuration scales them by {' and '.join(kinds)}"
    return f"{said}; rotary positions run at any length, and --rope-scaling yarn stretches them"


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """The RoPE parameters by type of layer; by "" if all layers have the same ones."""
    found = config.get_text_config().rope_parameters
    return {"": found} if "rope_theta" in found else dict(found)
