"""Adds adapters, quantised weights and frozen parts to a model, which may be on the meta device.

For a checkpoint that is already quantised, its `quantization_config` decides the memory layout of the weights.
transformers never trains such weights themselves, and trains adapters over some of the methods only
[transformers/quantizers, is_trainable; trainer_utils.py, validate_quantization_for_training].
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ckpt_ft.checkpointing.blocks import find_blocks
from ckpt_ft.checkpointing.towers import find_towers
from ckpt_ft.compat.libraries import mark_packed
from ckpt_ft.compat.modules import weight_cache
from ckpt_ft.compat.tensors import TorchDispatchMode
from ckpt_ft.errors import UserError, did_you_mean, one_line
from ckpt_ft.spec.defaults import LORA_DROPOUT, TRAINED_TOWERS
from ckpt_ft.spec.peft_file import configuration, takes
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.quantised_layers import (
    PACKINGS,
    PackedLinear,
    Packing,
    fused_experts,
    prepare_kbit,
    replace_linears,
    to_int8,
    to_nf4,
)
from ckpt_ft.units import format_bytes
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.workload import DTYPES


class Valueless(TorchDispatchMode):
    """Under it, adapters that read a number of a weight can be initialised on the meta device: every number is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1


class TrainedTowers:
    """The trained towers of a vision-language model, selected by `choice`, a key of `TRAINED_TOWERS`.

    Raises:
        UserError: the model has no such tower.
    """

    def __init__(self, model: Any, choice: str) -> None:
        self.model = model
        self._all = {tower.name: tower for tower in find_towers(model, find_blocks(model).blocks)}
        missing = [name for name in TRAINED_TOWERS[choice] if name not in self._all]
        if missing:
            raise UserError(
                f"train towers {choice}: {type(model).__name__} has no {missing[0]} tower"
                f"{'; it has ' + ', '.join(self._all) if self._all else ''}"
            )
        self.towers = [self._all[name] for name in TRAINED_TOWERS[choice]]

    def freeze_others(self) -> None:
        """Freeze all other towers; the weights between towers stay trainable."""
        for tower in self._all.values():
            if tower not in self.towers:
                ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
                beside = ends if tower.name == "language" else []
                for module in [*tower.modules.values(), *(end for end in beside if end is not None)]:
                    module.requires_grad_(False)

    def adapted_layers(self, asked: Sequence[str] | str | None, by: str = "LoRA targets") -> list[str] | str:
        """Returns the paths of the layers of these towers that get an adapter.

        Args:
            asked: names of layers; None or "all-linear" for every linear layer except the head. A pattern is returned
                unchanged, whatever towers it matches.
            by: the setting that `asked` comes from, for error messages.

        Raises:
            UserError: no layer of these towers matches.
        """
        linear = asked in (None, "all-linear", ["all-linear"])
        if isinstance(asked, str) and not linear:
            return asked
        head = self.model.get_output_embeddings()
        ends = () if linear else tuple(f".{name}" for name in asked or ())
        found = []
        for tower in self.towers:
            for root, module in tower.modules.items():
                for name, layer in module.named_modules():
                    path = ".".join(filter(None, (root, name)))
                    is_linear = isinstance(layer, nn.Linear) and layer is not head
                    if is_linear if linear else f".{path}".endswith(ends):
                        found.append(path)
        if not found:
            where = " or ".join(tower.name for tower in self.towers)
            raise UserError(f"{by} {' '.join(asked or ())}: no layer of that name is {where}'s")
        return found


_BY_VALUES = ("ADAMSS", "FROD", "SHIRA", "UNILORA")  # PEFT's types with masks or clusters of values
_FROM_DATA = ("corda", "loftq")  # LoRA initialisations that need data or other packages, and do not change sizes


