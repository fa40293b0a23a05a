"""A U-Net and its text encoders as one model, where both are trained: from tokens and noisy latents on.

So a policy, a trace, accelerate and a checkpoint have one model to deal with. Prompts are not encoded in advance: a
row keeps its tokens, and each step encodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.diffusion import noise_batch

from .noise import conditions

NAMES = ("text_encoder", "text_encoder_2")  # as pipelines call them
IDS = ("input_ids", "input_ids_2")
_FLAT = "text_model."  # in front of the names in files: transformers' CLIP had it, and other tools still have


class TextAndUNet(nn.Module):
    """A U-Net and its text encoders: {"sample", "timestep", "input_ids", ...} in, the U-Net's prediction out."""

    def __init__(self, unet: Any, text_encoders: Sequence[Any]) -> None:
        super().__init__()
        self.unet = unet
        for name, encoder in zip(NAMES, text_encoders, strict=False):
            self.add_module(name, encoder)

    @property
    def text_encoders(self) -> dict[str, Any]:
        """By their names in a pipeline."""
        return {name: getattr(self, name) for name in NAMES if hasattr(self, name)}

    def encode(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Prompts as the pipeline takes them, of `input_ids` and, for SDXL, `input_ids_2` (B, length)."""
        return encoded_text(list(self.text_encoders.values()), ids)

    def forward(self, sample: Tensor, timestep: Tensor, time_ids: Tensor | None = None, **ids: Tensor) -> Any:
        """As the U-Net's; `time_ids` (B, 6) are SDXL's."""
        encoded: dict[str, Any] = {**self.encode(ids), "time_ids": time_ids}
        return self.unet(sample, timestep, **conditions(encoded))


def encoded_text(text_encoders: Sequence[Any], ids: dict[str, Tensor]) -> dict[str, Tensor]:
    """`prompt_embeds` (B, length, width); of two encoders, which is SDXL, plus `pooled_prompt_embeds` (B, width)."""
    if len(text_encoders) == 1:
        return {"prompt_embeds": text_encoders[0](ids["input_ids"])[0]}
    outputs = [encoder(ids[name], output_hidden_states=True) for encoder, name in zip(text_encoders, IDS, strict=True)]
    # SDXL was trained on the last layer but one, without the final norm, and the second encoder's pooled output.
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": outputs[1].text_embeds}


def components_of(model: Any, component: str) -> dict[str, Any]:
    """What of a pipeline `model` is, by the pipeline's names; `component` if it is but one."""
    return {"unet": model.unet, **model.text_encoders} if isinstance(model, TextAndUNet) else {component: model}


def example_inputs(model: nn.Module, rows: int, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """What the U-Net, alone or with its text encoders, is called with, as zeros, of latents (h, w)."""
    if not isinstance(model, TextAndUNet):
        return noise_batch(without_adapters(model), rows, shape, dtype)
    inputs = noise_batch(model.unet, rows, shape, dtype)
    given = {name: inputs[name] for name in ("sample", "timestep")}
    if "added_cond_kwargs" in inputs:
        given["time_ids"] = inputs["added_cond_kwargs"]["time_ids"]
    for name, encoder in zip(IDS, model.text_encoders.values(), strict=False):
        given[name] = torch.zeros(rows, encoder.config.max_position_embeddings, dtype=torch.long)
    return given


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
