"""Reads the training that a YAML file describes: a recipe's own, TRL's, axolotl's, or one of diffusers' scripts.

The file is converted to values of our flags, as if they had been typed; flags of the command line win over them.
`ecosystem.TABLE` maps its entries to our flags. Entries that are unknown, or affect neither memory nor time, are
ignored and listed in `unread`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.reading import load_yaml

from .defaults import LORA_R
from .ecosystem import OPTIMIZERS, PAGED, TABLE, Modelled, names_of

# Files of TRL's scripts, and the trainer of each.
TRL = {"trl": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward", "grpo": "grpo", "rloo": "rloo"}
RECIPES = ("llm", "vlm", "image_classification", "diffusion_unet", "diffusion_transformer", *TRL, "axolotl")
MODELS = ("model_name_or_path", "pretrained_model_name_or_path", "base_model")  # entries that name the model
# Entries that are true or false; axolotl writes some as words.
_SWITCHES = {
    "bf16", "fp16", "packing", "ema", "use_peft", "load_in_4bit", "load_in_8bit", "dora", "double_quant",
    "gradient_checkpointing", "activation_checkpointing",
    "use_8bit_adam", "flash_attention", "flex_attention", "sdp_attention", "eager_attention",
}  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "auto": "bfloat16"}  # auto: the dtype of most checkpoints
# Defaults of each kind of file, for entries that it leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llm": {"batch_size": 8},
    "vlm": {"batch_size": 8, "seq_length": 2048, "train_towers": "language"},
    "image_classification": {"batch_size": 8},
    **{kind: {"batch_size": 8, "bf16": True, "gradient_checkpointing": True} for kind in TRL},
    "axolotl": {"batch_size": 1},
    "diffusion_unet": {"batch_size": 16},
    "diffusion_transformer": {"batch_size": 16},
}
# Flags that every kind of file sets by the same name, or by one of the flag's other names.
_PLAIN = (
    "accumulation", "seq_length", "packing", "resolution", "aspect_ratio_buckets", "image_size", "max_pixels",
    "longest_side", "train_towers", "audio_seconds", "max_grad_norm", "ema", "budget", "mixed_precision",
)  # fmt: skip
# Fields of TRL's configurations that decide what a step allocates, besides those that are flags of ours.
_TRAINER_ARGS = (
    "packing_strategy", "padding_free", "pad_to_multiple_of", "loss_type", "label_smoothing_factor",
    "router_aux_loss_coef", "beta", "precompute_ref_log_probs", "loss_weights", "ld_alpha", "f_divergence_type",
    "label_smoothing", "use_weighting", "disable_dropout", "center_rewards_coefficient", "num_generations",
    "max_completion_length", "steps_per_generation", "generation_batch_size", "num_iterations", "temperature", "top_p",
    "top_k", "cast_lm_head_to_fp32", "importance_sampling_level", "top_entropy_quantile", "entropy_coef",
)  # fmt: skip
# Entries that only one kind of TRL's files has, most particular first.
_MARKS = {
    "grpo": {"num_generations", "max_completion_length", "reward_funcs", "steps_per_generation"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"beta", "precompute_ref_log_probs", "ref_model", "sync_ref_model"},
    "trl": {"packing_strategy", "padding_free", "completion_only_loss", "assistant_only_loss", "max_seq_length"},
}
_OF_IMAGES = {"train_towers", "max_pixels", "longest_side", "image_column", "image_folder", "image_size", "images"}
_BOOLEANS: dict[Any, bool | None] = {
    None: None, True: True, False: False, "true": True, "false": False,
    "auto": True,  # axolotl's bf16
}  # fmt: skip


@dataclass(frozen=True)
class TrainingFile:
    """The content of a training file.

    Attributes:
        model: the model it names.
        flags: values by the names of our flags.
        unread: entries that set nothing.
        notes: how ambiguous entries were interpreted, one sentence each.
    """

    model: str
    flags: Mapping[str, Any]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_training_file(path: str, recipe: str = "", rows_have_images: bool = False) -> TrainingFile:
    """Read the training that the YAML file `path` describes.

    Args:
        recipe: the kind of file, one of `RECIPES`; "" to detect it from the entries.
        rows_have_images: the dataset determines the images, so the file's number of images is ignored.

    Raises:
        UserError: the file cannot be read, names no model, or has settings that are not modelled.
    """
    content = read_yaml(path)
    kind = recipe or _kind(content)
    if kind not in RECIPES:
        raise UserError(f"--recipe {kind}: no such kind of file ({', '.join(RECIPES)})")
    if kind in TRL and isinstance(loading := content.pop("model_init_kwargs", None), dict):
        content |= loading
    entries = _Entries(content, kind, path)
    model = next((found for key in MODELS if (found := entries.get(key))), None)
    if not model:
        raise UserError(f"--config {path}: it names no model ({', '.join(MODELS)})")
    flags = entries.flags()
    if kind == "vlm" and not rows_have_images:
        flags["images"] = entries.get("images") or 1
    if not recipe and kind == "llm" and not any(key.startswith("ac_") for key in content):
        entries.notes.append("read with the defaults of recipes/llm.py; --recipe trl reads it with those of TRL")
    stated = {name: value for name, value in flags.items() if _says(value)}
    return TrainingFile(str(model), stated, tuple(entries.unread), tuple(entries.notes))


def read_yaml(path: str) -> dict[str, Any]:
    """Returns the entries of a `--config` file.

    Raises:
        UserError: it cannot be read, or has no 'flag: value' lines.
    """
    content = load_yaml(path, f"--config {path}") or {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected 'flag: value' lines, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


@dataclass
class _Entries:
    """The entries of a file; records which ones are read."""

    content: dict[str, Any]
    kind: str
    path: str
    read: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def diffusion(self) -> bool:
        return self.kind.startswith("diffusion")

    @property
    def unread(self) -> list[str]:
        return [key for key, value in self.content.items() if key not in self.read and _says(value)]

    def get(self, name: str) -> Any:
        """Returns the entry under any name of the flag `name`, else the default of this kind of file, else None."""
        for other in names_of(name):
            if other in self.content:
                self.read.add(other)
                return _boolean(other, self.content[other]) if name in _SWITCHES else self.content[other]
        return _DEFAULTS[self.kind].get(name)

    def flags(self) -> dict[str, Any]:
        """Returns the values of our flags."""
        policy = self.get("policy")
        renamed = "activation_checkpointing" if "activation_checkpointing" in self.content else ""
        checkpointing = self.get(renamed or "gradient_checkpointing")
        return {
            "batch_size": self._batch_size(),
            **{name: self.get(name) for name in _PLAIN},
            "train_text_encoder": self.diffusion and self.get("train_text_encoder"),
            "encode_each_step": self.diffusion and self._encodes_each_step(),
            **self._precision(),
            "optimizer": self._optimizer(),
            **self._adapter(),
            **self._trainer(),
            "attn_implementation": self._attention() or self.get("attn_implementation"),
            "policy": str(policy) if policy and policy != "auto" else "full" if checkpointing else "",
        }

    def _batch_size(self) -> Any:
        """Images per batch; prior preservation doubles it, because each image comes with one of its class."""
        samples = self.get("batch_size")
        if not (self.diffusion and self.get("with_prior_preservation") and isinstance(samples, int)):
            return samples
        self.notes.append(f"with_prior_preservation: a batch of {samples} is {2 * samples} images")
        return 2 * samples

    def _encodes_each_step(self) -> bool:
        """Whether each step encodes images and prompts: because of a setting, or because of random augmentation."""
        said = {name: self.get(name) for name in ("cache_latents", "center_crop", "random_flip")}
        return said["cache_latents"] is False or said["center_crop"] is False or bool(said["random_flip"])

    def _trainer(self) -> dict[str, Any]:
        """TRL's trainer, and the fields of its configuration that the file sets."""
        if self.kind not in TRL:
            return {}
        given = {name: value for name in _TRAINER_ARGS if (value := self.get(name)) is not None}
        if "max_length" in self.content and self.content["max_length"] is None:
            self.notes.append("max_length: null truncates nothing; rows are taken to be of the default length")
        return {"trainer": TRL[self.kind], "trainer_args": json.dumps(given, sort_keys=True) if given else ""}

    def _precision(self) -> dict[str, Any]:
        dtype, bf16, fp16 = self.get("dtype"), self.get("bf16"), self.get("fp16")
        adapters = self.diffusion and (self.get("lora_r") or self.get("peft_config"))
        if adapters and self.get("mixed_precision") in _DTYPES:
            dtype = self.get("mixed_precision")  # the dtype of frozen weights in the recipes
        if self.kind == "axolotl":
            dtype = "bfloat16" if bf16 else "float16" if fp16 else None
        return {
            "dtype": _DTYPES.get(dtype, dtype) if dtype else None,
            "bf16": bool(bf16) and not fp16,
            "fp16": bool(fp16),
        }

    def _optimizer(self) -> str:
        if self.get("use_8bit_adam"):
            return "adamw_8bit"
        named = str(self.get("optimizer") or "adamw_torch_fused")
        if named not in OPTIMIZERS:
            raise UserError(f"--config {self.path}: optimizer {named} is not modelled ({', '.join(OPTIMIZERS)})")
        if named in PAGED:
            self.notes.append(
                f"{named}: its state is counted on the card; paging moves it to the host when memory runs out"
            )
        return OPTIMIZERS[named]

    def _adapter(self) -> dict[str, Any]:
        rank, config = self.get("lora_r"), self.get("peft_config")
        if not (self.get("use_peft") or self.get("adapter") or config or self.diffusion):
            return {}
        found: dict[str, Any] = {"peft_config": config}
        if not config:
            targets = self.get("lora_targets")
            targets = targets if isinstance(targets, list) else [targets] if targets else []
            self.get("lora_target_linear")
            usual = () if self.kind in TRL else ("all-linear",)  # PEFT chooses the layers for TRL
            found = {
                "lora_r": rank or (None if self.diffusion else LORA_R),
                "lora_targets": ",".join(str(target) for target in targets if target not in usual),
                "lora_dropout": self.get("lora_dropout"),
                "dora": self.get("dora"),
            }
        four, eight = bool(self.get("load_in_4bit")), self.get("load_in_8bit")
        return found | {
            "load_in_4bit": four,
            "load_in_8bit": eight,
            "double_quant": four and (self.get("double_quant") or self.kind == "axolotl"),
            "quant_storage": self.get("quant_storage"),
            "prepare_kbit": self.kind == "axolotl" and (four or bool(eight)),
        }

    def _attention(self) -> str:
        """Returns the implementation that one of axolotl's switches selects; "" if none does."""
        on = [
            str(entry.values["True"])
            for name, entry in TABLE["axolotl"].items()
            if isinstance(entry, Modelled) and entry.flag == "attn_implementation" and self.get(name)
        ]
        return on[0] if on else ""


def _boolean(name: str, value: Any) -> bool | None:
    if not isinstance(value, (bool, str, int, type(None))) or value not in _BOOLEANS:
        raise UserError(f"{name}: {str(value)[:40]!r} is neither true nor false")
    return _BOOLEANS[value]


def _says(value: Any) -> bool:
    """Whether an entry sets something; 0 does: no clipping, no dropout."""
    return not (value is None or value is False or value == "")


def _kind(content: Mapping[str, Any]) -> str:
    if "base_model" in content:
        return "axolotl"
    for kind, marks in _MARKS.items():
        if marks & content.keys():
            return kind
    if _OF_IMAGES & content.keys():
        return "vlm"
    return "diffusion_unet" if "pretrained_model_name_or_path" in content else "llm"