def without_adapters(model: Any) -> Any:
    """Returns the base model inside PEFT's wrapper, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapt(model: Any, spec: TrainingSpec) -> Any:
    """Applies the quantised weights, frozen parts and adapters of `spec` to `model`, as transformers and PEFT do."""
    if spec.quantisation.bits:
        _quantise(model, spec)
    if spec.quantisation.packed is not None:
        pack(model, spec.quantisation.packed)
    if spec.precision.ends_dtype:  # as axolotl's convert_embedding_modules_dtype does
        beside = [model.get_input_embeddings(), model.get_output_embeddings()]
        for name, module in model.named_modules():
            if "norm" in name or any(module is end for end in beside):
                module.to(DTYPES[spec.precision.ends_dtype])
    for part in spec.model.frozen:
        _freeze(model, part, whole=spec.adapter.trains)
    towers = TrainedTowers(model, spec.model.train_towers) if spec.model.train_towers else None
    if not spec.adapter.trains:
        if towers is not None:
            towers.freeze_others()
        for parameter in model.parameters() if spec.precision.float32_trained else ():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if spec.model.frozen and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError(
                f"frozen parts {', '.join(spec.model.frozen)}: nothing is left to train, nor are there adapters"
            )
        return model
    from peft import get_peft_model

    check_target_parameters(model, spec.adapter.lora_target_parameters)
    on_meta = next(model.parameters()).is_meta
    values: AbstractContextManager[Any] = Valueless() if on_meta else nullcontext()
    targets = f"LoRA targets {', '.join(spec.adapter.lora_targets)}" if spec.adapter.lora_targets else "LoRA"
    asked = targets if spec.adapter.lora_r else "the PEFT configuration"
    with library_reads(asked), torch.device("meta" if on_meta else "cpu"), values, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # PEFT corrects it for GPT-2's Conv1D
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings")  # it is about merging
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")  # PEFT's own, of experts
        config = _configuration(model, spec, towers, on_meta, bool(fused_experts(model)))
        if spec.quantisation.quantize_moe_experts and config.target_parameters:  # PEFT takes whole names of these
            packed = [f"{path}.{n}" for path, m in model.named_modules() for n in getattr(m, "parametrizations", ())]
            ends = tuple(f".{target}" for target in config.target_parameters)
            config.target_parameters += [name for name in packed if f".{name}".endswith(ends)]
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            if spec.adapter.lora_targets and "not found in the base model" in str(error):
                raise UserError(f"{targets}: {one_line(error, 400)}", lora_targets=()) from error
            if "lora_dropout != 0" not in str(error):
                raise
            raise UserError(
                f"LoRA dropout {config.lora_dropout}: PEFT adapts fused experts and routers without; give 0",
                lora_dropout=0.0,
            ) from error
    if on_meta:
        _train_ranks_of_adalora(adapted)
    if spec.quantisation.quantize_moe_experts:
        _read_weights_again(adapted)
    return adapted.train()


def check_target_parameters(model: nn.Module, targets: Sequence[str]) -> None:
    """Raises UserError for a target of `target_parameters` that names no parameter of `model`."""
    names = [name.replace(".parametrizations.", ".").removesuffix(".original") for name, _ in model.named_parameters()]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            fused = dict.fromkeys(".".join(name.split(".")[-3:]) for name, _ in fused_experts(model))
            known = f"; those of experts are {', '.join(fused)}" if fused else "; it has no fused experts"
            raise UserError(
                f"LoRA target parameter '{target}': no parameter has that name{did_you_mean(target, fused)}{known}",
                lora_target_parameters=(),
            )


def notes_on_experts(model: nn.Module, spec: TrainingSpec) -> tuple[str, ...]:
    """A sentence about the experts that quantisation does not pack; () if there are none.

    bitsandbytes packs linear layers only. [transformers/integrations/bitsandbytes.py, replace_with_bnb_linear]

    Raises:
        UserError: settings of experts for a model without experts.
    """
    quantised = spec.quantisation
    nbytes = sum(p.nbytes for _, p in fused_experts(model))
    names = (f"{at} {type(module).__name__}".lower() for at, module in model.named_modules())
    if spec.kernels.experts_implementation and not any("expert" in name for name in names):
        raise UserError(f"experts implementation: {type(model).__name__} has no experts; leave it out")
    if not nbytes and quantised.quantize_moe_experts:
        raise UserError(
            f"quantised experts: {type(model).__name__} has no experts in 3-D parameters; leave it out",
            quantize_moe_experts=False,
        )
    if not nbytes or not quantised.bits:
        return ()
    if quantised.quantize_moe_experts:
        return ("4 bits: experts are packed, too, as axolotl does; forward unpacks all experts of a block at once",)
    remedy = "--load-in-4bit with --quantize-moe-experts packs them"
    if quantised.load_in_4bit:
        remedy = (
            "axolotl's quantize_moe_experts packs them (--quantize-moe-experts predicts it); transformers unpacks an "
            "MXFP4 checkpoint to train; --lora-target-parameters adapts them unpacked"
        )
    dtype = "float32" if quantised.prepare_kbit else spec.precision.dtype
    nbytes = nbytes * DTYPES[dtype].itemsize // DTYPES[spec.precision.dtype].itemsize
    left = f"bitsandbytes packs linear layers only, and {format_bytes(nbytes)} of experts in fused parameters are in "
    left += dtype + (", to which PEFT's k-bit preparation casts what is not packed" if quantised.prepare_kbit else "")
    return (f"{quantised.bits} bits: {left}; {remedy}",)


def notes_on(spec: TrainingSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Assumptions about the quantised weights and attention of a checkpoint with this `config`, one sentence each."""
    notes = []
    if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        notes.append(
            f"the checkpoint's experts are in MXFP4, over which transformers trains nothing: all weights are in "
            f"{spec.precision.dtype}, as the recipes load them (Mxfp4Config(dequantize=True)), on any card"
        )
    if spec.quantisation.bits:
        bits = "4 bits" if spec.quantisation.load_in_4bit else "8 bits"
        others = f"{spec.precision.dtype}, as loaded, without peft's k-bit preparation"
        if spec.quantisation.prepare_kbit:
            others = "float32, as peft.prepare_model_for_kbit_training leaves them"
        if spec.precision.ends_dtype:
            others = f"{spec.precision.ends_dtype}, what else is not packed in float32"
        notes.append(f"{bits}: embeddings, norms and head in {others}")
    if spec.quantisation.packed is not None:
        method = spec.quantisation.packed["quant_method"]
        notes.append(f"the checkpoint's weights are packed by {method}, and unpacked where they are used")
    if spec.quantisation.load_in_8bit:
        notes.append("8 bits: no column of an input is an outlier")
    attention = spec.kernels.attn_implementation
    if "flash" in attention and spec.data.rows == "padded":
        notes.append("flash attention of padded rows: as many tokens as with the padding")
    return tuple(notes)


