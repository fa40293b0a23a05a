"""Loads a causal language model and its tokenizer from flags with TRL's names: full fine-tuning, LoRA, QLoRA.

`--peft_config` adds adapters of any PEFT type, in every recipe. Its file is PEFT's own `adapter_config.json`, which
may leave out three settings that a recipe knows: the task, the target modules, and the modules trained in full. Bad
input raises UserError, one line that names the flag.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Mxfp4Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils import import_utils

from ckpt_ft.compat.libraries import parallel_plans
from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import LORA_DROPOUT, SEQ_LENGTH
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.peft_file import configuration, read_peft, takes
from ckpt_ft.validation import library_reads, require_package
from ckpt_ft.workloads.adapters import check_target_parameters, fused_experts
from ckpt_ft.workloads.model_config import (
    STRETCHES,
    check_causal,
    is_rotary,
    read_config,
    set_router_loss,
    stretch_positions,
    trained_positions,
)

from .flags import AtLeastOne, NotNegative, Rank, Share, check_flags, flag

logger = logging.getLogger(__name__)
PEFT_CONFIG = "An adapter_config.json of any kind of PEFT (DoRA, LoKr, LoHa, OFT ...), or the directory that has it."
_RANK, _ALPHA = 16, 32
# Flags of LoRA: LoraConfig's names and the defaults.
_LORA = {"lora_r": ("r", _RANK), "lora_alpha": ("lora_alpha", _ALPHA), "lora_dropout": ("lora_dropout", LORA_DROPOUT)}


@dataclass
class ModelArguments:
    """Which model to load, in which precision, and which weights to train."""

    _argument_group_name = "model"
    model_name_or_path: str | None = flag(
        None, "Hub id or local directory; without it, the built-in model and sample."
    )
    model_revision: str = flag("main", "Branch, tag or commit of a Hub model.")
    rope_scaling: str | None = flag(
        None,
        "How to scale rotary positions to a --max_length beyond those that the model has; none keeps them.",
        choices=["none", *STRETCHES],
    )
    dtype: str = flag(
        "float32", "Dtype that the weights are loaded in.", choices=["auto", "bfloat16", "float16", "float32"]
    )
    attn_implementation: str | None = flag(None, "sdpa, eager, flash_attention_2, flex_attention, ...")
    experts_implementation: str | None = flag(None, "How experts run: grouped_mm, batched_mm, eager, ...")
    use_kernels: bool = flag(False, "Use the Hub's kernels for the layers that transformers has one for.")
    trust_remote_code: bool = flag(False, "Run code that comes with the model; without it none is run.")
    use_peft: bool = flag(False, "Train LoRA adapters instead of the weights.")
    peft_config: str | None = flag(None, PEFT_CONFIG)
    lora_r: Rank | None = flag(None, f"LoRA rank; {_RANK} when left out.")
    lora_alpha: AtLeastOne | None = flag(None, f"LoRA alpha; {_ALPHA} when left out.")
    lora_dropout: Share | None = flag(None, f"LoRA dropout; {LORA_DROPOUT} when left out, 0 beside fused experts.")
    lora_target_modules: list[str] | None = flag(
        None, "Modules that get an adapter; every linear layer but the head when left out."
    )
    lora_target_parameters: list[str] | None = flag(
        None, "Parameters that get an adapter, such as fused experts: mlp.experts.gate_up_proj mlp.experts.down_proj."
    )
    lora_modules_to_save: list[str] | None = flag(
        None, "Modules that are trained in full beside the adapters, such as lm_head."
    )
    use_dora: bool = flag(False, "DoRA instead of LoRA.")
    load_in_4bit: bool = flag(False, "QLoRA: the frozen weights in 4 bits (bitsandbytes).")
    bnb_4bit_quant_type: str = flag("nf4", "4-bit type.", choices=["fp4", "nf4"])
    use_bnb_nested_quant: bool = flag(False, "Quantise the quantisation constants too.")
    bnb_4bit_quant_storage: str = flag(
        "uint8",
        "Dtype in which 4-bit weights are stored; FSDP2 shards only floating-point ones.",
        choices=["uint8", "bfloat16", "float16", "float32"],
    )

    def __post_init__(self) -> None:
        if self.load_in_4bit and not self.adapts:
            raise UserError("--load_in_4bit: 4-bit weights cannot be trained themselves; add --use_peft for QLoRA")
        if self.lora_target_parameters and self.lora_dropout:
            raise UserError(f"--lora_dropout {self.lora_dropout:g}: adapted parameters have no dropout; give 0")
        if self.use_kernels and not import_utils.is_kernels_available():  # transformers does not know all versions
            raise UserError("--use_kernels needs kernels, which is not installed: pip install 'transformers[kernels]'")
        check_flags(self)
        lora = {name: getattr(self, name) is not None for name in _LORA} | {
            "lora_target_modules": self.lora_target_modules, "use_dora": self.use_dora,
            "lora_target_parameters": self.lora_target_parameters, "lora_modules_to_save": self.lora_modules_to_save,
        }  # fmt: skip
        if not self.adapts and (given := next((name for name, value in lora.items() if value), "")):
            raise UserError(f"--{given} without --use_peft would train all weights: add --use_peft, or leave it out")
        check_peft_flag(self.peft_config, lora)

    @property
    def adapts(self) -> bool:
        return self.use_peft or self.peft_config is not None

    @property
    def lora(self) -> dict[str, Any]:
        """Rank, alpha and dropout, by LoraConfig's names."""
        given = {flag: getattr(self, flag) for flag in _LORA}
        return {name: default if given[flag] is None else given[flag] for flag, (name, default) in _LORA.items()}

    @property
    def source(self) -> dict[str, Any]:
        """Arguments of every `from_pretrained`: the revision, and whether remote code is trusted."""
        return {"revision": self.model_revision, "trust_remote_code": self.trust_remote_code}


