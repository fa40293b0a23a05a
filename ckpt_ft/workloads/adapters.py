"""What keeps most weights frozen: 4- and 8-bit layers, adapters, named parts; on a model that may be on meta."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.spec.defaults import LORA_DROPOUT
from ckpt_ft.spec.peft_file import configuration, takes
from ckpt_ft.spec.training_spec import TrainingSpec

from .dtypes import DTYPES
from .trained_towers import TrainedTowers
from .valueless import Valueless

_FROM_DATA = ("corda", "loftq")  # LoRA's own sizes, with values that are computed from data or by other packages


def without_adapters(model: Any) -> Any:
    """The model that PEFT's wrapper is around; `model` itself where there is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapt(model: Any, spec: TrainingSpec) -> Any:
    """`model` with quantised weights, frozen parts, adapters (fp32 on a half-precision base, as peft makes them)."""
    if spec.quantisation.bits:
        _quantise(model, spec)
    for part in spec.model.frozen:
        _freeze(model, part)
    towers = TrainedTowers(model, spec.model.train_towers) if spec.model.train_towers else None
    if not spec.adapter.trains:
        if towers is not None:
            towers.freeze_others()
        if spec.model.frozen and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError(
                f"frozen parts {', '.join(spec.model.frozen)}: nothing is left to train, nor are there adapters"
            )
        return model
    from peft import get_peft_model

    on_meta = next(model.parameters()).is_meta
    values: AbstractContextManager[Any] = Valueless() if on_meta else nullcontext()
    asked = f"LoRA targets {', '.join(spec.adapter.lora_targets)}" if spec.adapter.lora_r else "the PEFT configuration"
    with library_reads(asked), torch.device("meta" if on_meta else "cpu"), values, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # PEFT sets it right for GPT-2's Conv1D
        adapted = get_peft_model(model, _configuration(spec, towers, on_meta))
    if on_meta:
        _train_rank_numbers(adapted)
        tell_sizes(adapted)
    if spec.quantisation.load_in_4bit:
        _show_weights(adapted)
    return adapted.train()


def notes_on(spec: TrainingSpec) -> tuple[str, ...]:
    """Which of two ways was taken where users may expect the other, one sentence each."""
    notes = []
    if spec.quantisation.bits:
        bits = "4 bits" if spec.quantisation.load_in_4bit else "8 bits"
        if spec.quantisation.prepare_kbit:
            notes.append(
                f"{bits}: embeddings, norms and head in float32, as peft.prepare_model_for_kbit_training leaves them"
            )
        else:
            notes.append(
                f"{bits}: embeddings, norms and head in {spec.precision.dtype}, as loaded, without peft's k-bit "
                "preparation"
            )
    if spec.quantisation.load_in_8bit:
        notes.append("8 bits: no column of an input is an outlier")
    if spec.kernels.attn_implementation == "flash_attention_2" and spec.data.rows == "padded":
        notes.append("flash attention of padded rows: as many tokens as with the padding")
    return tuple(notes)


def by_task(spec: TrainingSpec) -> bool:
    """Whether the adapters are of several tasks, so that a batch says of each of its rows which one it is of."""
    return spec.adapter.peft is not None and spec.adapter.peft.get("peft_type") in ("MULTITASK_PROMPT_TUNING", "POLY")


def refusals(spec: TrainingSpec) -> dict[type[Exception], str]:
    """Errors with which a model's forward refuses what it is given, and what to say of each; "" where it is the batch.

    Kinds of PEFT that work on the weight itself find its packed bits there.
    """
    refused = dict.fromkeys((AttributeError, TypeError, ValueError), "")
    if spec.quantisation.bits and spec.adapter.peft is not None:
        bits = 4 if spec.quantisation.load_in_4bit else 8
        refused[RuntimeError] = f"{spec.adapter.peft.get('peft_type')} does not run over weights in {bits} bits"
    return refused


def _quantise(model: Any, spec: TrainingSpec) -> None:
    from ckpt_ft.standins.quantised_layers import prepare_kbit, to_int8, to_nf4

    if spec.quantisation.load_in_8bit:
        to_int8(model)
    else:
        compute = torch.bfloat16 if spec.precision.dtype == "float32" else DTYPES[spec.precision.dtype]
        to_nf4(
            model,
            compute,
            nested=spec.quantisation.double_quant,
            storage=getattr(torch, spec.quantisation.quant_storage),
        )
    if spec.quantisation.prepare_kbit:
        prepare_kbit(model)