def adapters_of(spec: TrainingSpec) -> str:
    """The adapters of `spec`, for error messages of forward: adapters that compute with packed weights fail there."""
    if spec.adapter.peft is None:
        return ""
    over = f" over weights in {spec.quantisation.bits} bits" if spec.quantisation.bits else ""
    return f" with {spec.adapter.peft.get('peft_type')}{over}"


def _quantise(model: Any, spec: TrainingSpec) -> None:
    if spec.quantisation.load_in_8bit:
        to_int8(model)
    else:
        compute = torch.bfloat16 if spec.precision.dtype == "float32" else DTYPES[spec.precision.dtype]
        to_nf4(
            model,
            compute,
            nested=spec.quantisation.double_quant,
            storage=getattr(torch, spec.quantisation.quant_storage),
            experts=spec.quantisation.quantize_moe_experts,
        )
    mark_packed(model)
    if spec.quantisation.prepare_kbit:
        prepare_kbit(model)


def _read_weights_again(adapted: Any) -> None:
    """Let adapters of packed experts read the weight again after each of them was added to it, as axolotl does.

    PEFT nests the adapters of two parameters of one module, and the outer adapter caches the weights that it reads.
    """
    from peft.tuners.lora.layer import ParamWrapper

    class Fresh(ParamWrapper):
        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            with super()._activate_lora(active_adapters):
                for key in [key for key in weight_cache(parametrize) if key[1] == self.parameter_name]:
                    del weight_cache(parametrize)[key]
                yield

        def _remove_parametrizations(self) -> None:  # PEFT 0.21 finds only one of its two kinds
            del self.get_base_layer().parametrizations[self.parameter_name][-1]

    for module in adapted.modules():
        if type(module) is not ParamWrapper:
            continue
        if parametrize.is_parametrized(module.get_base_layer(), module.parameter_name):  # a router is not packed
            module.__class__ = Fresh