@dataclass
class LanguageModelArguments(ModelArguments):
    router_aux_loss_coef: NotNegative | None = flag(
        None, "Weight of the auxiliary loss of a mixture's routers, 0 for none; the model's own when left out."
    )
    ep_size: AtLeastOne = flag(
        1, "Processes that hold different experts; transformers shards the rest of the model over all processes."
    )


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; without a padding token of its own, it pads with its end token."""
    with library_reads(f"model {args.model_name_or_path}: no tokenizer can be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, **args.source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def within_positions(args: ModelArguments, max_length: int, limit: int = 0) -> int:
    """Clamps a default `max_length` to the number of positions that the model was trained on, and warns.

    Longer sequences cause an index error deep in the model. Rotary positions run at any length, but the model has not
    learned them: they need `--rope_scaling`.

    limit: of the model's table of positions, which may be fewer; 0 if it is not known, or has none.
    """
    config = _config(args)
    positions = limit or trained_positions(config)
    scaled = args.rope_scaling is not None and is_rotary(config)
    if not positions or max_length <= positions or scaled:
        return max_length
    if max_length != SEQ_LENGTH:
        fix = "give at most that"
        if is_rotary(config):
            fix += ", or --rope_scaling yarn (linear, dynamic; none trains beyond them as they are)"
        raise UserError(f"--max_length {max_length}: the model has {positions} positions; {fix}")
    logger.warning("--max_length %d is reduced to %d, the positions that the model has", max_length, positions)
    return positions


def _config(args: ModelArguments) -> Any:
    with library_reads(f"model {args.model_name_or_path}: no configuration can be loaded"):
        return AutoConfig.from_pretrained(args.model_name_or_path, **args.source)


def load_model(args: LanguageModelArguments, max_length: int = 0, mixed_precision: str = "no") -> PreTrainedModel:
    """Returns the causal language model in train mode; with adapters its weights are frozen, in 4 bits if requested.

    Args:
        max_length: tokens of the longest sequence, for `--rope_scaling`.
        mixed_precision: of training; a model that transformers shards (`--ep_size`) computes in it.
    """
    more = _divided(args, mixed_precision)
    if args.router_aux_loss_coef is not None:
        config = more["config"] = _config(args)
        set_router_loss(config, args.router_aux_loss_coef, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    model = load_pretrained(args, AutoModelForCausalLM, max_length, **more)
    return with_adapters(model, args, task_type="CAUSAL_LM") if args.adapts else model


def _divided(args: LanguageModelArguments, mixed_precision: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that divide weights over processes, which accelerate leaves to transformers."""
    ep_size = args.ep_size
    tp_size = ParallelismConfig().tp_size  # of the environment that `accelerate launch` sets
    if ep_size == 1:
        return {"distributed_config": DistributedConfig(tp_size=tp_size)} if tp_size > 1 else {}
    if parallel_plans is None:
        raise UserError(f"--ep_size {ep_size}: expert parallelism needs transformers 5.23 or newer")
    if any(os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in ("FSDP", "DEEPSPEED")):
        raise UserError(
            f"--ep_size {ep_size}: accelerate would shard the model again; give accelerate_configs/multi_gpu.yaml"
        )
    if args.adapts:
        raise UserError(f"--ep_size {ep_size} with adapters, which need whole experts: leave one of the two out")
    ranks = PartialState().num_processes
    Launch("fsdp2" if ranks > tp_size else "ddp", ranks, tp=tp_size, ep=ep_size)  # refuses other numbers of processes
    sizes = {"tp_size": tp_size, "fsdp_size": ranks // tp_size, "ep_size": ep_size}
    return {"distributed_config": DistributedConfig(**sizes, fsdp_mixed_precision=mixed_precision == "bf16")}


def load_pretrained(args: ModelArguments, auto: Any, max_length: int = 0, **more: Any) -> PreTrainedModel:
    """Calls `auto.from_pretrained` for the model of `args`, with `more` as additional arguments.

    max_length: tokens of the longest sequence, for `--rope_scaling`.
    """
    assert args.model_name_or_path is not None
    config = more.get("config") or _config(args)
    if auto is AutoModelForCausalLM:
        check_causal(args.model_name_or_path, config)
    kwargs: dict[str, Any] = {**args.source, "dtype": args.dtype, "use_kernels": args.use_kernels, **more}
    if args.rope_scaling is not None:
        kwargs["config"] = config
        stretch_positions(config, args.rope_scaling, max_length)
    chosen = {name: getattr(args, name) for name in ("attn_implementation", "experts_implementation")}
    kwargs |= {name: value for name, value in chosen.items() if value is not None}
    if args.load_in_4bit:
        # Quantised weights are created on this process's device and stay there.
        kwargs |= {"quantization_config": _quantization(args), "device_map": {"": PartialState().device}}
    stated = getattr(config, "quantization_config", None) or {}
    if stated.get("quant_method") == "mxfp4":  # transformers trains nothing over it
        if args.load_in_4bit:
            raise UserError(f"--load_in_4bit: {args.model_name_or_path} is quantised by mxfp4; leave the flag out")
        kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
    file = Path(args.model_name_or_path, "config.json")
    if file.is_file():
        read_config(str(file))  # rejects absurd sizes, which would take forever to build
    with library_reads(f"model {args.model_name_or_path} cannot be loaded"):
        if args.lora_target_parameters:  # before any weight is read
            with torch.device("meta"):
                model = auto.from_config(config, trust_remote_code=args.trust_remote_code)
            check_target_parameters(model, args.lora_target_parameters)
        return auto.from_pretrained(args.model_name_or_path, **kwargs)


def with_adapters(model: PreTrainedModel, args: ModelArguments, **more: Any) -> PreTrainedModel:
    """Freezes `model` and adds LoRA adapters or those of a PEFT configuration; `more` goes to `adapter_config`."""
    config = adapter_config(args, **more)
    if args.peft_config is None and args.lora_dropout is None and fused_experts(model):
        config.lora_dropout = 0.0  # PEFT adapts parameters without dropout
    named = args.lora_target_modules or getattr(config, "target_modules", None) or ["(none given)"]
    named = [named] if isinstance(named, str) else sorted(named)
    file = f"--peft_config {args.peft_config}" if args.peft_config else ""
    with library_reads(file or f"--lora_target_modules {' '.join(named)}"):
        adapted = get_peft_model(model, config)
    sort_names(config)
    return adapted


def sort_names(config: PeftConfig) -> None:
    """Sorts the sets in the configuration of adapters that are in place: another process saves the same bytes."""
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, name, sorted(value))


