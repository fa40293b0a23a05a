"""Traces of published fine-tuning steps of FLUX.2-klein-4B with 31 methods.

The rows are benchmarks/data/flux2_klein_peft.json, whose README describes the loop. Nothing is downloaded: the
transformer is built from its published sizes on the meta device and the adapters from the row's configuration.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from peft import AdaLoraModel, PeftModel, get_peft_config, get_peft_model
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

from ckpt_ft.memory.allocator.caching_allocator import Block, CachingAllocator
from ckpt_ft.memory.allocator.settings import expandable_segments
from ckpt_ft.memory.fake.step import trace_steps
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.adapters import Valueless

ROWS = Path(__file__).resolve().parent / "data" / "flux2_klein_peft.json"
BATCH, LATENTS, TEXT, IMAGES = 2, (128, 32, 32), (512, 7680), 14
STRETCHES, STRETCHES_WHOLE = 8, 3  # evaluated every 100 of 750 steps, or of 300 with full fine-tuning
STEPS = 6  # of a stretch, after which the layout of the memory repeats
_RESULTS = ("rank_pattern",)  # number of ranks that AdaLoRA had pruned at the end


def published() -> dict[str, dict[str, Any]]:
    """Returns the rows by name of the method."""
    rows: dict[str, dict[str, Any]] = json.loads(ROWS.read_text(encoding="utf-8"))
    return {name.replace("--flux2-klein-", " "): row for name, row in rows.items()}


class Run(nn.Module):
    """On the GPU are a DINOv2-base that judges images, the transformer with adapters, and the loop's variables."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        with torch.device("meta"):
            self.evaluator = Dinov2Model(Dinov2Config(image_size=518, patch_size=14)).eval().requires_grad_(False)
        self.transformer = transformer
        self.now = SimpleNamespace()  # variables of a step that live until the next one assigns to them


def build(row: dict[str, Any]) -> Run:
    """Returns the transformer in bf16 without values, with adapters cast as PEFT does, each block checkpointed.

    Adapters whose sizes depend on values have a real one, on the CPU.
    """
    device = "cpu" if (row["peft_config"] or {}).get("peft_type") == "SHIRA" else "meta"
    with torch.device(device), Valueless():
        model: nn.Module = Flux2Transformer2DModel(
            num_layers=5, num_single_layers=20, num_attention_heads=24, attention_head_dim=128,
            joint_attention_dim=7680, guidance_embeds=False,
        ).to(torch.bfloat16)  # fmt: skip
        model.enable_gradient_checkpointing()  # type: ignore[operator]
        if row["peft_config"] is not None:
            given = {name: value for name, value in row["peft_config"].items() if name not in _RESULTS}
            model = get_peft_model(model, get_peft_config(given))
    return Run(model).train()


def step(run: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step of the published loop, with data cached on the GPU."""
    now = run.now
    rows = torch.zeros(BATCH, dtype=torch.long)
    now.latents = CACHE["latents"].index_select(0, rows)
    now.prompts = CACHE["prompts"].index_select(0, rows)
    now.text_ids = CACHE["text_ids"].index_select(0, rows)
    positions = torch.cartesian_prod(torch.arange(1), torch.arange(32), torch.arange(32), torch.arange(1))
    now.image_ids = positions.unsqueeze(0).expand(BATCH, -1, -1)
    now.noise = torch.randn_like(now.latents)
    now.sigmas = torch.rand(BATCH, dtype=torch.bfloat16).view(-1, 1, 1, 1)
    now.noisy = (1.0 - now.sigmas) * now.latents + now.sigmas * now.noise
    now.packed = now.noisy.reshape(BATCH, LATENTS[0], -1).permute(0, 2, 1)
    optimizer.zero_grad(set_to_none=True)
    now.prediction = run.transformer(
        hidden_states=now.packed, timestep=torch.rand(BATCH), guidance=None, encoder_hidden_states=now.prompts,
        txt_ids=now.text_ids, img_ids=now.image_ids, return_dict=False,
    )[0]  # fmt: skip
    now.prediction = unpack(now.prediction[:, : now.packed.size(1)], now.image_ids)
    now.weighting = torch.ones_like(now.sigmas)
    now.target = now.noise - now.latents
    error = (now.weighting.float() * (now.prediction.float() - now.target.float()) ** 2).reshape(BATCH, -1)
    now.loss = torch.mean(error, 1).mean()
    del error
    now.loss.backward()
    nn.utils.clip_grad_norm_(run.transformer.parameters(), 1.0)
    optimizer.step()
    if isinstance(run.transformer, PeftModel) and isinstance(run.transformer.base_model, AdaLoraModel):
        run.transformer.base_model.update_and_allocate(1)


def unpack(tokens: Tensor, ids: Tensor) -> Tensor:
    """Returns tokens (B, 1024, 128) in their spatial order: (B, 128, 32, 32)."""
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
    """Traces the row's third step for its GPU; the second is the same."""
    run = build(row)
    try:
        return trace_steps(run, [step] * 3, make_optimizer=adamw, device="l40s")
    finally:
        run.now.__dict__.clear()


def reserved_by_run(row: dict[str, Any], trace: StepTrace) -> int:
    """Returns the reserved bytes of the published run, with the cache emptied after each evaluation."""
    return peak_reserved(trace, STRETCHES if row["peft_config"] else STRETCHES_WHOLE)


def adamw(run: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], lr=1e-4)


def peak_reserved(trace: StepTrace, stretches: int) -> int:
    """Returns the peak reserved bytes of a run of `stretches` stretches, with the cache emptied between them.

    `torch.cuda.empty_cache()` releases segments without a live block. Blocks that are live then keep the others, and
    the next step finds another layout than the first one did: from then on a run reserves up to 4 % more, or less.

    trace: of at least three steps; the last two must have the same allocations.
    """
    starts = [at for at, name in trace.marks if name == "step"] + [len(trace.events)]
    steps = [trace.events[start:stop] for start, stop in pairwise(starts)]
    made = ([event for event in step if event >= 0] for step in steps[-2:])
    heirs = dict(zip(*made, strict=True))  # from what a step leaves to what the next one leaves
    sizes = [storage.nbytes for storage in trace.storages]
    assert all(sizes[old] == sizes[new] for old, new in heirs.items()), "the last two steps differ"
    allocator = CachingAllocator(expandable_segments(trace.alloc_conf))
    live: dict[int, Block | None] = {}
    most = 0
    for stretch in range(stretches):
        for events in [steps[-1]] * STEPS if stretch else [trace.events]:
            live |= {old: live.pop(new) for old, new in heirs.items() if new in live}
            for event in events:
                if event >= 0:
                    live[event] = allocator.malloc(sizes[event])
                else:
                    allocator.free(live.pop(~event))
        most = max(most, allocator.reserved)  # without a limit, nothing is released before
        allocator.empty_cache()
    return most