def _train_ranks_of_adalora(adapted: Any) -> None:
    """Make AdaLoRA's numbers of ranks trainable for weights in half precision. PEFT 0.21 does so, but not on meta."""
    for layer in adapted.modules():
        ranks = getattr(layer, "ranknum", None)
        if ranks is not None and layer.get_base_layer().weight.dtype in (torch.bfloat16, torch.float16):
            ranks.requires_grad_(True)


def _freeze(model: Any, part: str, whole: bool) -> None:
    """Freezes the parameters that a part names, or all that a `!` part does not find.

    whole: whether a part that finds none freezes the model: axolotl's adapters train then.
    """
    names = dict(model.named_parameters())
    if part.startswith("!"):
        kept = _found(list(names), part[1:])
        named = [parameter for name, parameter in names.items() if name not in kept] if kept or whole else []
    else:
        named = [parameter for name, parameter in names.items() if part in name]
    if not named:
        known = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in model.named_children()))
        raise UserError(f"frozen part '{part}': no parameter has it in its name (the model's parts: {known})")
    for parameter in named:
        parameter.requires_grad_(False)


_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")


def _found(names: Sequence[str], expression: str) -> set[str]:
    """The names that an expression finds; `first:N` and `last:N` are parameters of so many blocks."""
    end, _, count = expression.partition(":")
    if end not in ("first", "last"):
        with library_reads(f"frozen part '!{expression}'"):
            return {name for name in names if re.search(expression, name)}
    blocks = {name: int(at[1]) for name in names if (at := _BLOCK.search(name))}
    most = max(blocks.values(), default=0)
    return {name for name, at in blocks.items() if (at if end == "first" else most - at) < int(count)}


# PEFT's types of the tasks that have a head of their own, beside the adapters.
_PEFT_TASKS = {
    "text-classification": "SEQ_CLS", "reranker": "SEQ_CLS", "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS", "embedding": "FEATURE_EXTRACTION",
}  # fmt: skip


def head_settings(model: Any, task: str) -> dict[str, Any]:
    """Arguments of a PEFT configuration for `task`: layers beside the backbone are new, so they are trained whole."""
    if task not in _PEFT_TASKS:
        return {}
    parts = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    heads = sorted({name.partition(".")[0] for name in parts}) if task != "embedding" else []
    excluded = {"exclude_modules": rf"({'|'.join(heads)})(\..*)?"} if heads else {}
    return {"task_type": _PEFT_TASKS[task], "modules_to_save": heads, **excluded}


def _configuration(
    model: Any, spec: TrainingSpec, towers: TrainedTowers | None, without_values: bool, experts: bool
) -> Any:
    """The PEFT configuration of the spec: LoRA by its rank, or the given one; only in `towers` if there are any.

    experts: whether the model has fused experts, which PEFT may adapt among all linear layers. The default dropout is
        then 0, as in the recipes.
    """
    from peft import LoraConfig

    if spec.adapter.peft is not None:
        asked = "the PEFT configuration"
        heads = head_settings(model, spec.model.task)
        given = {key: heads[key] for key in heads if takes(spec.adapter.peft, key, asked)} | dict(spec.adapter.peft)
        if without_values and given.get("init_lora_weights") in _FROM_DATA:
            given["init_lora_weights"] = True
        if without_values and (kind := given.get("peft_type")) in _BY_VALUES:
            raise UserError(
                f"{asked}: the sizes of {kind} depend on values, and a prediction reads none; give another kind"
            )
        config: Any = configuration(given, asked)
        if towers is not None and takes(given, "target_modules", asked):
            config.target_modules = towers.adapted_layers(given.get("target_modules"), f"{asked}:")
        return config
    rank, dropout, targets = spec.adapter.lora_r, spec.adapter.lora_dropout, list(spec.adapter.lora_targets)
    usual = None if spec.trainer.trainer else "all-linear"  # TRL lets PEFT choose, which knows layers by model type
    if targets == ["all-linear"]:
        targets, usual = [], "all-linear"
    chosen: Any = [] if targets == ["none"] else targets or usual
    if re.search(r"[^\w.,-]", pattern := ",".join(targets)):
        chosen = pattern  # a regular expression, which may have commas
    elif towers is not None and targets != ["none"]:
        chosen = towers.adapted_layers(targets or None)
    heads = head_settings(model, spec.model.task)
    if spec.trainer.trainer:  # TRL leaves the head to PEFT
        heads = {"task_type": heads["task_type"]} if heads else {}
    heads["modules_to_save"] = [*heads.get("modules_to_save", ()), *spec.adapter.lora_modules_to_save] or None
    return LoraConfig(
        **heads,
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=(LORA_DROPOUT if spec.trainer.trainer or not experts else 0.0) if dropout is None else dropout,
        target_modules=chosen,
        target_parameters=list(spec.adapter.lora_target_parameters) or None,
        use_dora=spec.adapter.use_dora,
    )


