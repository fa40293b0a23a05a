"""What of a pipeline is trained: its U-Net or transformer, its adapters, what a checkpoint holds, the saved result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.training.peft_flag import kind_of
from ckpt_ft.training.run.resume import PIPELINE_LORA
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.pipeline_parts import TextAndUNet, add_text_adapters

from .adapted import adapted, write_card
from .arguments import PipelineArguments
from .joint import components_of, text_from_file, text_to_file

if TYPE_CHECKING:
    from accelerate import Accelerator


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


def prepare(model: Any, args: PipelineArguments, dtype: torch.dtype, targets: list[str] | None = None) -> Any:
    """`model` in train mode; with adapters it is frozen in `dtype` under those in float32 (see `adapted`).

    Raises:
        UserError: it cannot have the adapters that are asked for.
    """
    if isinstance(model, TextAndUNet):
        model.unet = prepare(model.unet, args, dtype, targets)
        assert args.rank is not None, "DiffusionModelArguments sees to it"
        return add_text_adapters(model, args.rank, args.lora_alpha, args.lora_dropout)
    if args.adapts:
        from diffusers.training_utils import cast_training_params

        if model.dtype != dtype:  # a transformer is loaded in it
            nn.Module.to(model, dtype)  # diffusers' own warns of modules that it has none of
        model = adapted(model, args, targets)
        cast_training_params(model, dtype=torch.float32)
    return model.train()


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
    """Adapters as `pipe.load_lora_weights(output_dir)` or `PeftModel.from_pretrained` takes them, else the model as
    its folder of a pipeline."""
    from diffusers.training_utils import _collate_lora_metadata
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict

    if isinstance(model, PeftModel):
        model.save_pretrained(output_dir, save_embedding_layers=False)
        return
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
    from peft import PeftModel
    from peft.utils import load_peft_weights

    if not lora:
        model.load_state_dict(type(model).from_pretrained(input_dir, subfolder=part.component).state_dict())
        return
    if isinstance(model, PeftModel):
        _put(model, load_peft_weights(str(input_dir), device="cpu"))
        return
    weights = part.pipeline_class.lora_state_dict(input_dir, weight_name=PIPELINE_LORA)
    weights = weights[0] if isinstance(weights, tuple) else weights  # a U-Net's come with the scales of its adapters
    for name, component in components_of(model, part.component).items():
        ours = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        own = name == part.component
        _put(component, convert_unet_state_dict_to_peft(ours) if own else text_from_file(component, ours))


def _put(model: Any, weights: dict[str, Any]) -> None:
    from peft.utils import set_peft_model_state_dict

    outcome = set_peft_model_state_dict(model, weights, adapter_name="default")
    if outcome.unexpected_keys:
        kind = type(without_adapters(model)).__name__
        raise RuntimeError(f"adapter weights that this {kind} has no place for: {outcome.unexpected_keys[:3]}")


def save_result(model: Any, part: Trained, vae: Any, args: PipelineArguments, output_dir: str) -> None:
    """Adapters, or a whole pipeline that `from_pretrained(output_dir)` loads.

    Raises:
        RuntimeError: the pipeline that training began with cannot be loaded any more; the model alone is saved.
    """
    if args.adapts:
        save_trained(model, part, output_dir, lora=True)
        if without_adapters(model) is not model:
            write_card(part.component, args, str(kind_of(args.peft_config)), output_dir)
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
