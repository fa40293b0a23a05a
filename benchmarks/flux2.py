"""Fine-tuning steps of FLUX.2-klein-4B under 31 methods, traced as they were published.

The rows are benchmarks/data/flux2_klein_peft.json, its README says the loop. Nothing is downloaded: the transformer is
built from its published sizes on the meta device and the adapters from the row's configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from peft import AdaLoraModel, PeftModel, get_peft_config, get_peft_model
from torch import Tensor, nn

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace

ROWS = Path(__file__).resolve().parent / "data" / "flux2_klein_peft.json"
BATCH, LATENTS, TEXT, IMAGES = 2, (128, 32, 32), (512, 7680), 14
EVALUATOR = 86_580_480  # parameters of a DINOv2-base in fp32, resident in the published runs
NEED_VALUES = ("boft", "frod", "shira")  # adapters that are made from values: none on the meta device
_RESULTS = ("rank_pattern",)  # of a configuration: what AdaLoRA had pruned by the end


def published() -> dict[str, dict[str, Any]]:
    """Name of the method -> its row."""
    rows: dict[str, dict[str, Any]] = json.loads(ROWS.read_text(encoding="utf-8"))
    return {name.replace("--flux2-klein-", " "): row for name, row in rows.items()}


class Run(nn.Module):
    """What lies on the card: the transformer with its adapters, and the model that judges its images."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.evaluator = nn.Parameter(torch.empty(EVALUATOR, device="meta"), requires_grad=False)


def build(row: dict[str, Any]) -> Run:
    """The transformer in bf16 on the meta device, its adapters as PEFT casts them, each block checkpointed."""
    with torch.device("meta"):
        model: nn.Module = Flux2Transformer2DModel(
            num_layers=5, num_single_layers=20, num_attention_heads=24, attention_head_dim=128,
            joint_attention_dim=7680, guidance_embeds=False,
        ).to(torch.bfloat16)  # fmt: skip
        model.enable_gradient_checkpointing()  # type: ignore[operator]
        if row["peft_config"] is not None:
            given = {name: value for name, value in row["peft_config"].items() if name not in _RESULTS}
            model = get_peft_model(model, get_peft_config(given))
    return Run(model).train()


def step(run: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of the published loop, its data cached on the GPU."""
    rows = torch.zeros(BATCH, dtype=torch.long)
    latents = CACHE["latents"].index_select(0, rows)
    prompts = CACHE["prompts"].index_select(0, rows)
    text_ids = CACHE["text_ids"].index_select(0, rows)
    positions = torch.cartesian_prod(torch.arange(1), torch.arange(32), torch.arange(32), torch.arange(1))
    image_ids = positions.unsqueeze(0).expand(BATCH, -1, -1)
    noise = torch.randn_like(latents)
    sigmas = torch.rand(BATCH, dtype=torch.bfloat16).view(-1, 1, 1, 1)
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    packed = noisy.reshape(BATCH, LATENTS[0], -1).permute(0, 2, 1)
    optimizer.zero_grad(set_to_none=True)
    out = run.transformer(  # type: ignore[operator]
        hidden_states=packed, timestep=torch.rand(BATCH), guidance=None, encoder_hidden_states=prompts,
        txt_ids=text_ids, img_ids=image_ids, return_dict=False,
    )[0]  # fmt: skip
    prediction = unpack(out[:, : packed.size(1)], image_ids)
    target = noise - latents
    weighting = torch.ones_like(sigmas)
    error = (weighting.float() * (prediction.float() - target.float()) ** 2).reshape(BATCH, -1)
    loss = torch.mean(error, 1).mean()
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in run.parameters() if p.grad is not None], 1.0)
    optimizer.step()
    if isinstance(run.transformer, PeftModel) and isinstance(run.transformer.base_model, AdaLoraModel):
        run.transformer.base_model.update_and_allocate(1)


def unpack(tokens: Tensor, ids: Tensor) -> Tensor:
    """Tokens (B, 1024, 128) put to their places: (B, 128, 32, 32)."""
    images = []
    for data, position in zip(tokens, ids, strict=True):
        flat = position[:, 1].long() * 32 + position[:, 2].long()
        out = torch.zeros(1024, data.shape[1], dtype=data.dtype)
        out.scatter_(0, flat.unsqueeze(1).expand(-1, data.shape[1]), data)
        images.append(out.view(32, 32, -1).permute(2, 0, 1))
    return torch.stack(images)


CACHE = {
    "latents": torch.zeros(IMAGES, *LATENTS, dtype=torch.bfloat16),
    "prompts": torch.zeros(IMAGES, *TEXT, dtype=torch.bfloat16),
    "text_ids": torch.zeros(IMAGES, TEXT[0], 4, dtype=torch.bfloat16),
}


def trace(row: dict[str, Any]) -> StepTrace:
    """The row's step, traced for its card."""
    return trace_step(build(row), step, make_optimizer=adamw, device="l40s")


def adamw(run: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], lr=1e-4)
