"""A U-Net that may have its text encoders with it: what of a pipeline it is, their rate, their names in files."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ckpt_ft.workloads.pipeline_parts import TextAndUNet

_FLAT = "text_model."  # in front of the names in files: transformers' CLIP had it, and other tools still have


def components_of(model: Any, component: str) -> dict[str, Any]:
    """What of a pipeline `model` is, by the pipeline's names; `component` if it is but one."""
    return {"unet": model.unet, **model.text_encoders} if isinstance(model, TextAndUNet) else {component: model}


def with_text_rate(model: nn.Module, parameters: list[nn.Parameter], rate: float | None) -> list[dict[str, Any]]:
    """`parameters` of `model` as an optimizer takes them, those of its text encoders with a `rate` of their own."""
    if rate is None or not isinstance(model, TextAndUNet):
        return [{"params": parameters}]
    of_unet = {id(parameter) for parameter in model.unet.parameters()}
    text = [parameter for parameter in parameters if id(parameter) not in of_unet]
    return [{"params": [p for p in parameters if id(p) in of_unet]}, {"params": text, "lr": rate}]


def text_to_file(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapters of a text encoder under the names that all tools read, below `text_model`."""
    return {f"{_FLAT}{name.removeprefix(_FLAT)}": value for name, value in weights.items()}


def text_from_file(encoder: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `text_to_file` and diffusers' converter made, back under PEFT's names in `encoder`."""
    from diffusers.utils import convert_state_dict_to_peft

    flat = not hasattr(encoder, _FLAT[:-1])
    ours = {name.removeprefix(_FLAT) if flat else name: value for name, value in weights.items()}
    return dict(convert_state_dict_to_peft(ours))
