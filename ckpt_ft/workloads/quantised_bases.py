"""Checkpoints that are quantised already: their `quantization_config` decides how the weights lie in memory.

What transformers trains is asked of its own rules [transformers/quantizers, is_trainable; trainer_utils.py,
validate_quantization_for_training]: adapters over some methods, and the weights themselves over none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.quantised_layers import PACKINGS, PackedLinear, Packing, replace_linears

# Methods that transformers trains nothing over (`is_trainable` is false).
_UNTRAINABLE = {
    "auto-round", "fbgemm_fp8", "gguf", "higgs", "metal", "mxfp4", "nvfp4", "quark", "spqr", "vptq", "gemma"
}  # fmt: skip
_BITSANDBYTES = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
_BITS = re.compile(r"(?:int|float)(\d+)")


def as_quantised(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> TrainingSpec:
    """Returns `spec` with the quantisation of the checkpoint whose configuration is `config`.

    Raises:
        UserError: all weights are to be trained, another quantisation is asked for, transformers trains nothing over
            the method, or its layout is not modelled.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return spec
    if not isinstance(stated, Mapping):
        raise UserError(f"{name}: quantization_config is an object with a quant_method, not {str(stated)[:50]!r}")
    four, eight = bool(stated.get("load_in_4bit")), bool(stated.get("load_in_8bit"))
    method = str(stated.get("quant_method") or ("bitsandbytes" if four or eight else "")).lower()
    if method in _UNTRAINABLE and not stated.get("dequantize"):
        also = "; its checkpoints train if they are loaded with dequantize=True" if method == "mxfp4" else ""
        raise UserError(f"{name} is quantised by {method}, over which transformers trains nothing{also}")
    if method in (*_UNTRAINABLE, "compressed-tensors", "fp8") and stated.get("dequantize"):
        return spec  # as if it had never been quantised
    if not spec.adapter.trains:
        raise UserError(
            f"{name} is quantised by {method}, and such weights cannot be trained themselves: give a LoRA rank too, "
            "16 for example"
        )
    if method in _BITSANDBYTES and (four or eight):
        if (spec.quantisation.load_in_8bit and four) or (spec.quantisation.load_in_4bit and eight):
            raise UserError(f"{name} is quantised to {4 if four else 8} bits already: leave the other bits out")
        storage = str(stated.get("bnb_4bit_quant_storage") or "uint8") if four else "uint8"
        return spec.edit(
            load_in_4bit=four,
            load_in_8bit=eight and not four,
            double_quant=four and bool(stated.get("bnb_4bit_use_double_quant")),
            quant_storage=storage.removeprefix("torch."),
        )
    if spec.quantisation.bits:
        raise UserError(f"{name} is quantised by {method} already: leave --load-in-{spec.quantisation.bits}bit out")
    if method == "compressed-tensors":
        return spec  # its layers decompress their weights in the first forward pass, and keep them so
    method_of({**stated, "quant_method": method}, name)
    return spec.edit(packed={**stated, "quant_method": method})


def method_of(stated: Mapping[str, Any], name: str = "the checkpoint") -> tuple[Packing, int, int]:
    """Returns (packing, bits, group) of a quantization_config; group 0 for the packing's default.

    Raises:
        UserError: its layout is not modelled.
    """
    method, bits, group = str(stated["quant_method"]), 8, 0
    if method in ("gptq", "awq"):
        bits = _number(stated, "bits", "w_bit") or 4
        group = _number(stated, "group_size", "q_group_size")
    elif method == "hqq":
        inner: Any = stated.get("quant_config") or {}
        options = inner.get("weight_quant_params") or inner
        bits, group = _number(options, "nbits") or 4, _number(options, "group_size")
    elif method == "torchao":
        kind = str(stated.get("quant_type"))
        numbers = _BITS.findall(kind.lower())
        if numbers[:1] != ["8"]:
            raise UserError(f"{name} is quantised by torchao in {kind[:80]}: transformers trains over 8 bits only")
        if "dynamic" in kind.lower():
            raise UserError(
                f"{name}: torchao's dynamic activations are not modelled (weight-only int8 and float8 are)"
            )
        method = f"torchao {'float8' if 'float8' in kind.lower() else 'int8'}"
    elif method == "fp8":
        block = stated.get("weight_block_size")
        group = int(block[0]) if block else 2**24
    elif method == "quanto":
        kind = str(stated.get("weights", "int8"))
        bits = int((_BITS.findall(kind) or ["8"])[0])
    elif method == "aqlm":
        if _number(stated, "num_codebooks") > 1 or _number(stated, "out_group_size") > 1:
            raise UserError(f"{name}: AQLM is modelled with one codebook, of vectors along a row")
        bits, group = _number(stated, "nbits_per_codebook") or 16, _number(stated, "in_group_size")
    known = ("bitsandbytes", *dict.fromkeys(key.split()[0] for key in PACKINGS), "compressed-tensors")
    if method not in PACKINGS or (32 % bits and method in ("gptq", "awq")):
        raise UserError(f"{name} is quantised by {method} in {bits} bits, which is not modelled ({', '.join(known)})")
    return PACKINGS[method], bits, group


def _number(options: Mapping[str, Any], *names: str) -> int:
    return next((int(options[name]) for name in names if options.get(name) is not None), 0)


def pack(model: nn.Module, stated: Mapping[str, Any]) -> None:
    """Packs the linear layers of `model` as `stated`, a quantization_config, says, and freezes the model.

    Raises:
        UserError: the model has fused experts, which the method packs, too.
    """
    packing, bits, group = method_of(stated)
    if packing.experts and any(p.ndim == 3 and "experts" in name for name, p in model.named_parameters()):
        raise UserError(f"{stated['quant_method']}: packed weights of experts are not modelled")
    left = stated.get("modules_to_not_convert") or stated.get("ignored_layers")
    replace_linears(model, lambda linear: PackedLinear(linear, packing, bits, group), None, left)
    model.requires_grad_(False)
