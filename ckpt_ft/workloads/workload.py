"""A training step of a model that need not exist: built from its configuration on the meta device, for the trace.

`load(name, ...)` takes a Hub id, a local directory or a config file, of a causal or masked language model, a diffusers
pipeline (its U-Net or transformer) or an image classifier, and gives a `Workload`: the model, its optimizer, and the
step for any batch size, in the order in which `Trainer` and the diffusion recipe do it. No weight is ever allocated.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError

from .lengths import Lengths, PaddedRows, Step
from .model_config import read_config

Batch = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIXED_PRECISION = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = ("adamw", "adamw_fused", "adamw_8bit", "adafactor", "sgd", "none")


@dataclass(frozen=True)
class Settings:
    """How the model is trained.

    Attributes:
        dtype: of the weights: float32, bfloat16 or float16.
        mixed_precision: autocast: no, bf16 or fp16.
        optimizer: one of `OPTIMIZERS`.
        lora_r: LoRA rank; 0 trains all weights.
        lora_targets: module names that get an adapter; () for every linear layer of the blocks.
        seq_length: tokens of a sequence (language models).
        resolution: pixels of an image's side; 0 for the model's own.
        max_grad_norm: gradients are clipped to it; 0 for no clipping.
        attn_implementation: sdpa or eager; "" for what the model prefers.
        load_in_4bit: frozen weights in 4 bits, as bitsandbytes keeps them (NF4).
    """

    dtype: str = "float32"
    mixed_precision: str = "no"
    optimizer: str = "adamw_fused"
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    seq_length: int = 1024
    resolution: int = 0
    max_grad_norm: float = 1.0
    attn_implementation: str = ""
    load_in_4bit: bool = False

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--mixed-precision", self.mixed_precision, MIXED_PRECISION)
        _one_of("--optimizer", self.optimizer, OPTIMIZERS)
        _one_of("--attn-implementation", self.attn_implementation, ("", "sdpa", "eager"))
        if self.seq_length < 2:
            raise UserError(f"--seq-length {self.seq_length}: a sequence has at least 2 tokens")
        if self.lora_r < 0:
            raise UserError(f"--lora {self.lora_r}: a LoRA rank is at least 1 (0 trains all weights)")
        if self.resolution < 0:
            raise UserError(f"--resolution {self.resolution}: a number of pixels, or 0 for the model's own")
        if self.load_in_4bit and not self.lora_r:
            raise UserError(
                "--load-in-4bit: 4-bit weights cannot be trained themselves; give a LoRA rank, as in --lora 16"
            )


@dataclass(frozen=True)
class Workload:
    """A model on the meta device with its step.

    Attributes:
        name: what was asked for.
        kind: "language model", "diffusion model" or "image classifier".
        model: on meta, in train mode, adapters in place.
        make_batch: batch size -> keyword arguments of the model.
        compute_loss: (model, batch) -> scalar.
        make_padded: (batch size, length) -> a batch of rows of which only the first is as long as that; None where all
            rows are alike.
    """

    name: str
    kind: str
    model: nn.Module
    settings: Settings
    make_batch: Callable[[int], Batch]
    compute_loss: Callable[[nn.Module, Batch], torch.Tensor]
    shape: dict[str, int] = field(default_factory=dict)
    make_padded: Callable[[int, int], Batch] | None = None

    def step(self, batch_size: int) -> Step:
        """One optimizer step on a batch of `batch_size` samples."""
        if batch_size < 1:
            raise UserError(f"--batch-size {batch_size}: a batch has at least 1 sample")
        return training_step(self.compute_loss, lambda: self.make_batch(batch_size), self.settings)

    def padded(self, lengths: Lengths) -> PaddedRows:
        """The rows of a dataset with these lengths.

        Raises:
            UserError: not a model of sequences.
        """
        make = self.make_padded
        if make is None:
            raise UserError(
                f"--dataset: the batches of {self.name}, of kind '{self.kind}', are all alike; leave it out"
            )
        return PaddedRows(
            lengths, lambda size, length: training_step(self.compute_loss, lambda: make(size, length), self.settings)
        )

    def make_optimizer(self, model: nn.Module) -> Any:
        """The optimizer over the trainable parameters, None for the optimizer "none"."""
        return make_optimizer(model, self.settings.optimizer)


def training_step(
    compute_loss: Callable[[nn.Module, Batch], torch.Tensor], make_batch: Callable[[], Batch], settings: Settings
) -> Step:
    """Forward under autocast, backward, clipping, optimizer step, gradients dropped: Trainer's order and lifetimes."""
    autocast = MIXED_PRECISION[settings.mixed_precision]

    def step(model: nn.Module, optimizer: Any) -> None:
        batch = make_batch()
        with torch.autocast("cuda", autocast) if autocast is not None else contextlib.nullcontext():
            loss = compute_loss(model, batch)
        del batch
        loss.backward()
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    return step