def _show_weights(adapted: Any) -> None:
    """Tell PEFT's layers that work on the weight itself how it is unpacked, as of bitsandbytes' they know."""
    from ckpt_ft.standins.quantised_layers import NF4Linear

    for layer in adapted.modules():
        if not isinstance(getattr(layer, "base_layer", None), NF4Linear):
            continue
        if hasattr(layer, "hira_A"):
            from ckpt_ft.standins.hira import HiraOverNF4

            layer.__class__ = HiraOverNF4
        elif getattr(layer, "quantization_backend", layer) is None:  # SHiRA's
            from peft.utils.quantization_utils import HqqBackend

            layer.quantization_backend = HqqBackend()


def _train_rank_numbers(adapted: Any) -> None:
    """Of AdaLoRA over half precision: PEFT since 0.21 trains what it casts, and on meta there is nothing to cast."""
    for layer in adapted.modules():
        ranks = getattr(layer, "ranknum", None)
        if ranks is not None and layer.get_base_layer().weight.dtype in (torch.bfloat16, torch.float16):
            ranks.requires_grad_(_rank_numbers_train())


@cache
def _rank_numbers_train() -> bool:
    """Whether they do with the PEFT that is installed."""
    from peft import AdaLoraConfig, get_peft_model

    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        layer = torch.nn.Sequential(torch.nn.Linear(1, 1, dtype=torch.bfloat16))
        adapted = get_peft_model(layer, AdaLoraConfig(target_modules=["0"], total_step=1))
    return any(p.requires_grad for name, p in adapted.named_parameters() if "ranknum" in name)


def tell_sizes(adapted: Any) -> None:
    """Of FRoD: its forward reads how large its sparse matrices are, and on meta there are no numbers to read."""
    for category, sizes in getattr(adapted.base_model, "frod_s_size", {}).items():
        for adapter in sizes:
            shape = adapted.base_model.frod_V[category][adapter].shape
            sizes[adapter] = torch.tensor(shape, device="cpu")


def _freeze(model: Any, part: str) -> None:
    named = [parameter for name, parameter in model.named_parameters() if part in name]
    if not named:
        known = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in model.named_children()))
        raise UserError(f"frozen part '{part}': no parameter has it in its name (the model's parts: {known})")
    for parameter in named:
        parameter.requires_grad_(False)


def _check_mixed(adapters: Mapping[str, str]) -> None:
    """X-LoRA's: PEFT loads them under their numbers, whatever they are called, and then looks for their names."""
    if not adapters:
        raise UserError("X-LoRA mixes adapters that there are: its 'adapters' names none of them")
    if list(adapters) != [str(number) for number in range(len(adapters))]:
        raise UserError(f"X-LoRA's adapters {', '.join(adapters)}: PEFT knows them by number: call them 0, 1, ...")


def _configuration(spec: TrainingSpec, towers: TrainedTowers | None, without_values: bool) -> Any:
    """LoRA as the settings say it, or the configuration of PEFT that they carry; in `towers` alone."""
    from peft import LoraConfig

    if spec.adapter.peft is not None:
        asked = "the PEFT configuration"
        given = dict(spec.adapter.peft)
        if given["peft_type"] == "XLORA":
            _check_mixed(given.get("adapters") or {})
        if without_values and given.get("init_lora_weights") in _FROM_DATA:
            given["init_lora_weights"] = True
        config: Any = configuration(given, asked)
        if towers is not None and takes(given, "target_modules", asked):
            config.target_modules = towers.adapted_layers(given.get("target_modules"), f"{asked}:")
        return config
    rank, dropout, targets = spec.adapter.lora_r, spec.adapter.lora_dropout, list(spec.adapter.lora_targets)
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=LORA_DROPOUT if dropout is None else dropout,
        target_modules=targets or "all-linear" if towers is None else towers.adapted_layers(targets or None),
        use_dora=spec.adapter.use_dora,
    )
