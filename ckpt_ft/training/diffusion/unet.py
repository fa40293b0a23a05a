"""What the diffusion recipe does to a U-Net: adapters, the denoising loss, checkpoint hooks, and the saved result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .arguments import DiffusionModelArguments, LoopArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.training_utils import EMAModel

LORA_TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]  # the attention projections, as in diffusers' scripts


def prepare_unet(unet: UNet2DConditionModel, args: DiffusionModelArguments, dtype: torch.dtype) -> list[nn.Parameter]:
    """Put `unet` in train mode, with LoRA frozen in `dtype` under adapters in float32; returns what is trained."""
    if args.rank is not None:
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig

        unet.requires_grad_(False).to(dtype=dtype)
        unet.add_adapter(
            LoraConfig(
                r=args.rank,
                lora_alpha=args.lora_alpha or args.rank,
                lora_dropout=args.lora_dropout,
                init_lora_weights="gaussian",
                target_modules=LORA_TARGETS,
            )
        )
        cast_training_params(unet, dtype=torch.float32)
    unet.train()
    return [parameter for parameter in unet.parameters() if parameter.requires_grad]


def make_optimizer(parameters: list[nn.Parameter], args: LoopArguments, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, fused: one kernel and no temporaries (torch's default on CUDA makes some as large as the weights).

    With `use_8bit_adam` that of bitsandbytes.
    """
    settings: dict[str, Any] = {
        "lr": learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "weight_decay": args.adam_weight_decay,
        "eps": args.adam_epsilon,
    }
    if args.use_8bit_adam:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)


def noisy_inputs(
    latents: Tensor, encoded: dict[str, Tensor], scheduler: DDPMScheduler, noise_offset: float = 0.0
) -> tuple[dict[str, Any], Tensor]:
    """The U-Net's keyword arguments for `latents` (B, C, h, w) at random times, and what it should predict.

    Draws from torch's global RNG. `noise_offset` adds noise that is constant over each channel of an image
    (https://www.crosslabs.org/blog/diffusion-with-offset-noise), so that a model learns very dark and bright images.
    """
    noise = torch.randn_like(latents)
    if noise_offset:
        noise = noise + noise_offset * torch.randn(*latents.shape[:2], 1, 1, device=latents.device)
    steps = scheduler.config.num_train_timesteps
    times = torch.randint(0, steps, (len(latents),), device=latents.device)
    inputs: dict[str, Any] = {
        "sample": scheduler.add_noise(latents, noise, times),
        "timestep": times,
        "encoder_hidden_states": encoded["prompt_embeds"],
    }
    if "pooled_embeds" in encoded:
        inputs["added_cond_kwargs"] = {"text_embeds": encoded["pooled_embeds"], "time_ids": encoded["time_ids"]}
    if scheduler.config.prediction_type == "v_prediction":
        return inputs, scheduler.get_velocity(latents, noise, times)
    return inputs, noise


def denoising_loss(
    prediction: Tensor, target: Tensor, scheduler: DDPMScheduler, times: Tensor, snr_gamma: float | None = None
) -> Tensor:
    """Mean squared error, with `snr_gamma` weighted by Min-SNR (Hang et al., 2023, https://arxiv.org/abs/2303.09556).

    Always in float32. The weight is min(SNR, gamma) in terms of the clean image; predicting noise multiplies that by
    1 / SNR and predicting velocity by 1 / (SNR + 1).
    """
    if snr_gamma is None:
        return functional.mse_loss(prediction.float(), target.float())
    from diffusers.training_utils import compute_snr

    snr = compute_snr(scheduler, times)
    divisor = snr + 1 if scheduler.config.prediction_type == "v_prediction" else snr
    weight = snr.clamp(max=snr_gamma) / divisor
    loss = functional.mse_loss(prediction.float(), target.float(), reduction="none")
    return (loss.mean(dim=(1, 2, 3)) * weight).mean()


def drop_prompts(encoded: dict[str, Tensor], empty: dict[str, Tensor], share: float) -> None:
    """Replace, in place, the captions of a random `share` of the batch by the empty one's encoding."""
    if share:
        dropped = torch.rand(len(encoded["prompt_embeds"])).to(encoded["prompt_embeds"].device) < share
        for name, value in empty.items():
            encoded[name] = torch.where(dropped.view(-1, *[1] * (value.dim() - 1)), value, encoded[name])


def save_only_what_is_trained(accelerator: Accelerator, args: DiffusionModelArguments) -> None:
    """Have `accelerator.save_state` write adapters, or the U-Net, as diffusers does; `load_state` reads them back.

    So a LoRA checkpoint holds no copy of the frozen U-Net, and `pipe.load_lora_weights(checkpoint)` works on it.
    """

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            save_unet(accelerator.unwrap_model(models[0]), output_dir, lora=args.rank is not None)
        weights.clear()  # what is left there accelerate would write itself

    def load(models: list[Any], input_dir: str) -> None:
        load_unet_weights(accelerator.unwrap_model(models.pop()), input_dir, lora=args.rank is not None)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_unet(unet: UNet2DConditionModel, output_dir: str | Path, lora: bool) -> None:
    """Adapters as `pipe.load_lora_weights(output_dir)` takes them, else the U-Net as the folder `unet`."""
    from diffusers import StableDiffusionPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft.utils import get_peft_model_state_dict

    if not lora:
        unet.save_pretrained(Path(output_dir) / "unet")
        return
    StableDiffusionPipeline.save_lora_weights(  # SDXL's file has the same layout
        output_dir,
        unet_lora_layers=convert_state_dict_to_diffusers(get_peft_model_state_dict(unet)),
        **_collate_lora_metadata({"unet": unet}),
    )


def load_unet_weights(unet: UNet2DConditionModel, input_dir: str | Path, lora: bool) -> None:
    """What `save_unet` wrote, into `unet`.

    Raises:
        OSError: it is not there.
        RuntimeError: it does not fit `unet`.
    """
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.utils import convert_unet_state_dict_to_peft
    from peft.utils import set_peft_model_state_dict

    if not lora:
        unet.load_state_dict(UNet2DConditionModel.from_pretrained(input_dir, subfolder="unet").state_dict())
        return
    weights = StableDiffusionPipeline.lora_state_dict(input_dir)[0]
    weights = {name.removeprefix("unet."): value for name, value in weights.items()}
    outcome = set_peft_model_state_dict(unet, convert_unet_state_dict_to_peft(weights), adapter_name="default")
    if outcome.unexpected_keys:
        raise RuntimeError(f"adapter weights that this U-Net has no place for: {outcome.unexpected_keys[:3]}")


@contextmanager
def averaged(ema: EMAModel | None, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, `parameters` are their moving average, if one is kept."""
    if ema is None:
        yield
        return
    ema.store(parameters)
    ema.copy_to(parameters)
    try:
        yield
    finally:
        ema.restore(parameters)


def save_result(unet: UNet2DConditionModel, vae: Any, args: DiffusionModelArguments, output_dir: str) -> None:
    """Adapters, or a whole pipeline that `from_pretrained(output_dir)` loads."""
    if args.rank is not None:
        save_unet(unet, output_dir, lora=True)
        return
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(
        args.pretrained_model_name_or_path, unet=unet, vae=vae, revision=args.revision, variant=args.variant
    )
    if args.prediction_type is not None:
        pipeline.scheduler.register_to_config(prediction_type=args.prediction_type)
    pipeline.save_pretrained(output_dir)