# Methods over which transformers cannot even train adapters (`is_trainable` is false).
_UNTRAINABLE = {
    "auto-round", "fbgemm_fp8", "gguf", "higgs", "metal", "nvfp4", "quark", "spqr", "vptq", "gemma"
}  # fmt: skip
_BITSANDBYTES = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")


def with_quantisation_of(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> TrainingSpec:
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
    bits = spec.quantisation.bits
    if method == "mxfp4" and bits:
        raise UserError(
            f"{name} is quantised by mxfp4, over which transformers loads no other bits: leave --load-in-{bits}bit "
            "out, or name a checkpoint in bfloat16"
        )
    unpacked = method in (*_UNTRAINABLE, "compressed-tensors", "fp8") and stated.get("dequantize")
    if method == "mxfp4" or unpacked:
        return spec  # as if it had never been quantised: see `notes_on`
    if method in _UNTRAINABLE:
        raise UserError(f"{name} is quantised by {method}, over which transformers trains nothing")
    if not spec.adapter.trains:
        raise UserError(
            f"{name} is quantised by {method}, and such weights cannot be trained themselves: give a LoRA rank too, "
            "16 for example"
        )
    own = (4 if four else 8) if method in _BITSANDBYTES and (four or eight) else 0
    if bits not in (0, own):
        raise UserError(f"{name} is quantised by {method} already: leave --load-in-{bits}bit out")
    if own:
        storage = str(stated.get("bnb_4bit_quant_storage") or "uint8") if four else "uint8"
        return spec.edit(
            load_in_4bit=four,
            load_in_8bit=eight and not four,
            double_quant=four and bool(stated.get("bnb_4bit_use_double_quant")),
            quant_storage=storage.removeprefix("torch."),
        )
    if method == "compressed-tensors":
        return spec  # its layers decompress their weights in the first forward pass, and keep them so
    method_of({**stated, "quant_method": method}, name)
    return spec.edit(packed={**stated, "quant_method": method})


def method_of(stated: Mapping[str, Any], name: str = "the checkpoint") -> tuple[Packing, int, int]:
    """Returns (packing, bits, group) of a quantization_config; group 0 for the packing's default.

    Raises:
        UserError: its layout is not modelled.
    """
    method, bits, group = str(stated["quant_method"]), 0, 0
    if method in ("gptq", "awq"):
        bits = _number(stated, "bits", "w_bit") or 4
        group = _number(stated, "group_size", "q_group_size")
    elif method == "fp8":
        block = stated.get("weight_block_size")
        group = int(block[0]) if block else 2**24
    known = ("bitsandbytes", *PACKINGS, "compressed-tensors")
    if method not in PACKINGS or (method in ("gptq", "awq") and 32 % bits):
        kind = f"{method} in {bits} bits" if bits else method
        raise UserError(f"{name} is quantised by {kind}, which is not modelled ({', '.join(known)})")
    return PACKINGS[method], bits, group


def _number(options: Mapping[str, Any], *names: str) -> int:
    return next((int(options[name]) for name in names if options.get(name) is not None), 0)


def pack(model: nn.Module, stated: Mapping[str, Any]) -> None:
    """Packs the linear layers of `model` as `stated`, a quantization_config, says, and freezes the model.

    Raises:
        UserError: the model has fused experts, which the method packs, too.
    """
    packing, bits, group = method_of(stated)
    if fused_experts(model):
        raise UserError(f"{stated['quant_method']}: packed weights of experts are not modelled")
    left = stated.get("modules_to_not_convert") or stated.get("ignored_layers")
    replace_linears(model, lambda linear: PackedLinear(linear, packing, bits, group), None, left)
    model.requires_grad_(False)
