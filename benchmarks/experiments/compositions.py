"""The effect of AMP, LoRA, accumulation, offload, DDP, FSDP2 and ZeRO on the peak, with and without checkpointing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from ckpt_ft.memory.record.tracker import Tracker

from .common import Case, Section, mb, measure, predict, under
from .models import adamw, transformer


@dataclass(frozen=True)
class Recipe:
    """One way to train a small Llama.

    Attributes:
        layers, width, vocabulary, batch, length: its size; `batch` is the batch of an optimizer step.
        autocast: the device whose autocast rules are used, "" for none.
        lora: LoRA rank, 0 for all weights.
        micro: micro-batches per optimizer step.
    """

    layers: int = 12
    width: int = 768
    vocabulary: int = 32000
    batch: int = 8
    length: int = 1024
    autocast: str = ""
    lora: int = 0
    micro: int = 1

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            vocab_size=self.vocabulary,
            use_cache=False,
        )
        model: nn.Module = LlamaForCausalLM(config).train()
        if self.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=self.lora, target_modules="all-linear"))
        return model

    def step(self, model: nn.Module, optimizer: Any) -> None:
        device = next(model.parameters()).device
        for _ in range(self.micro):
            ids = torch.zeros(self.batch // self.micro, self.length, dtype=torch.long, device=device)
            with torch.autocast(self.autocast, torch.bfloat16) if self.autocast else contextlib.nullcontext():
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    @property
    def case(self) -> Case:
        return Case(self.build, self.step, _adamw_of_trained)


def _adamw_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def compositions(images: Path, quick: bool) -> Section:
    """One table for a single device, and one for two ranks."""
    section = Section("Compositions")
    small = Recipe(layers=2, width=32, vocabulary=64, batch=4, length=32)
    full = replace(small, batch=8) if quick else Recipe()
    section.text(
        f"The predictions are for a Llama of {full.layers} layers, width {full.width}, vocabulary {full.vocabulary},",
        f"batch {full.batch} x {full.length}, AdamW and fp32 weights on an A100-40GB. The small model has 2 layers",
        "and width 32 and runs on the CPU.",
    )
    ways: dict[str, tuple[Callable[[Recipe, str], Recipe], str]] = {
        "plain": (lambda r, _: r, ""),
        "AMP (bf16 autocast)": (lambda r, device: replace(r, autocast=device), ""),
        "LoRA, rank 8": (lambda r, _: replace(r, lora=8), ""),
        "gradient accumulation, 4 micro-batches": (lambda r, _: replace(r, micro=4), ""),
        "CPU offload of what is saved": (lambda r, _: r, "offload"),
        "AMP and LoRA": (lambda r, device: replace(r, autocast=device, lora=8), ""),
        "AMP, LoRA and the head in chunks": (lambda r, device: replace(r, autocast=device, lora=8), "head"),
    }
    rows = []
    for name, (change, term) in ways.items():
        cells = [name]
        for policy in (term or "none", f"full,{term}" if term else "full"):
            trace = predict(change(full, "cuda").case, policy, "a100-40gb")
            tiny = change(small, "cpu").case
            cells += [
                mb(trace.peak_allocated),
                f"{predict(tiny, policy, 'cpu').peak_allocated} / {measure(tiny, policy).peak_allocated}",
            ]
        rows.append(cells)
    section.table(
        [
            "composition",
            "peak MB, predicted, without",
            "small on CPU: predicted / measured bytes",
            "peak MB, predicted, with `full`",
            "small on CPU: predicted / measured bytes",
        ],
        rows,
    )
    section.text(
        "`offload` is predicted for a GPU only: a CPU has no second memory to offload to, so its tracked bytes do not",
        "fall.",
    )
    _ranks(section, quick)
    return section


def _ranks(section: Section, quick: bool) -> None:
    """Measures rank 0's peak with two gloo ranks on the CPU."""
    ways = [
        "one process",
        "DDP",
        "DDP, gradients as bucket views",
        "FSDP2, resharded after forward",
        "FSDP2, not resharded",
    ]
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, ways, 2 if quick else 6), nprocs=2)
        peaks = json.loads((Path(folder) / "peaks.json").read_text())
    section.text(
        f"The last table is of several processes: {2 if quick else 6} transformer blocks of width 128, 2 x 64 tokens",
        "a rank, fp32, AdamW, two gloo ranks on the CPU. It has the bytes of rank 0. FSDP2 shards each block.",
    )
    section.table(
        ["composition", "peak bytes, measured, `none`", "`full`", "`full` saves"],
        [[way, str(none), str(full), f"{100 * (1 - full / none):.0f} %"] for way, (none, full) in peaks.items()],
    )
    if importlib.util.find_spec("deepspeed") is None:
        section.text(
            "DeepSpeed ZeRO-2 and ZeRO-3: not measured, DeepSpeed is not installed and its kernels want a GPU.",
            "`accelerate_configs/deepspeed_zero2.yaml` and `deepspeed_zero3.yaml` launch them; ZeRO-3 shards what",
            "FSDP2 resharded after forward shards (parameters, gradients, optimizer state), ZeRO-2 all of these",
            "but the parameters.",
        )


def _rank(rank: int, folder: str, ways: list[str], blocks: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    peaks = {way: [_peak(way, policy, blocks) for policy in ("none", "full")] for way in ways}
    if rank == 0:
        (Path(folder) / "peaks.json").write_text(json.dumps(peaks))
    dist.barrier()
    dist.destroy_process_group()


def _peak(way: str, policy: str, blocks: int) -> int:
    """Returns the peak bytes of this rank's second step."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = transformer(blocks, 128, 4)
    with under(model, policy):
        run: nn.Module = model
        if way.startswith("DDP"):
            run = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view="views" in way)
        if way.startswith("FSDP2"):
            for block in [*model, model]:
                fully_shard(block, reshard_after_forward="not" not in way)
        optimizer = adamw(run)
        with Tracker(run, optimizer) as tracker:
            for _ in range(2):
                tracker.start_step()
                run(torch.randn(2, 64, 128)).square().mean().backward()
                optimizer.step()
                run.zero_grad(set_to_none=True)
        return tracker.trace().peak_allocated
