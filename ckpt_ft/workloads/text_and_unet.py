"""A U-Net and its text encoders as one model, where both are trained: from tokens and noisy latents on.

So a policy, a trace, accelerate and a checkpoint have one model to deal with. Prompts are not encoded in advance: a
row keeps its tokens, and each step encodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("text_encoder", "text_encoder_2")  # as pipelines call them
IDS = ("input_ids", "input_ids_2")
_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")  # the attention's projections, as in diffusers' scripts


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

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        time_ids: Tensor | None = None,
        return_dict: bool = True,
        **ids: Tensor,
    ) -> Any:
        """As the U-Net's; `time_ids` (B, 6) are SDXL's."""
        encoded: dict[str, Any] = {**self.encode(ids), "time_ids": time_ids}
        return self.unet(sample, timestep, return_dict=return_dict, **conditions(encoded))


def encoded_text(text_encoders: Sequence[Any], ids: dict[str, Tensor]) -> dict[str, Tensor]:
    """`prompt_embeds` (B, length, width); of two encoders, which is SDXL, plus `pooled_prompt_embeds` (B, width)."""
    if len(text_encoders) == 1:
        return {"prompt_embeds": text_encoders[0](ids["input_ids"])[0]}
    outputs = [encoder(ids[name], output_hidden_states=True) for encoder, name in zip(text_encoders, IDS, strict=True)]
    # SDXL was trained on the last layer but one, without the final norm, and the second encoder's pooled output.
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": outputs[1].text_embeds}


def conditions(encoded: dict[str, Tensor]) -> dict[str, Any]:
    """A U-Net's arguments of a prompt and, for SDXL, of sizes; prompts that it is to encode itself as their tokens."""
    if "prompt_embeds" not in encoded:
        return {name: value for name, value in encoded.items() if name == "time_ids" or name.startswith("input_ids")}
    given: dict[str, Any] = {"encoder_hidden_states": encoded["prompt_embeds"]}
    if "pooled_prompt_embeds" in encoded:
        given["added_cond_kwargs"] = {"text_embeds": encoded["pooled_prompt_embeds"], "time_ids": encoded["time_ids"]}
    return given


def text_inputs(inputs: dict[str, Any], text_encoders: Sequence[Any]) -> dict[str, Any]:
    """A U-Net's `inputs` as `TextAndUNet` takes them: full prompts of zeros in place of their encodings."""
    given = {name: inputs[name] for name in ("sample", "timestep")}
    if "added_cond_kwargs" in inputs:
        given["time_ids"] = inputs["added_cond_kwargs"]["time_ids"]
    return {**given, **blank_ids(text_encoders, len(given["sample"]))}


def blank_ids(text_encoders: Sequence[Any], prompts: int) -> dict[str, Tensor]:
    """Tokens (B, length) of so many full prompts for each encoder, all zeros."""
    return {
        name: torch.zeros(prompts, encoder.config.max_position_embeddings, dtype=torch.long)
        for name, encoder in zip(IDS, text_encoders, strict=False)
    }


def add_text_adapters(model: TextAndUNet, rank: int, alpha: int | None = None, dropout: float = 0.0) -> TextAndUNet:
    """LoRA in float32 on the frozen text encoders, of the U-Net's rank; `alpha`: the rank when left out."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    for encoder in model.text_encoders.values():
        encoder.add_adapter(
            LoraConfig(
                r=rank,
                lora_alpha=alpha or rank,
                lora_dropout=dropout,
                init_lora_weights="gaussian",
                target_modules=list(_TARGETS),
            )
        )
        cast_training_params(encoder, dtype=torch.float32)
    if len(model.text_encoders) > 1:
        _last_layer(model.text_encoders[NAMES[0]]).requires_grad_(False)  # SDXL reads that encoder in front of it
    return model.train()


def _last_layer(encoder: nn.Module) -> nn.Module:
    layers = next(module for name, module in encoder.named_modules() if name.endswith("encoder.layers"))
    assert isinstance(layers, nn.ModuleList)
    return layers[-1]
