"""What keeps most weights frozen: 4- and 8-bit layers, adapters, named parts; on a model that may be on meta."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_ft.checkpointing.blocks import find_blocks
from ckpt_ft.checkpointing.towers import Tower, find_towers
from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.spec.defaults import LORA_DROPOUT, TRAINED_TOWERS
from ckpt_ft.spec.peft_file import configuration, takes
from ckpt_ft.spec.training_spec import TrainingSpec

from .workload import DTYPES

aten = torch.ops.aten


class Valueless(TorchDispatchMode):
    """While it is on, ops on meta tensors that need values get the ones named above."""

    def __init__(self) -> None:
        super().__init__()
        self._set: dict[int, tuple[Tensor, int]] = {}  # storage of a mask -> it, and how many are set

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.is_meta:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return True if first.dtype is torch.bool else 1.0 if first.dtype.is_floating_point else 1
        if func is aten._to_copy.default:
            kwargs.pop("device", None)  # there is nothing to copy to another
        if func is aten.bincount.default:
            return first.new_empty(max(kwargs.get("minlength", 0), 1))
        if func is aten.nonzero.default:
            return self._nonzero(first)
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            args = (first, self._positions(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if func in (aten.scatter_.src, aten.scatter_.value) and first.dtype is torch.bool:
            self._set[first.untyped_storage()._cdata] = (first, args[2].numel())
        elif func is aten.eq.Scalar and first.untyped_storage()._cdata in self._set:
            self._set[out.untyped_storage()._cdata] = (out, self._count(first))
        return out

    def _count(self, mask: Tensor) -> int:
        return self._set.get(mask.untyped_storage()._cdata, (mask, mask.numel()))[1]

    def _nonzero(self, mask: Tensor) -> Tensor:
        """(set elements, axes)"""
        return torch.empty(self._count(mask), mask.ndim, dtype=torch.long, device="meta")

    def _positions(self, indices: Any) -> list[Any]:
        """Masks among `indices` as the positions that they set, an index for each axis."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                found.append(index)
            else:
                found += self._nonzero(index).unbind(1)
        return found


class TrainedTowers:
    """The towers of `model` that `choice`, one of `TRAINED_TOWERS`, names.

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
        """Train their weights, and what lies between the towers, but no other tower's."""
        for tower in self._all.values():
            if tower not in self.towers:
                ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
                beside = ends if tower.name == "language" else []
                for module in [*tower.modules.values(), *(end for end in beside if end is not None)]:
                    module.requires_grad_(False)

    def adapted_layers(self, asked: Sequence[str] | str | None, by: str = "LoRA targets") -> str:
        """A pattern, as PEFT takes one, of what gets an adapter in them: every linear layer but the head, or what is
        named as `asked` (`by` what, in errors). Where `asked` is a pattern, that, whatever towers it is of.

        Raises:
            UserError: nothing in them is.
        """
        linear = asked in (None, "all-linear", ["all-linear"])
        if isinstance(asked, str) and not linear:
            return asked
        head = self.model.get_output_embeddings()
        patterns = []
        for tower in self.towers:
            inside = [item for root in tower.modules.values() for item in root.named_modules()]
            if linear:
                names = _endings(inside, head)
            else:
                names = {end for end in asked or () if any(f".{name}".endswith(f".{end}") for name, _ in inside)}
            if names:
                patterns.append(_pattern(tower, names))
        if not patterns:
            where = " or ".join(tower.name for tower in self.towers)
            raise UserError(f"{by} {' '.join(asked or ())}: no layer of that name is {where}'s")
        return "|".join(patterns)


def _endings(modules: list[tuple[str, nn.Module]], head: nn.Module | None) -> set[str]:
    """What the paths of linear layers but the head end in, as short as no other module's path ends so: `q_proj`, and
    of a layer without a name of its own `mlp.0`, since `0` would be a block as well."""
    others = {end for name, module in modules if not isinstance(module, nn.Linear) for end in _ends(name)}
    layers = [name for name, module in modules if isinstance(module, nn.Linear) and module is not head]
    return {next((end for end in _ends(name) if end not in others), name) for name in layers}


def _ends(path: str) -> list[str]:
    """The path's last name, its last two, and so on."""
    names = path.split(".")
    return [".".join(names[first:]) for first in reversed(range(len(names)))]


def _pattern(tower: Tower, names: set[str]) -> str:
    """Of the modules in `tower` that end in one of `names`."""
    roots = "|".join(re.escape(f"{root}.") if root else "" for root in tower.modules)
    return rf"(?:{roots})(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(names)))})"


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
    """Errors with which a forward refuses its input, each with what to tell the user; "" if the batch is the cause.

    A kind of adapter that computes with the weight itself fails on packed bits. Other kinds fail on what they were not
    given (X-LoRA without adapters to mix).
    """
    refused = dict.fromkeys((AttributeError, TypeError, ValueError), "")
    if spec.adapter.peft is not None:
        over = f" over weights in {spec.quantisation.bits} bits" if spec.quantisation.bits else ""
        refused[RuntimeError] = f"{spec.adapter.peft.get('peft_type')} does not run{over}"
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
        if getattr(layer, "quantization_backend", layer) is None:  # SHiRA's
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


def _configuration(spec: TrainingSpec, towers: TrainedTowers | None, without_values: bool) -> Any:
    """LoRA as the settings say it, or the configuration of PEFT that they carry; in `towers` alone."""
    from peft import LoraConfig

    if spec.adapter.peft is not None:
        asked = "the PEFT configuration"
        given = dict(spec.adapter.peft)
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
