"""The part of a pipeline that is trained: its adapters, its checkpoint files, and the saved result.

LoRA is saved as `pipe.load_lora_weights` reads it, every other adapter in PEFT's own files. Bad input raises
UserError, one line that names the flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import Accelerator
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ckpt_ft.training.models import adapter_of, sort_names
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.diffusion_models import (
    ATTENTION_PROJECTIONS,
    TRAINABLE_ENCODERS,
    TextAndUNet,
    add_text_adapters,
)

from .arguments import PipelineArguments
from .families import Family

# The settings of LoraConfig that `pipe.load_lora_weights` restores from a file.
_PIPELINE_SETTINGS = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "init_lora_weights", "use_rslora",
    "use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
}  # fmt: skip
_PLAIN_INITS = (True, False, "gaussian", "orthogonal")  # initialisations that do not change the base weights
TRAINED = "trained.safetensors"  # of a checkpoint: adapters by the names in the model
_CLIP_PREFIX = "text_model."  # of names in files: transformers' CLIP had it, and other tools still expect it


def components_of(model: Any, component: str) -> dict[str, Any]:
    """Returns the pipeline's components in `model`, by name: `component`, or a U-Net with its text encoders."""
    return {"unet": model.unet, **model.text_encoders} if isinstance(model, TextAndUNet) else {component: model}


def prepare(model: Any, args: PipelineArguments, dtype: torch.dtype) -> Any:
    """Returns `model` in train mode; with adapters its frozen weights are in `dtype` and the adapters in float32."""
    if isinstance(model, TextAndUNet):
        model.unet = prepare(model.unet, args, dtype)
        assert args.rank is not None, "DiffusionModelArguments sees to it"
        return add_text_adapters(model, args.rank, args.lora_alpha, args.lora_dropout)
    if args.adapts:
        if model.dtype != dtype:  # a transformer is loaded in it
            nn.Module.to(model, dtype)  # diffusers' own `to` warns about modules that should stay in float32
        model = _with_adapters(model, args)
        cast_training_params(model, dtype=torch.float32)
    return model.train()


def _with_adapters(model: Any, args: PipelineArguments) -> Any:
    """Freezes `model` and adds adapters: as diffusers does, or under PEFT's wrapper if pipelines cannot read them."""
    model.requires_grad_(False)
    targets = getattr(args, "lora_target_modules", None) or list(ATTENTION_PROJECTIONS)
    file = args.peft_config
    with library_reads(f"--lora_target_modules {' '.join(targets)}" if file is None else f"--peft_config {file}"):
        if file is not None:
            config = adapter_of(file, targets=lambda given: given or targets)
        else:
            config = LoraConfig(
                r=args.rank, lora_alpha=args.lora_alpha or args.rank, lora_dropout=args.lora_dropout,
                init_lora_weights="gaussian", target_modules=targets,
            )  # fmt: skip
        if _pipelines_read(config):
            model.add_adapter(config)
        else:
            model = get_peft_model(model, config)
            config.base_model_name_or_path = args.pretrained_model_name_or_path  # PEFT does not know the pipeline
    sort_names(config)
    return model


def _pipelines_read(config: PeftConfig) -> bool:
    if type(config) is not LoraConfig or config.init_lora_weights not in _PLAIN_INITS:
        return False
    ours, default = config.to_dict(), LoraConfig().to_dict()
    return {name for name, value in ours.items() if value != default[name]} <= _PIPELINE_SETTINGS


def parameter_groups(model: nn.Module, text_rate: float | None) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups; text encoders that are trained have a learning rate of their own."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    text = [p for name, p in trained if name.startswith(TRAINABLE_ENCODERS)]
    others = [p for name, p in trained if not name.startswith(TRAINABLE_ENCODERS)]
    return [{"params": others}, {"params": text, "lr": text_rate}] if text else [{"params": others}]


def register_checkpoint_hooks(accelerator: Accelerator, family: Family, lora: bool) -> None:
    """Makes `accelerator.save_state` write only what is trained, as diffusers does, and `load_state` read it.

    A LoRA checkpoint has no copy of the frozen model, and `pipe.load_lora_weights(checkpoint)` works on it.
    """

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(models[0])
            save_trained(model, family, output_dir, lora)
            if lora:
                save_file(trained_weights(model), Path(output_dir, TRAINED))
        weights.clear()  # accelerate would write what is left there

    def load(models: list[Any], input_dir: str) -> None:
        load_trained(accelerator.unwrap_model(models.pop()), family, input_dir, lora)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of `model` that are trained, by its own names; a file has them as they lie in memory."""
    return {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def load_trained(model: Any, family: Family, input_dir: str | Path, lora: bool) -> None:
    """Loads the weights of a checkpoint into `model`.

    Raises:
        OSError: a file does not exist.
        RuntimeError: the weights do not fit `model`.
    """
    if lora:
        weights = load_file(Path(input_dir, TRAINED))
        if weights.keys() != trained_weights(model).keys():
            raise RuntimeError(f"its adapters are of other layers than those of this {type(model).__name__}")
    else:
        weights = type(model).from_pretrained(input_dir, subfolder=family.component).state_dict()
    model.load_state_dict(weights, strict=not lora)


def save_trained(model: Any, family: Family, output_dir: str | Path, lora: bool) -> None:
    """Writes adapters for `pipe.load_lora_weights` or `PeftModel.from_pretrained`, else the component's folder."""
    if isinstance(model, PeftModel):
        model.save_pretrained(output_dir, save_embedding_layers=False)
        return
    if not lora:
        model.save_pretrained(Path(output_dir) / family.component)
        return
    layers: dict[str, Any] = {}
    for name, component in components_of(model, family.component).items():
        weights = get_peft_model_state_dict(component, save_embedding_layers=False)
        if name != family.component:  # all tools read the names of a text encoder below `text_model`
            weights = {f"{_CLIP_PREFIX}{key.removeprefix(_CLIP_PREFIX)}": value for key, value in weights.items()}
        layers[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(weights) if family.old_lora_names else weights
        layers[f"{name}_lora_adapter_metadata"] = component.peft_config["default"].to_dict()
    getattr(diffusers, family.pipeline).save_lora_weights(output_dir, **layers)


def save_result(model: Any, family: Family, vae: Any, args: PipelineArguments, output_dir: str) -> None:
    """Writes the adapters, or a whole pipeline that `from_pretrained(output_dir)` loads.

    Raises:
        RuntimeError: the pipeline that training began with cannot be loaded any more; the model alone is saved.
    """
    if args.adapts:
        save_trained(model, family, output_dir, lora=True)
        return
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            args.pretrained_model_name_or_path, vae=vae, revision=args.revision, variant=args.variant,
            **{family.component: model},
        )  # fmt: skip
    except Exception as error:  # whatever happened to its other parts, the trained weights must not be lost
        save_trained(model, family, output_dir, lora=False)
        raise RuntimeError(
            f"the {family.component} is in {output_dir}/{family.component}, and the rest of its pipeline cannot be "
            f"loaded: {error}"
        ) from error
    set_prediction_type(pipeline.scheduler, args)
    pipeline.save_pretrained(output_dir)


def set_prediction_type(scheduler: Any, args: PipelineArguments) -> None:
    prediction_type = getattr(args, "prediction_type", None)
    if prediction_type is not None:
        scheduler.register_to_config(prediction_type=prediction_type)
