"""What of a pipeline is trained: its U-Net or transformer, its adapters, what a checkpoint holds, the saved result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.errors import UserError, one_line

from .arguments import PipelineArguments
from .joint import TextAndUNet, components_of, text_from_file, text_to_file
from .text_encoders import add_text_adapters

if TYPE_CHECKING:
    from accelerate import Accelerator

LORA_TARGETS = ("to_k", "to_q", "to_v", "to_out.0")  # the attention projections, as in diffusers' scripts


@dataclass(frozen=True)
class Trained:
    """The part of a pipeline that is trained.

    Attributes:
        component: what the pipeline calls it, and the folder that holds it.
        model: its class in diffusers.
        pipeline: the class in diffusers whose adapters' files it shares.
        down_and_up: whether adapters are saved under the names that they had before PEFT's.
    """

    component: str
    model: str
    pipeline: str
    down_and_up: bool = False

    @property
    def model_class(self) -> Any:
        return _of_diffusers(self.model)

    @property
    def pipeline_class(self) -> Any:
        return _of_diffusers(self.pipeline)


UNET = Trained("unet", "UNet2DConditionModel", "StableDiffusionPipeline", down_and_up=True)
UNET_XL = Trained("unet", "UNet2DConditionModel", "StableDiffusionXLPipeline", down_and_up=True)


def _of_diffusers(name: str) -> Any:
    import diffusers

    try:
        return getattr(diffusers, name)
    except AttributeError:
        raise UserError(f"diffusers {diffusers.__version__} has no {name}: pip install -U diffusers") from None


def prepare(
    model: Any, args: PipelineArguments, dtype: torch.dtype, targets: list[str] | None = None
) -> list[nn.Parameter]:
    """Put `model` in train mode, with LoRA frozen in `dtype` under adapters in float32; returns what is trained.

    targets: names of the modules that get an adapter; the attention's projections when left out.

    Raises:
        UserError: the model has no such modules.
    """
    if isinstance(model, TextAndUNet):
        return [*prepare(model.unet, args, dtype, targets), *add_text_adapters(model, args)]
    if args.rank is not None:
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig

        model.requires_grad_(False)
        if model.dtype != dtype:  # a transformer is loaded in it
            nn.Module.to(model, dtype)  # diffusers' own warns of modules that it has none of
        try:
            model.add_adapter(
                LoraConfig(
                    r=args.rank,
                    lora_alpha=args.lora_alpha or args.rank,
                    lora_dropout=args.lora_dropout,
                    init_lora_weights="gaussian",
                    target_modules=targets or list(LORA_TARGETS),
                )
            )
        except ValueError as error:
            raise UserError(f"--lora_target_modules {' '.join(targets or [])}: {one_line(error, 200)}") from error
        cast_training_params(model, dtype=torch.float32)
    model.train()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def save_only_what_is_trained(accelerator: Accelerator, part: Trained, lora: bool) -> None:
    """Have `accelerator.save_state` write adapters, or the model, as diffusers does; `load_state` reads them back.

    So a LoRA checkpoint holds no copy of the frozen model, and `pipe.load_lora_weights(checkpoint)` works on it.
    """

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            save_trained(accelerator.unwrap_model(models[0]), part, output_dir, lora)
        weights.clear()  # what is left there accelerate would write itself

    def load(models: list[Any], input_dir: str) -> None:
        load_trained(accelerator.unwrap_model(models.pop()), part, input_dir, lora)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_trained(model: Any, part: Trained, output_dir: str | Path, lora: bool) -> None:
    """Adapters as `pipe.load_lora_weights(output_dir)` takes them, else the model as its folder of a pipeline."""
    from diffusers.training_utils import _collate_lora_metadata
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft.utils import get_peft_model_state_dict

    if not lora:
        model.save_pretrained(Path(output_dir) / part.component)
        return
    layers, components = {}, components_of(model, part.component)
    for name, component in components.items():
        weights = get_peft_model_state_dict(component, save_embedding_layers=False)
        weights = weights if name == part.component else text_to_file(weights)
        layers[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(weights) if part.down_and_up else weights
    part.pipeline_class.save_lora_weights(output_dir, **layers, **_collate_lora_metadata(components))


def load_trained(model: Any, part: Trained, input_dir: str | Path, lora: bool) -> None:
    """What `save_trained` wrote, into `model`.

    Raises:
        OSError: it is not there.
        RuntimeError: it does not fit `model`.
    """
    from diffusers.utils import convert_unet_state_dict_to_peft
    from peft.utils import set_peft_model_state_dict

    if not lora:
        model.load_state_dict(type(model).from_pretrained(input_dir, subfolder=part.component).state_dict())
        return
    weights = part.pipeline_class.lora_state_dict(input_dir)
    weights = weights[0] if isinstance(weights, tuple) else weights  # a U-Net's come with the scales of its adapters
    for name, component in components_of(model, part.component).items():
        ours = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        own = name == part.component
        ours = convert_unet_state_dict_to_peft(ours) if own else text_from_file(component, ours)
        outcome = set_peft_model_state_dict(component, ours, adapter_name="default")
        if outcome.unexpected_keys:
            raise RuntimeError(f"adapter weights that this {name} has no place for: {outcome.unexpected_keys[:3]}")


def save_result(model: Any, part: Trained, vae: Any, args: PipelineArguments, output_dir: str) -> None:
    """Adapters, or a whole pipeline that `from_pretrained(output_dir)` loads.

    Raises:
        RuntimeError: the pipeline that training began with cannot be loaded any more; the model alone is saved.
    """
    if args.rank is not None:
        save_trained(model, part, output_dir, lora=True)
        return
    from diffusers import DiffusionPipeline

    try:
        pipeline = DiffusionPipeline.from_pretrained(
            args.pretrained_model_name_or_path,
            vae=vae,
            revision=args.revision,
            variant=args.variant,
            **{part.component: model},
        )
    except Exception as error:  # whatever has become of its other parts: what was trained is not lost for them
        save_trained(model, part, output_dir, lora=False)
        raise RuntimeError(
            f"the {part.component} is in {output_dir}/{part.component}, and the rest of its pipeline cannot be "
            f"loaded: {error}"
        ) from error
    predicts(pipeline.scheduler, args)
    pipeline.save_pretrained(output_dir)


def predicts(scheduler: Any, args: PipelineArguments) -> None:
    """Tell `scheduler` what the U-Net was asked to predict, where that is not the scheduler's own."""
    prediction_type = getattr(args, "prediction_type", None)
    if prediction_type is not None:
        scheduler.register_to_config(prediction_type=prediction_type)