def make_optimizer(model: nn.Module, name: str) -> Any:
    """The optimizer of `OPTIMIZERS` called `name` over the trainable parameters of `model`."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name == "none":
        return None
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=1e-2)
    if name == "adafactor":
        from transformers import Adafactor

        return Adafactor(trainable, scale_parameter=False, relative_step=False, lr=1e-4)
    if name == "adamw_8bit":
        from ckpt_ft.standins.adamw_8bit import AdamW8bit

        return AdamW8bit(trainable, lr=1e-4)
    return torch.optim.AdamW(trainable, lr=1e-4, fused=True if name == "adamw_fused" else None)


def load(name: str, settings: Settings) -> Workload:
    """The workload of a Hub id, a local directory or a config file.

    Raises:
        UserError: nothing by that name, not a kind of model that is known here, or settings that do not fit it.
    """
    config = read_config(name)
    if "_class_name" in config:
        from .diffusion import diffusion_workload

        return diffusion_workload(name, config, settings)
    if "model_type" not in config:
        raise UserError(f"{name}: its config has neither model_type (transformers) nor _class_name (diffusers)")
    architecture = (config.get("architectures") or [""])[0]
    if architecture.endswith("ForImageClassification") or _is_image_model(config):
        return _image_classifier(name, config, settings)
    return _language_model(name, config, settings)


def _language_model(name: str, config: Mapping[str, Any], settings: Settings) -> Workload:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise UserError(
            f"{name}: model type '{kind}' is neither a causal or masked language model nor an image classifier"
        )
    masked = kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "MaskedLM" in (config.get("architectures") or [""])[0]
    built = _build(name, AutoModelForMaskedLM if masked else AutoModelForCausalLM, config, settings)
    text = built.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit and settings.seq_length > limit:
        raise UserError(f"--seq-length {settings.seq_length}: {name} has {limit} positions")

    def make_batch(size: int) -> Batch:
        ids = torch.zeros(size, settings.seq_length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    def make_padded(size: int, length: int) -> Batch:
        ids = torch.zeros(size, length, dtype=torch.long)
        mask = torch.ones_like(ids)
        mask[1:, -1:] = 0
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}

    return Workload(
        name,
        "language model",
        adapt(built, settings),
        settings,
        make_batch,
        _own_loss,
        {"seq_length": settings.seq_length},
        make_padded,
    )


def _image_classifier(name: str, config: Mapping[str, Any], settings: Settings) -> Workload:
    from transformers import AutoModelForImageClassification

    size = settings.resolution or _image_size(config)
    built = _build(
        name,
        AutoModelForImageClassification,
        {**config, **({"image_size": size} if "image_size" in config else {})},
        settings,
    )
    channels = int(getattr(built.config, "num_channels", 3))
    dtype = torch.float32 if settings.mixed_precision != "no" else DTYPES[settings.dtype]

    def make_batch(count: int) -> Batch:
        pixels = torch.zeros(count, channels, size, size, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(count, dtype=torch.long)}

    return Workload(
        name, "image classifier", adapt(built, settings), settings, make_batch, _own_loss, {"resolution": size}
    )


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _build(name: str, auto: Any, config: Mapping[str, Any], settings: Settings) -> Any:
    """The model on meta, in the settings' dtype, from its config alone."""
    from transformers import AutoConfig

    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        parsed = AutoConfig.for_model(config["model_type"], **values)
        with torch.device("meta"):
            model = auto.from_config(
                parsed, dtype=DTYPES[settings.dtype], attn_implementation=settings.attn_implementation or None
            )
    except Exception as error:
        raise UserError(f"{name}: its config does not make a model: {' '.join(str(error).split())[:200]}") from error
    return model.train()


def adapt(model: Any, settings: Settings) -> Any:
    """`model` with 4-bit weights and LoRA adapters (fp32 on a half-precision base, as peft makes them), if asked."""
    if settings.load_in_4bit:
        from ckpt_ft.standins.nf4 import to_nf4

        to_nf4(model, DTYPES[settings.dtype])
    if not settings.lora_r:
        return model
    from peft import LoraConfig, get_peft_model

    targets = list(settings.lora_targets) or "all-linear"
    try:
        with torch.device("meta"):
            adapted = get_peft_model(
                model, LoraConfig(r=settings.lora_r, lora_alpha=2 * settings.lora_r, target_modules=targets)
            )
    except ValueError as error:
        raise UserError(
            f"--lora-targets {' '.join(settings.lora_targets)}: {' '.join(str(error).split())[:200]}"
        ) from error
    if settings.dtype != "float32":
        for p in adapted.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    return adapted.train()


def _is_image_model(config: Mapping[str, Any]) -> bool:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )

    kind = config["model_type"]
    return kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _image_size(config: Mapping[str, Any]) -> int:
    size = config.get("image_size", 224)
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _one_of(flag: str, given: str, allowed: Any) -> None:
    if given not in allowed:
        close = difflib.get_close_matches(given, list(allowed), n=1)
        raise UserError(
            f"{flag} '{given}'" + (f"; did you mean '{close[0]}'?" if close else "") + f" ({', '.join(allowed)})"
        )