def adapter_config(
    args: ModelArguments, targets: Targets | None = None, modules_to_save: Sequence[str] = (), **task: str
) -> PeftConfig:
    """Returns the PEFT configuration: from LoRA's flags, or from the file; other arguments as for `adapter_of`."""
    if args.peft_config is not None:
        return adapter_of(args.peft_config, targets, modules_to_save, **task)
    given = args.lora_target_modules
    found = targets(given) if targets else given or ["all-linear"]
    return LoraConfig(
        **args.lora,
        target_modules=found[0] if found == ["all-linear"] else found,
        target_parameters=args.lora_target_parameters,
        use_dora=args.use_dora,
        modules_to_save=[*(args.lora_modules_to_save or ()), *modules_to_save] or None,
        **task,
    )


def _quantization(args: ModelArguments) -> Any:
    require_package("bitsandbytes", "--load_in_4bit")
    compute = torch.bfloat16 if args.dtype in ("auto", "float32") else getattr(torch, args.dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=args.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=args.bnb_4bit_quant_storage,
    )


# Maps requested module names (None for the default) to the target modules, as PEFT expects them.
Targets = Callable[[Any], Any]
_BY_DATA = ("corda", "eva", "loftq", "lora_ga")  # LoRA initialisations that need data or another package


def check_peft_flag(path: str | None, beside: Mapping[str, object]) -> None:
    """Validates the flag before anything is loaded; `beside` has LoRA's own flags by name."""
    if path is None:
        return
    given = [f"--{name}" for name, value in beside.items() if value]
    if given:
        raise UserError(
            f"--peft_config {path} and {' and '.join(given)} describe two different adapters: give one or the other"
        )
    source = f"--peft_config {path}"
    content = read_peft(path, source)
    if content["peft_type"] == "ADALORA":
        raise UserError(
            f"{source}: ADALORA sets its ranks between steps by scores that no checkpoint has; give LORA, "
            "with a rank_pattern for ranks that differ"
        )
    first = content.get("init_lora_weights")
    if first in _BY_DATA:
        raise UserError(
            f"{source}: init_lora_weights '{first}' is computed before training, from data or by another "
            "package, which no recipe does; give true, gaussian, orthogonal, olora or pissa"
        )
    configuration(content, source)


