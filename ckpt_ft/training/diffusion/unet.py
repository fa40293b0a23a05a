"""The U-Net of the diffusion recipe: its adapters, what of it a checkpoint holds, and the saved result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .arguments import DiffusionModelArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers import UNet2DConditionModel

LORA_TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]  # the attention projections, as in diffusers' scripts


def prepare_unet(unet: UNet2DConditionModel, args: DiffusionModelArguments, dtype: torch.dtype) -> list[nn.Parameter]:
    """Put `unet` in train mode, with LoRA frozen in `dtype` under adapters in float32; returns what is trained."""
    if args.rank is not None:
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig

        nn.Module.to(unet.requires_grad_(False), dtype)  # diffusers' own warns of modules that it has none of
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


def save_result(unet: UNet2DConditionModel, vae: Any, args: DiffusionModelArguments, output_dir: str) -> None:
    """Adapters, or a whole pipeline that `from_pretrained(output_dir)` loads.

    Raises:
        RuntimeError: the pipeline that training began with cannot be loaded any more; the U-Net alone is saved.
    """
    if args.rank is not None:
        save_unet(unet, output_dir, lora=True)
        return
    from diffusers import DiffusionPipeline

    try:
        pipeline = DiffusionPipeline.from_pretrained(
            args.pretrained_model_name_or_path, unet=unet, vae=vae, revision=args.revision, variant=args.variant
        )
    except Exception as error:  # whatever has become of its other parts: what was trained is not lost for them
        save_unet(unet, output_dir, lora=False)
        raise RuntimeError(
            f"the U-Net is in {output_dir}/unet, and the rest of its pipeline cannot be loaded: {error}"
        ) from error
    if args.prediction_type is not None:
        pipeline.scheduler.register_to_config(prediction_type=args.prediction_type)
    pipeline.save_pretrained(output_dir)
