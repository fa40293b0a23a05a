"""Reads the training that a file describes: a recipe's, TRL's, axolotl's, LLaMA-Factory's or diffusers' scripts'.

`settings.read_settings` looks up every entry in the table of settings, which names what is left out of the answer and
refuses what would make it another run's. The others are converted to values of our flags, as if they had been typed;
command-line flags override them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.spec.launch import SIZES, beside
from ckpt_ft.validation import load_entries

from .defaults import LORA_R, ONLINE
from .optimizers import OFFLOADING, OPTIMIZERS
from .settings import KINDS, TYPED, leave_out, lines_of, read_settings, table
from .training_spec import declared

# Files of TRL's scripts, and the trainer of each.
TRL = {
    "trl": "sft", "dpo": "dpo", "orpo": "dpo", "cpo": "dpo", "simpo": "dpo", "kto": "kto", "reward": "reward",
    "grpo": "grpo", "rloo": "rloo",
}  # fmt: skip
RECIPES = tuple(KINDS)
# Entries that name the model, those of libraries first; people's own scripts have the others.
MODELS = ("model_name_or_path", "pretrained_model_name_or_path", "base_model", "model", "model_id", "model_name")
# Entries that are true or false; axolotl writes some as words.
_SWITCHES = (
    "bf16", "fp16", "packing", "ema", "use_peft", "load_in_4bit", "load_in_8bit", "dora", "double_quant", "tf32",
    "quantize_moe_experts",
    "torch_compile", "fp8",
    "use_8bit_adam", "use_muon", "use_adam_mini", "use_galore", "use_apollo",
    "layerwise", "checkpointing", "no_checkpointing", "pure_bf16", "pure_fp16",
    "train_text_encoder", "liger",
    "cut_cross_entropy", "liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation",
    "liger_cross_entropy", "liger_fused_linear_cross_entropy",
)  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Defaults of each kind of file, for entries that it leaves out.
_TEXT = {"batch_size": 8, "eval_batch_size": 8}
_LLAMA = {
    "checkpointing": True, "seq_length": 2048, "lora_r": 8, "lora_dropout": 0.0, "double_quant": True,
    "finetuning_type": "lora", "dtype": "auto", "freeze_trainable_layers": 2, "oft_block_size": 32,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llm": _TEXT,
    "vlm": {**_TEXT, "seq_length": 2048, "train_towers": "language"},
    **dict.fromkeys(("text", "image_classification"), _TEXT),
    **{kind: {**_TEXT, "bf16": True, "checkpointing": True} for kind in TRL},
    "axolotl": {"batch_size": 1, "bf16": True, "lora_dropout": 0.0, "seq_length": 512},
    "llama_factory": {**_LLAMA, **_TEXT, "train_towers": "language"},
    "llama_factory_v1": {**_LLAMA, "batch_size": 1, "bf16": True, "finetuning_type": "full"},
    "diffusion_unet": {"batch_size": 16},
    "diffusion_transformer": {"batch_size": 16},
    "typed": {"eval_batch_size": 8},
    "diffusers": {"batch_size": 4, "optimizer": "adamw", "cache_latents": False},
}  # fmt: skip
# Flags that a file sets by the same value.
_PLAIN = (
    "accumulation", "rope_scaling", "aspect_ratio_buckets", "image_size",
    "max_pixels", "longest_side", "train_towers", "audio_seconds", "max_grad_norm", "ema", "budget",
    "router_aux_loss_coef", "peft_config", "task",
)  # fmt: skip
_OF_IMAGES = {"train_towers", "max_pixels", "longest_side", "image_column", "image_folder", "image_size", "images"}
_LLAMA_FACTORY = {"finetuning_type", "stage", "cutoff_len", "template", "quantization_bit"}
_LLAMA_FACTORY_V1 = {
    "model_class", "train_dataset", "dist_config", "kernel_config", "micro_batch_size", "peft_config", "quant_config",
}  # fmt: skip
# Steps of axolotl and LLaMA-Factory -> the trainer of TRL, settings of it, and what the answer leaves out.
_WITHOUT_REFERENCE = (
    "dpo", {"precompute_ref_log_probs": True}, "answered as DPO without a reference: the loss keeps other numbers"
)  # fmt: skip
_STEPS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sft": ("", {}, ""),
    "pt": ("", {}, ""),
    "dpo": ("dpo", {}, ""),
    "ipo": ("dpo", {"loss_type": "ipo"}, ""),
    **dict.fromkeys(("orpo", "simpo", "cpo"), _WITHOUT_REFERENCE),
    "kto": ("kto", {}, ""),
    "rm": ("reward", {}, "a classifier is answered: LLaMA-Factory's value head also computes the vocabulary's logits"),
    "grpo": ("grpo", {}, ""),
    "gdpo": ("grpo", {}, "answered as GRPO: rewards are scaled one by one, which takes no memory"),
    "ebft": (
        "grpo",
        {},
        "answered as GRPO: without adapters a frozen copy of the model, which makes its features, comes on top",
    ),
    "ppo": ("rloo", {}, "answered as RLOO: the value head and the weights of the reward model come on top"),
}
_PROMPT, _COMPLETION = 512, 256  # tokens in TRL's rollouts if a file gives one of them
# Entries that only one kind of TRL's files has, most particular first.
_MARKS = {
    "grpo": {"num_generations", "max_completion_length", "reward_funcs", "steps_per_generation", "use_vllm"},
    "cpo": {"cpo_alpha", "simpo_gamma", "gamma_beta_ratio"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"beta", "precompute_ref_log_probs", "ref_model", "sync_ref_model"},
}
_PLUGINS = {
    "axolotl.integrations.liger.LigerPlugin": "liger",
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin": "cut",
}
_LIGER = {  # axolotl's switches, and the kernels of Liger that each turns on
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_layer_norm": ("layer_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
    "liger_cross_entropy": ("cross_entropy",),
    "liger_fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
}
_BOOLEANS: dict[Any, bool | None] = {
    None: None, True: True, False: False, "auto": True, "full": True, "yes": True, "offload": True
}  # fmt: skip


@dataclass(frozen=True)
class TrainingFile:
    """The content of a training file.

    Attributes:
        flags: values by the names of our flags.
        notes: how ambiguous entries were interpreted, one sentence each.
        left_out: entries that the flags do not say, with what each would move.
    """

    model: str
    flags: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def read_training_file(
    path: str, recipe: str = "", rows: bool = False, length: Any = None, strict: bool = False,
    content: Mapping[str, Any] | None = None, images: bool = False,
) -> TrainingFile:  # fmt: skip
    """Read the training that the YAML or JSON file `path` describes.

    Args:
        recipe: the kind of file, one of `RECIPES`; "" to detect it from the entries.
        rows: whether rows of a dataset are read, which have lengths and images of their own.
        length: the number of tokens that the command line gives; None without one.
        strict: refuse what is not modelled.
        content: the file's entries, if they have been read.
        images: whether the command line says that rows have images.

    Raises:
        UserError: the file cannot be read, names no model, or has settings that are refused.
    """
    content = read_yaml(path) if content is None else content
    kind = recipe or _kind(content, path)
    if kind not in RECIPES:
        raise UserError(f"--recipe {kind}: no such kind of file ({', '.join(RECIPES)})")
    left_out: dict[str, str] | None = None if strict else {}
    entries = _Entries(read_settings(content, KINDS[kind], f"--config {path}", left_out), kind, path, left_out)
    entries.given["model"] = next((content[one] for one in MODELS if isinstance(content.get(one), str)), None)
    if not entries.get("model"):
        raise UserError(f"--config {path}: it names no model ({', '.join(MODELS)})")
    if kind in TRL and content.get("max_length", 0) is None and not (rows or length):
        raise entries.refuse("max_length: null: rows are not cut, and their length is not known: give --seq-length")
    flags = entries.flags()
    if images:
        left_out = {name: why for name, why in (left_out or {}).items() if not why.startswith("rows of text are")}
        flags["max_pixels"] = flags["max_pixels"] or content.get("image_max_pixels")
    if kind == "vlm" and not rows:
        flags["images"] = entries.get("images") or 1
    if not recipe and (kind != "llm" or not any(key.startswith("ac_") for key in content)):
        entries.notes.append(f"{path} is read with the defaults of {_NAMES.get(kind, kind)}; --recipe names others")
    if kind in _POLICY_BY:
        entries.notes.append(f"a run of this file takes a policy by {_POLICY_BY[kind]} (docs/integrations.md)")
    stated = {name: value for name, value in flags.items() if value is not None and value is not False and value != ""}
    return TrainingFile(str(entries.get("model")), stated, tuple(entries.notes), lines_of(left_out or {}))


def read_typed(
    content: Mapping[str, str | bool], batch_size: str, left_out: dict[str, str] | None = None
) -> dict[str, Any]:
    """Returns the flags, and the "model", that other libraries' settings set when they are typed on our command line.

    Args:
        content: the settings and their words; True for a setting without a word.
        batch_size: the micro-batch that the command line gives; "" if it does not.
        left_out: takes the settings that are not modelled; None refuses them.

    Raises:
        UserError: a setting is refused.
    """
    given = {name: int(value) if str(value).isdecimal() else value for name, value in content.items()}
    entries = _Entries(read_settings(given, TYPED, "the command line", left_out), "typed", "", left_out)
    entries.given["batch_size"] = int(batch_size) if batch_size.isdecimal() else 1
    shared = next((name for name in ("fsdp", "fsdp_config", "deepspeed") if entries.get(name)), "")
    if shared:
        raise UserError(f"--{shared}: give --launch fsdp2, zero2 or zero3 with --processes, or a file of accelerate")
    found = {"model": entries.get("model"), **entries.flags()}
    dropped = {"batch_size"} | ({"optimizer"} - entries.given.keys())
    return {n: v for n, v in found.items() if n not in dropped and (v or (v == 0 and v is not False))}


_NAMES = {
    "llm": "recipes/llm.py",
    "trl": "TRL's SFTTrainer",
    **{kind: f"TRL's {kind.upper()} trainer" for kind in TRL if kind != "trl"},
    "llama_factory": "LLaMA-Factory",
    "llama_factory_v1": "LLaMA-Factory v1",
    "diffusers": "diffusers' scripts",
}
_POLICY_BY = {  # how the runs of other libraries get one
    "axolotl": "plugins: [ckpt_ft.integrations.axolotl.Plugin] and ac_policy",
    **dict.fromkeys(TRL, "ACCallback(policy).attach(trainer)"),
    "llama_factory": "run_exp(args, callbacks=[ACCallback(policy)])",
    "diffusers": "apply_policy(unet or transformer, policy)",
}


def read_yaml(path: str) -> dict[str, Any]:
    """Returns the entries of a `--config` file.

    Raises:
        UserError: it cannot be read, or has no 'flag: value' lines.
    """
    return load_entries(path, f"--config {path}", "'flag: value' lines")


@dataclass
class _Entries:
    """The modelled entries of a file, by their targets in the table of settings."""

    given: dict[str, Any]
    kind: str
    path: str
    left_out: dict[str, str] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def diffusion(self) -> bool:
        return self.kind.startswith("diffus")

    def get(self, name: str) -> Any:
        """Returns the entry for `name`, else the default of this kind of file, else None."""
        value = self.given.get(name)
        value = _boolean(name, value) if name in _SWITCHES else value
        return _DEFAULTS[self.kind].get(name) if value is None else value

    def refuse(self, why: str) -> UserError:
        return UserError(f"--config {self.path}: {why}" if self.path else why)

    def leave_out(self, name: str, why: str) -> None:
        """Note that the answer is without a setting. Raises UserError if nothing is to be left out."""
        leave_out(self.left_out, name, why, f"--config {self.path}: " if self.path else "")

    def flags(self) -> dict[str, Any]:
        """Returns the values of our flags."""
        kernels = self._kernels()
        precision = self._precision(bool(kernels["cut_cross_entropy"]))
        half = precision["bf16"] or precision["fp16"] or precision["mixed_precision"] in _DTYPES
        if self.get("tf32") and not half and precision["dtype"] not in _DTYPES.values():
            self.leave_out("tf32", "seconds are predicted for matrix products of full float32: fewer")
        return {
            **{name: self.get(name) for name in _PLAIN},
            **{name: self._known(name) for name in ("attn_implementation", "experts_implementation")},
            **self._rows(),
            **self._batch(),
            "resolution": self.get("resolution") or self._side(),
            "train_text_encoder": self.diffusion and self.get("train_text_encoder"),
            "encode_each_step": self.diffusion and self._encodes_each_step(),
            **precision,
            "optimizer": self._optimizer(),
            **self._projected(),
            **self._adapter(),
            **self._launch(),
            **self._sizes(),
            **self._trainer(),
            **self._evaluation(),
            **kernels,
            **({"task": "token-classification"} if self.get("process_reward_model") else {}),
            "num_labels": self.get("num_labels") if self.get("process_reward_model") else None,
            "policy": self._policy(),
            "device": "cpu" if self.get("use_cpu") else None,
        }

    def _known(self, name: str) -> Any:
        """An entry that chooses among values; None for a value that is not among those that are predicted."""
        value = self.get(name)
        if value not in (None, *declared()[name].choices):
            self.leave_out(f"{name} {value}", "the model's own choice is predicted: other kernels keep other tensors")
            return None
        return value

    def _rows(self) -> dict[str, Any]:
        """Tokens of a row, and whether rows are packed, which those of TRL's other trainers are not."""
        length, given = self.get("seq_length"), self.get("trainer_args") or {}
        prompt, completion = self.get("max_prompt_length"), given.get("max_completion_length")
        if TRL.get(self.kind) in ONLINE and not length and (prompt or completion):
            length = (prompt or _PROMPT) + (completion or _COMPLETION)
        return {"seq_length": length, "packing": self.get("packing") and self._step()[0] in ("", "sft")}

    def _step(self) -> tuple[str, dict[str, Any], str]:
        """The trainer of TRL whose step is predicted, settings of it, and what the answer then leaves out."""
        if self.kind in TRL:
            return _STEPS[self.kind] if self.kind in _STEPS else (TRL[self.kind], {}, "")
        named = str(self.get("rl") or self.get("stage") or ("rm" if self.get("reward_model") else "sft")).lower()
        loss = str(self.get("pref_loss"))
        if named not in _STEPS or (named == "rm" and self.kind == "typed"):
            raise self.refuse(f"{named}: it is another algorithm than those that are predicted ({', '.join(_STEPS)})")
        trainer, given, why = _STEPS[loss if loss in _STEPS and "llama" in self.kind else named]
        return trainer, given, "" if named == "rm" and "llama" not in self.kind else why

    def _kernels(self) -> dict[str, Any]:
        """Fused kernels. axolotl's plugin of Liger applies those that the file turns on, that of the loss its one."""
        chosen, plugins = self.get("liger_kernel_config"), self.get("plugins") or []
        liger, cut = self.get("liger"), self.get("cut_cross_entropy")
        for plugin in plugins if isinstance(plugins, list) else [plugins]:
            if plugin not in _PLUGINS:
                self.leave_out(f"plugins {str(plugin).rpartition('.')[2]}", "a plugin may replace layers or the loss")
        if self.kind == "axolotl":
            loaded = {_PLUGINS.get(plugin) for plugin in plugins}
            on = {kernel: bool(self.get(name)) for name, kernels in _LIGER.items() for kernel in kernels}
            liger, chosen, cut = "liger" in loaded and any(on.values()), on, "cut" in loaded and cut is not False
        text = chosen if isinstance(chosen, str) else json.dumps(chosen, sort_keys=True) if chosen else ""
        fused = liger or cut or self.get("load_in_8bit")
        compiled = self.get("torch_compile")
        if compiled and fused and self.kind != "typed":
            self.leave_out(
                "torch_compile", "predicted as it runs without: compiled code keeps less, and takes less time"
            )
            compiled = False
        return {
            "liger": liger,
            "liger_kernel_config": text if liger else "",
            "cut_cross_entropy": cut,
            "torch_compile": compiled,
        }

    def _batch(self) -> dict[str, Any]:
        """The micro-batch; prior preservation doubles it: an image comes with its class."""
        samples = self.get("batch_size")
        if self.diffusion and self.get("with_prior_preservation") and isinstance(samples, int):
            self.notes.append(f"with_prior_preservation: a batch of {samples} is {2 * samples} images")
            samples *= 2
        return {"batch_size": samples}

    def _side(self) -> int | None:
        """The side of an image in diffusers' scripts, which have defaults of their own, and not the model's."""
        return (1024 if "xl" in str(self.get("model")).lower() else 512) if self.kind == "diffusers" else None

    def _policy(self) -> str:
        policy, every = self.get("policy"), self.get("every_n_layers")
        if policy and policy != "auto":
            return str(policy)
        inner = {str(key).removeprefix("fsdp_"): value for key, value in self._fsdp_options().items()}
        own = self.get("checkpointing") and not self.get("no_checkpointing")
        terms = {
            f"every:{every}" if every and every != 1 else "full": own or inner.get("activation_checkpointing"),
            "offload": self.get("activation_offloading") or self.given.get("checkpointing") == "offload",
            "tile": self.get("tiled_mlp"),
        }
        return ",".join(term for term, asked in terms.items() if asked)

    def _fsdp_options(self) -> dict[str, Any]:
        options = self.get("fsdp_config") or {}
        options = options if isinstance(options, Mapping) else read_yaml(str(options))
        return {**options, **(self.get("fsdp_options") or {})}

    def _encodes_each_step(self) -> bool:
        """Whether each step encodes images and prompts: because of a setting, or because of random augmentation."""
        if self.kind == "diffusers":
            return not self.get("cache_latents")
        return False in (self.get("cache_latents"), self.get("center_crop")) or bool(self.get("random_flip"))

    def _precision(self, cut_cross_entropy: bool) -> dict[str, Any]:
        dtype, bf16, fp16, mixed = (self.get(name) for name in ("dtype", "bf16", "fp16", "mixed_precision"))
        if "fp16" in self.given and fp16 and "bf16" not in self.given:
            bf16 = False
        ends, trained = "", False
        if self.diffusion and (self.get("lora_r") or self.get("peft_config")) and mixed in _DTYPES:
            dtype = mixed  # the dtype of frozen weights in the recipes
        if self.kind == "axolotl":
            pure = "bfloat16" if self.get("pure_bf16") else "float16" if self.get("pure_fp16") else ""
            dtype = pure or ("bfloat16" if bf16 else "float16" if fp16 or self.get("load_in_8bit") else "float32")
            bf16, fp16 = (bf16 and not pure and self.given.get("bf16") != "full"), fp16 and not pure
            # Flash and flex attention, adapters, FSDP and the fused loss need the dtype of the other weights.
            plain = self.get("attn_implementation") in ("sdpa", "eager", None) and not cut_cross_entropy
            if self._is_prepared():
                ends = dtype
            elif plain and dtype != "float32" and not any(map(self.get, ("adapter", "fsdp", "fsdp_config"))):
                ends = "float32"
        if "llama" in self.kind and not self.given.get("dtype"):
            dtype = "bfloat16" if bf16 or self.get("pure_bf16") else "float16" if fp16 else "auto"
            # Trained weights are cast to float32, except by pure_bf16.
            trained = dtype != "auto" and not any((self._adapted(), self.get("pure_bf16")))
        if self.get("fp8") and (self._adapted() or self.get("deepspeed")):
            self.leave_out("fp8", "predicted in bf16: products in 8 bits take less time")
        elif self.get("fp8"):  # accelerate's mixed precision, in place of bf16
            bf16, mixed = False, "fp8"
        return {
            "dtype": _DTYPES.get(dtype, dtype) if dtype else None,
            "bf16": bool(bf16) and not fp16,
            "fp16": bool(fp16),
            "mixed_precision": mixed,
            "ends_dtype": ends,
            "float32_trained": trained,
        }

    def _optimizer(self) -> str:
        if away := self.get("offload_optimizer"):
            return OFFLOADING.get(str(away), str(away))
        switches = {"use_8bit_adam": "adamw_8bit", "use_muon": "muon", "use_adam_mini": "adam_mini"}
        if chosen := next((name for switch, name in switches.items() if self.get(switch)), ""):
            return OPTIMIZERS[chosen]
        named = str(self.get("optimizer") or "adamw_torch_fused").lower()
        if projected := next((name for name in ("galore", "apollo") if self.get(f"use_{name}")), ""):
            eight = "_8bit" if "8bit" in named and projected == "galore" else ""
            named = f"{projected}_adamw{eight}{'_layerwise' if self.get('layerwise') else ''}"
        if named in OPTIMIZERS:
            return OPTIMIZERS[named]
        if not self._adapted():
            raise self.refuse(
                f"optimizer {named} is not modelled{did_you_mean(named, OPTIMIZERS)} (docs/settings.md lists them)"
            )
        self.leave_out(f"optimizer {named}", "the adapters' states are predicted as AdamW's")
        return "adamw_fused"

    def _projected(self) -> dict[str, Any]:
        """The linear layers whose gradients GaLore or APOLLO projects, and to which rank."""
        name = next((name for name in ("galore", "apollo") if self.get(f"use_{name}")), "")
        targets = _joined(self.get(f"{name}_target") if name else self.get("optim_target_modules"))
        if name and targets in ("", "all"):
            targets = "(?!.*lm_head).*"
        return {"optim_target_modules": targets, "optim_rank": (self.get(f"{name}_rank") or 16) if name else None}

    def _adapted(self) -> bool:
        """Whether the file asks for adapters."""
        kind, adapter = self.get("finetuning_type"), self.get("adapter")
        if self.kind == "axolotl" and adapter not in (None, False, "lora", "qlora"):
            raise self.refuse(f"adapter {adapter} is not modelled (lora, qlora)")
        if kind not in (None, "lora", "full", "freeze", "oft"):
            raise self.refuse(f"finetuning_type {kind} is not modelled (lora, full, freeze, oft)")
        named = adapter or self.get("use_peft") or self.get("peft_config") or kind in ("lora", "oft")
        # people's own scripts have no switch for LoRA
        return bool(
            named or self.diffusion or (self.kind in TRL and "use_peft" not in self.given and self.get("lora_r"))
        )

    def _is_prepared(self) -> bool:
        """Whether PEFT's k-bit preparation casts what is not packed to float32, and axolotl the ends back."""
        if self.kind != "axolotl" or any(map(self.get, ("fsdp", "fsdp_config", "deepspeed", "quantize_moe_experts"))):
            return False
        return self.get("adapter") == "qlora" or bool(self.get("adapter") and self.get("load_in_8bit"))

    def _frozen(self) -> str:
        """What is not trained: the part names of `--freeze`, where a ! means all but what it names."""
        if self.get("finetuning_type") == "freeze":
            count = int(self.get("freeze_trainable_layers") or 0)
            return f"!last:{count}" if count > 0 else f"!first:{-count}"
        names = self.get("trained") or []
        names = names if isinstance(names, list) else [names]
        whole = [re.sub(r"\[\d*:\d*\]$", "", str(name)).replace(",", ".") for name in names]
        return "!" + "|".join(whole) if whole else str(self.get("freeze") or "")

    def _adapter(self) -> dict[str, Any]:
        bits = str(self.get("quantization_bit"))
        four = self.get("load_in_4bit") or bits == "4" or self.get("adapter") == "qlora"
        eight = (self.get("load_in_8bit") or bits == "8") and not four
        found: dict[str, Any] = {
            "freeze": self._frozen(),
            "load_in_4bit": four,
            "load_in_8bit": eight,
            "prepare_kbit": self._is_prepared(),
            "quantize_moe_experts": bool(four) and self.get("quantize_moe_experts"),
            "double_quant": bool(four) and (self.get("double_quant") or self.kind == "axolotl"),
            "quant_storage": self.get("quant_storage") if four else None,
        }
        if not self._adapted() or self.get("peft_config"):
            return found
        if self.kind == "axolotl" and not self._step()[0] and not eight and self.get("fused_lora") is None:
            self.notes.append(
                "axolotl fuses LoRA's layers unless lora_mlp_kernel, lora_qkv_kernel and lora_o_kernel are false: "
                "fewer tensors are kept than predicted"
            )
        targets = [target.strip() for target in _joined(self.get("lora_targets")).split(",") if target]
        if targets in (["all"], ["all-linear"]) or self.get("lora_target_linear"):
            targets = ["all-linear"] if self._step()[0] else []  # PEFT chooses for TRL's trainers if none is named
        elif self.kind == "axolotl" and not targets and self.get("lora_target_parameters"):
            targets = ["none"]
        if self.get("finetuning_type") == "oft":
            size = {"oft_block_size": self.get("oft_block_size"), "target_modules": targets or "all-linear"}
            return found | {"peft_config": json.dumps({"peft_type": "OFT", **size})}
        return found | {
            "lora_r": self.get("lora_r") or (None if self.diffusion else LORA_R),
            "lora_targets": ",".join(targets),
            "lora_modules_to_save": _joined(self.get("lora_modules_to_save")),
            "lora_target_parameters": _joined(self.get("lora_target_parameters")),
            "lora_dropout": self.get("lora_dropout"),
            "dora": self.get("dora"),
        }

    def _evaluation(self) -> dict[str, Any]:
        """The batch that is evaluated between steps, if the file asks for it; YAML reads a bare `no` as false."""
        if self.get("evaluation") in (None, False, "no") or self.diffusion:
            return {}
        usual = self.get("batch_size") if self.kind == "axolotl" else 8  # of TrainingArguments
        batch, steps = self.get("eval_batch_size"), self.get("eval_accumulation_steps")
        return {"eval_batch_size": batch or usual, "eval_accumulation_steps": steps}

    def _trainer(self) -> dict[str, Any]:
        """TRL's trainer, and the fields of its configuration that the file sets."""
        trainer, more, why = self._step()
        if why:
            self.leave_out(next((name for name in ("rl", "pref_loss", "stage") if self.get(name)), self.kind), why)
        given = {**(self.get("trainer_args") or {}), **more} if trainer else {}
        return {
            "trainer": trainer,
            "trainer_args": json.dumps(given, sort_keys=True) if given else "",
            "float32_logits": self.kind == "llama_factory" and trainer in ("dpo", "kto"),
        }

    def _sizes(self) -> dict[str, Any]:
        """The sizes of context, tensor and sequence parallelism, and the number of processes if all are known."""
        given = {name: str(self.get(name) or 1) for name in (*SIZES, "ep")}
        found = {name: int(size) for name, size in given.items() if size.isdecimal() and int(size) > 1}
        if self.kind == "axolotl" and "cp" in found:
            if self.get("deepspeed"):
                found["sp"] = found.pop("cp")
            how = "DeepSpeed's Ulysses" if "sp" in found else "torch's ring attention over sdpa"
            self.notes.append(f"context_parallel_size: {how} is predicted for axolotl's")
        shard = self.get("dp_shard")
        return {**found, "processes": prod([*found.values(), int(shard)])} if shard and int(shard) > 1 else found

    def _launch(self) -> dict[str, Any]:
        """The launch, as accelerate's configuration has it; the number of processes is that of the command line."""
        sharded, deepspeed = self.get("fsdp"), self.get("deepspeed")
        if deepspeed:
            file = {"deepspeed_config_file": beside(deepspeed, self.path)}
            return {"launch": {"distributed_type": "DEEPSPEED", "deepspeed_config": file}}
        options: dict[str, Any] = self._fsdp_options()
        if not sharded and not (options and self.kind == "axolotl"):
            return {}
        words = sharded.split() if isinstance(sharded, str) else sharded if isinstance(sharded, list) else []
        if "offload" in map(str, words):
            options = {"offload_params": True, **options}
        plain = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in options.items()}
        plain.pop("fsdp_activation_checkpointing", None)  # the policy says it
        usual = {"fsdp_version": self.get("fsdp_version") or (1 if self.kind == "axolotl" else 2)}
        gather = {"enable_fsdp_float8_all_gather": bool(self.get("float8_gather"))} if self.get("fp8") else {}
        return {"launch": {"distributed_type": "FSDP", "fsdp_config": {**usual, **plain}, "fp8_config": gather}}