def adapter_of(
    path: str, targets: Targets | None = None, modules_to_save: Sequence[str] = (), **task: str
) -> PeftConfig:
    """Returns the configuration in `path`.

    Args:
        targets: maps the file's target modules to those of the model.
        modules_to_save: modules that are trained in full, in addition to those in the file.
        task: the recipe's fields (`task_type`), which override the file's.
    """
    source = f"--peft_config {path}"
    content = read_peft(path, source)
    content |= {key: value for key, value in task.items() if takes(content, key, source)}
    if targets is not None and takes(content, "target_modules", source):
        content["target_modules"] = targets(content.get("target_modules"))
    if modules_to_save:
        if not takes(content, "modules_to_save", source):
            raise UserError(
                f"{source}: {content['peft_type']} cannot train other modules, and {modules_to_save[0]} must be "
                "trained; give a kind that has modules_to_save, LORA for example"
            )
        content["modules_to_save"] = sorted({*(content.get("modules_to_save") or ()), *modules_to_save})
    config = configuration(content, source)
    if not task and (config.is_prompt_learning or config.is_adaption_prompt):
        raise UserError(
            f"{source}: {content['peft_type']} is for the language models of recipes/llm.py and recipes/dpo.py; give "
            "a kind that adapts modules, LORA or LOKR for example"
        )
    return config


def kind_of(path: str | None) -> str | None:
    return None if path is None else str(read_peft(path, f"--peft_config {path}")["peft_type"])
