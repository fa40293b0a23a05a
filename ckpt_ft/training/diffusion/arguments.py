"""The flags of the diffusion recipes, named as in diffusers' training scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from accelerate.tracking import get_available_trackers
from annotated_types import Interval

from ckpt_ft.errors import UserError
from ckpt_ft.spec.optimizers import OFFLOADING
from ckpt_ft.training.flags import (
    OFFLOADED,
    OVERWRITE,
    AtLeastOne,
    Count,
    Needs,
    NotNegative,
    Positive,
    Rank,
    Seed,
    Share,
    check_flags,
    check_offloaded,
    check_trackers,
    flag,
)
from ckpt_ft.training.models import PEFT_CONFIG, check_peft_flag
from ckpt_ft.validation import require_package

OPTIMIZERS = ("adamw", "adafactor", "prodigy")
# The schedules of diffusers' get_scheduler that need no more arguments.
SCHEDULES = ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
# The schemes of diffusers' compute_density_for_timestep_sampling and compute_loss_weighting_for_sd3.
WEIGHTING = ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"]


@dataclass
class PipelineArguments:
    """The pipeline to fine-tune, and whether its U-Net or transformer is trained whole or by adapters."""

    _argument_group_name = "model"
    _needs: ClassVar[Needs] = {"rank": ("lora_alpha", "lora_dropout")}

    pretrained_model_name_or_path: str | None = flag(
        None, "Hub id or local directory of a pipeline; without it, a tiny one made here."
    )
    revision: str | None = flag(None, "Branch, tag or commit of the Hub pipeline.")
    variant: str | None = flag(None, "Variant of its weight files, e.g. fp16.")
    rank: Rank | None = flag(None, "Train LoRA adapters of this rank; without it or --peft_config, all weights.")
    peft_config: str | None = flag(None, PEFT_CONFIG)
    lora_alpha: AtLeastOne | None = flag(None, "Scale of the adapters; the rank when left out.")
    lora_dropout: Share = flag(0.0, "Dropout in front of the adapters.")

    def __post_init__(self) -> None:
        beside = ("rank", "lora_alpha", "lora_dropout", "lora_target_modules")
        check_peft_flag(self.peft_config, {name: getattr(self, name, None) for name in beside})
        check_flags(self)

    @property
    def adapts(self) -> bool:
        return self.rank is not None or self.peft_config is not None


@dataclass
class DiffusionModelArguments(PipelineArguments):
    """A Stable Diffusion 1.x, 2.x or XL pipeline, and the objective of its U-Net."""

    _needs: ClassVar[Needs] = {
        "rank": ("lora_alpha", "lora_dropout", "train_text_encoder"), "train_text_encoder": ("text_encoder_lr",)
    }  # fmt: skip

    pretrained_vae_model_name_or_path: str | None = flag(
        None, "Use this VAE instead of the pipeline's, for example one that is stable in fp16."
    )
    prediction_type: str | None = flag(
        None, "What the U-Net predicts; the scheduler's own when left out.", choices=["epsilon", "v_prediction"]
    )
    snr_gamma: Positive | None = flag(None, "Gamma of Min-SNR loss weights (Hang et al., 2023), usually 5.0.")
    noise_offset: NotNegative = flag(
        0.0, "Strength of offset noise, which is constant over an image; usually 0.05 to 0.1."
    )
    train_text_encoder: bool = flag(False, "LoRA on the text encoders too; prompts are then encoded in each step.")
    text_encoder_lr: NotNegative | None = flag(None, "Peak learning rate of the text encoders; 5e-6 when left out.")

    @property
    def text_rate(self) -> float | None:
        """The peak learning rate of the text encoders; None if they are frozen."""
        rate = 5e-6 if self.text_encoder_lr is None else self.text_encoder_lr  # diffusers' own
        return rate if self.train_text_encoder else None


@dataclass
class TransformerArguments(PipelineArguments):
    """A FLUX, Stable Diffusion 3, Qwen-Image or Sana pipeline, and the objective of its transformer."""

    _needs: ClassVar[Needs] = {"rank": ("lora_alpha", "lora_dropout", "lora_target_modules")}

    lora_target_modules: list[str] | None = flag(
        None, "Modules that get an adapter; the attention's projections when left out."
    )
    load_in_4bit: bool = flag(False, "QLoRA: the frozen transformer in NF4 (bitsandbytes).")
    max_sequence_length: AtLeastOne | None = flag(
        None, "Tokens that prompts are padded to; the pipeline's own number when left out."
    )
    weighting_scheme: str | None = flag(
        None,
        "How diffusion times are drawn and weighted; the model family's own way when left out.",
        choices=WEIGHTING,
    )
    logit_mean: Annotated[float, Interval(ge=-100, le=100)] = flag(
        0.0, "Mean of the times under --weighting_scheme logit_normal."
    )
    logit_std: Positive = flag(1.0, "Standard deviation of the times under --weighting_scheme logit_normal.")
    # Beyond this range times leave 0 to 1: Esser et al., 2024, section 3.1.
    mode_scale: Annotated[float, Interval(ge=-1, le=1.75)] = flag(1.29, "Scale of --weighting_scheme mode.")
    guidance_scale: NotNegative = flag(
        1.0, "Guidance that a guidance-distilled transformer (FLUX.1-dev) is given in training."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_in_4bit:
            if not self.adapts:
                raise UserError("--load_in_4bit: 4-bit weights cannot be trained themselves; add --rank for QLoRA")
            require_package("bitsandbytes", "--load_in_4bit")


@dataclass
class LoopArguments:
    """The training loop: its length, optimizer and precision, and what it writes."""

    _argument_group_name = "training"

    output_dir: str = flag("out/diffusion", "Where the result, checkpoints, samples and reports go.")
    seed: Seed = flag(0, "Seed of every random choice.")
    train_batch_size: AtLeastOne = flag(16, "Images per device and forward pass.")
    gradient_accumulation_steps: AtLeastOne = flag(1, "Forward passes per optimizer step.")
    num_train_epochs: AtLeastOne = flag(100, "Passes over the images, when max_train_steps is left out.")
    max_train_steps: AtLeastOne | None = flag(None, "Optimizer steps.")
    learning_rate: NotNegative = flag(1e-4, "Peak learning rate.")
    scale_lr: bool = flag(False, "Multiply --learning_rate by devices, accumulation steps and batch size.")
    lr_scheduler: str = flag("constant", "The learning rate's schedule.", choices=SCHEDULES)
    lr_warmup_steps: Count = flag(500, "Warm-up steps, for schedules that have a warm-up.")
    adam_beta1: Share = flag(0.9, "Decay rate of the optimizer's first moment.")
    adam_beta2: Share = flag(0.999, "Decay rate of the optimizer's second moment.")
    adam_weight_decay: NotNegative = flag(1e-2, "Decoupled weight decay.")
    adam_epsilon: NotNegative = flag(1e-8, "Added to the optimizer's denominator.")
    optimizer: str = flag(
        "adamw",
        "adamw, adafactor (second moments by rows and columns) or prodigy (finds its rate: --learning_rate 1).",
        choices=list(OPTIMIZERS),
    )
    use_8bit_adam: bool = flag(False, "AdamW with 8-bit states (bitsandbytes).")
    offload_optimizer: str | None = flag(None, OFFLOADED)
    max_grad_norm: NotNegative = flag(1.0, "Clip gradients to this norm; 0 for no clipping.")
    use_ema: bool = flag(False, "Keep a moving average (EMA) of the trained weights; it is what is sampled and saved.")
    mixed_precision: str | None = flag(None, "Accelerate's own setting when left out.", choices=["no", "fp16", "bf16"])
    allow_tf32: bool = flag(False, "TF32 matrix products on Ampere and later.")
    checkpointing_steps: AtLeastOne = flag(500, "Steps between checkpoints.")
    checkpoints_total_limit: AtLeastOne | None = flag(None, "Keep only this many checkpoints, the newest.")
    resume_from_checkpoint: str | None = flag(None, "latest, or the path of a checkpoint.")
    overwrite_output_dir: bool = flag(False, OVERWRITE)
    validation_prompt: list[str] | None = flag(None, "Prompts to draw images of during training and at its end.")
    num_validation_images: AtLeastOne = flag(1, "Images per prompt.")
    validation_steps: AtLeastOne = flag(500, "Steps between validations.")
    validation_inference_steps: AtLeastOne = flag(25, "Denoising steps per image.")
    validation_guidance_scale: NotNegative = flag(7.5, "Scale of classifier-free guidance.")
    report_to: str = flag("none", "Trackers: tensorboard, wandb, ..., all, or none.")
    tracker_project_name: str = flag("diffusion", "Name of the run's project at the trackers.")
    logging_dir: str = flag("logs", "Where trackers write, inside output_dir.")

    def __post_init__(self) -> None:
        check_flags(self)
        installed = [tracker.value for tracker in get_available_trackers()]
        check_trackers([] if self.report_to in ("none", "all") else self.report_to.split(","), installed)
        if self.use_8bit_adam:
            require_package("bitsandbytes", "--use_8bit_adam")
            if self.optimizer != "adamw":
                raise UserError(f"--use_8bit_adam is AdamW, --optimizer {self.optimizer} is not: give one of them")
        other = "--use_8bit_adam" if self.use_8bit_adam else f"--optimizer {self.optimizer}"
        step = self.max_grad_norm, self.mixed_precision == "fp16", self.gradient_accumulation_steps
        check_offloaded(self.offload_optimizer, other.replace("--optimizer adamw", ""), *step)
        if self.optimizer == "prodigy":
            require_package("prodigyopt", "--optimizer prodigy")

    @property
    def traced_optimizer(self) -> str:
        """The optimizer's name in a trace: fused AdamW, or the stand-in of 8-bit AdamW that needs no CUDA."""
        if self.offload_optimizer and torch.cuda.is_available():
            return OFFLOADING[self.offload_optimizer]
        return "adamw_8bit" if self.use_8bit_adam else {"adamw": "adamw_fused"}.get(self.optimizer, self.optimizer)