def _joined(names: Any) -> str:
    return ",".join(map(str, names)) if isinstance(names, list) else str(names or "")


def _boolean(name: str, value: Any) -> bool | None:
    if not isinstance(value, (bool, str, int, type(None))) or value not in _BOOLEANS:
        raise UserError(f"{name}: {str(value)[:40]!r} is neither true nor false")
    return _BOOLEANS[value]


def _kind(content: Mapping[str, Any], path: str) -> str:
    """The kind of a file, by the entries that only one kind has; of losses of pairs, the path names one."""
    keys = content.keys()
    own = any(key.startswith("ac_") for key in keys)
    marks: dict[str, Any] = {
        "axolotl": "base_model" in keys and ("per_device_train_batch_size" not in keys or "micro_batch_size" in keys),
        "llama_factory_v1": "model" in keys and keys & _LLAMA_FACTORY_V1,
        "diffusion_unet" if own else "diffusers": "pretrained_model_name_or_path" in keys,
        "vlm": _OF_IMAGES & keys,
        **{kind: marks & keys for kind, marks in _MARKS.items()},
        "llm": own and "beta" not in keys,
        "llama_factory": _LLAMA_FACTORY & keys,
        "trl": keys & {name for part in ("trl.sft", "trl", "trl.model") for name in table()[part]} - {*MODELS}
        or any(key.startswith(("dataset", "chat_template")) for key in keys),
    }
    found = next((kind for kind, found in marks.items() if found), "llm")
    named = re.findall(r"(?<![a-z])(dpo|orpo|cpo|simpo|kto)(?![a-z])", path.lower())
    return named[-1] if found == "dpo" and named else found
