"""The flags of the diffusion recipe, named as in diffusers' text-to-image training scripts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from ckpt_ft.errors import UserError
from ckpt_ft.training.flags import flag

# Those of diffusers' get_scheduler that need nothing else.
SCHEDULES = ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


@dataclass
class DiffusionModelArguments:
    """Which pipeline is fine-tuned, and how much of its U-Net.

    Raises:
        UserError: a rank, alpha or dropout that LoRA cannot have.
    """

    pretrained_model_name_or_path: str | None = flag(
        None, "Hub id or local directory of an SD 1.x, 2.x or SDXL pipeline; without it, a tiny one made here."
    )
    pretrained_vae_model_name_or_path: str | None = flag(None, "Another VAE, such as one that is stable in fp16.")
    revision: str | None = flag(None, "Branch, tag or commit of the Hub pipeline.")
    variant: str | None = flag(None, "Variant of its weight files, e.g. fp16.")
    rank: int | None = flag(None, "Train LoRA adapters of this rank; without it, the whole U-Net.")
    lora_alpha: int | None = flag(None, "Scale of the adapters; the rank when left out.")
    lora_dropout: float = flag(0.0, "Dropout in front of the adapters.")
    prediction_type: str | None = flag(
        None, "What the U-Net predicts; the scheduler's own when left out.", choices=["epsilon", "v_prediction"]
    )

    def __post_init__(self) -> None:
        if self.rank is None and (self.lora_alpha is not None or self.lora_dropout):
            raise UserError("--lora_alpha and --lora_dropout belong to LoRA; add --rank, or drop them")
        if self.rank is not None and self.rank < 1:
            raise UserError(
                f"--rank {self.rank}: a LoRA rank is at least 1; leave --rank out to train the whole U-Net"
            )
        if self.lora_alpha is not None and self.lora_alpha < 1:
            raise UserError(f"--lora_alpha {self.lora_alpha}: give at least 1, or leave it out for the rank")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: give a share from 0 up to, but not including, 1")


@dataclass
class LoopArguments:
    """How long and how it is trained, what is written meanwhile.

    Raises:
        UserError: a count below 1, a rate that nothing can be trained with, or a package that a flag needs and that is
        not installed.
    """

    output_dir: str = flag("out/diffusion_unet", "Where the result, checkpoints, samples and reports go.")
    seed: int = flag(0, "Of everything random.")
    train_batch_size: int = flag(16, "Images per device and forward pass.")
    gradient_accumulation_steps: int = flag(1, "Forward passes per optimizer step.")
    num_train_epochs: int = flag(100, "Passes over the images, when max_train_steps is left out.")
    max_train_steps: int | None = flag(None, "Optimizer steps.")
    learning_rate: float = flag(1e-4, "Peak learning rate.")
    scale_lr: bool = flag(False, "Multiply it by devices, accumulation steps and batch size.")
    lr_scheduler: str = flag("constant", "The learning rate's schedule.", choices=SCHEDULES)
    lr_warmup_steps: int = flag(500, "Steps of warm-up, for schedules that have one.")
    adam_beta1: float = flag(0.9, "First moment's decay.")
    adam_beta2: float = flag(0.999, "Second moment's decay.")
    adam_weight_decay: float = flag(1e-2, "Decoupled weight decay.")
    adam_epsilon: float = flag(1e-8, "Added to the denominator.")
    use_8bit_adam: bool = flag(False, "AdamW with 8-bit states (bitsandbytes).")
    max_grad_norm: float = flag(1.0, "Gradients are clipped to this norm.")
    snr_gamma: float | None = flag(None, "Min-SNR loss weights (Hang et al., 2023), usually 5.0.")
    noise_offset: float = flag(0.0, "Share of noise that is constant over an image, usually 0.05 to 0.1.")
    use_ema: bool = flag(False, "Keep a moving average of what is trained; it is what is sampled and saved.")
    mixed_precision: str | None = flag(None, "Accelerate's own setting when left out.", choices=["no", "fp16", "bf16"])
    allow_tf32: bool = flag(False, "TF32 matrix products on Ampere and later.")
    checkpointing_steps: int = flag(500, "Steps between checkpoints.")
    checkpoints_total_limit: int | None = flag(None, "Keep only the newest so many.")
    resume_from_checkpoint: str | None = flag(None, "latest, or the path of a checkpoint.")
    overwrite_output_dir: bool = flag(
        False, "Throw the checkpoints and the result of an earlier run in output_dir away."
    )
    validation_prompt: list[str] | None = field(
        default=None, metadata={"help": "Prompts that are drawn during training and at its end."}
    )
    num_validation_images: int = flag(1, "Images per prompt.")
    validation_steps: int = flag(500, "Steps between validations.")
    validation_inference_steps: int = flag(25, "Denoising steps per image.")
    validation_guidance_scale: float = flag(7.5, "Classifier-free guidance.")
    report_to: str = flag("none", "Trackers: tensorboard, wandb, ..., all, or none.")
    tracker_project_name: str = flag("diffusion_unet", "Name of the run's project at the trackers.")
    logging_dir: str = flag("logs", "Where trackers write, inside output_dir.")

    def __post_init__(self) -> None:
        counts = ("train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_train_steps",
                  "checkpointing_steps", "checkpoints_total_limit", "num_validation_images", "validation_steps",
                  "validation_inference_steps")  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: give at least 1")
        for name in ("learning_rate", "lr_warmup_steps", "adam_weight_decay", "adam_epsilon", "max_grad_norm"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UserError(f"--{name} {value}: give a number from 0 on")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: give a number from 0 up to, but not including, 1")
        if self.use_8bit_adam and importlib.util.find_spec("bitsandbytes") is None:
            raise UserError("--use_8bit_adam needs bitsandbytes, which is not installed: pip install bitsandbytes")
        if self.snr_gamma is not None and self.snr_gamma <= 0:
            raise UserError(f"--snr_gamma {self.snr_gamma}: give a positive number, usually 5.0, or leave it out")
