"""Published steps of loops that no `TrainingSpec` describes, each traced as its own code does it.

Models are built from the numbers of the rows on the meta device, offline; data/README.md describes the rows.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.experiments.common import FeedForward, SelfAttention
from benchmarks.pages import DATA
from ckpt_ft import trace_step
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.optimizers import LAYOUTS, Tabulated
from ckpt_ft.standins.quantised_layers import prepare_kbit, to_nf4
from ckpt_ft.units import MIB
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.optimizers import make_optimizer
from ckpt_ft.workloads.workload import update

Cells = dict[str, str]


def rows_of(name: str) -> list[Cells]:
    """Returns the rows of a CSV file in data/."""
    with (DATA / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- LoRA steps on a Tesla T4


def efficient_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """SDPA with the memory-efficient kernel only; keys and values are repeated for all query heads."""
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa_efficient", efficient_attention)
AttentionMaskInterface.register("sdpa_efficient", sdpa_mask)
T4_PHASES = ("forward", "backward", "optimizer")
_T4_SIZES = {
    "hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "intermediate_size": "intermediate_size", "vocab_size": "vocab_size",
    "head_dim": "head_dim",
}  # fmt: skip


def t4_model(row: Cells) -> nn.Module:
    """Returns the row's model with its adapters, on the meta device."""
    kind = "qwen2" if row["model_id"].startswith("Qwen/Qwen2") else "llama"  # Qwen2 has biases on q, k and v
    sizes = {ours: int(row[theirs]) for theirs, ours in _T4_SIZES.items()}
    tied, rank = row["tie_word_embeddings"] == "true", int(row["lora_rank"])
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied, use_cache=False)
    targets = row["lora_targets"].split("|")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation=row["attention"])
        if row["quantization"] == "nf4":
            model = prepare_kbit(to_nf4(model))  # as the published runs did
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", target_modules=targets)
        model = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def t4_trace(row: Cells) -> StepTrace:
    """Traces the row's step for its GPU."""
    batch = torch.zeros(int(row["batch_size"]), int(row["seq_len"]), dtype=torch.long)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    return trace_step(t4_model(row), step, make_optimizer=adamw, device="t4")


def t4_errors(row: Cells, trace: StepTrace) -> dict[str, float]:
    """Returns signed relative errors: predicted over published, minus one."""
    have = {"allocated": trace.peak_allocated, "reserved": trace.peak_reserved}
    have |= {phase: trace.peaks[phase] for phase in T4_PHASES}
    return {name: nbytes / MIB / float(row[f"peak_{name}_mib"]) - 1 for name, nbytes in have.items()}


def t4_label(row: Cells) -> str:
    weights = "nf4" if row["quantization"] == "nf4" else "fp16"
    return f"{row['model_id'].split('/')[1]} {weights} {row['attention']} {row['batch_size']}x{row['seq_len']}"


# --- BERT-large on a V100 of 16 GB

BERT_SIZES = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_BERT_CONTEXT = 1341  # MiB of the device: a process with one small tensor, whose segment has 2, uses 1,343


class AdamW(torch.optim.Optimizer):
    """The update of transformers.AdamW 4.15, with a temporary tensor per parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            gradient, state = parameter.grad, self.state[parameter]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
            state["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-6), value=-5e-5)


class _Softmax(torch.autograd.Function):
    """Softmax that saves its input for the backward pass, as PyTorch 1.10 did."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        out = scores.softmax(dim)
        ctx.save_for_backward(scores, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        scores, out = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, out, ctx.dim, scores.dtype), None


def _bert_optimizer(name: str) -> Callable[[nn.Module], Any]:
    if name == "adamw_hf":
        return lambda model: AdamW(model.parameters())
    if name == "adamw_8bit":  # created directly, without the Trainer's exception for embeddings
        return lambda model: Tabulated(model, replace(LAYOUTS[name], whole_embeddings=False), on_cpu=False)
    return lambda model: make_optimizer(model, name)


def bert_trace(row: Cells, as_then: bool = True) -> StepTrace:
    """Traces the row's step with the mask and softmax of 2022, or those of today.

    PyTorch 1.10 saved the input of a softmax besides its result (derivatives.yaml; since 1.11 only its dtype), and
    transformers 4.15 added a mask in float32 to the scores even if no row was padded.
    """
    batch, fp16 = int(row["batch"]), bool(row["fp16"])
    config = transformers.BertConfig(**BERT_SIZES, attn_implementation="eager")
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config).train()
    if row["checkpointing"]:
        model.gradient_checkpointing_enable()
    ids, labels = torch.randint(100, 30000, (batch, 512)), torch.zeros(batch, dtype=torch.long)
    scaler, softmax = torch.amp.GradScaler("cuda", enabled=fp16), functional.softmax

    def old_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        return _Softmax.apply(scores + torch.zeros(scores.shape[-1]), dim)

    def step(model: nn.Module, optimizer: Any) -> None:
        with patch.object(functional, "softmax", old_softmax if as_then else softmax):
            for _ in range(4 // batch):
                with torch.autocast("cuda", torch.float16, enabled=fp16):
                    loss = model(input_ids=ids, labels=labels).loss / (4 // batch)
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)

    return trace_step(model, step, make_optimizer=_bert_optimizer(row["optimizer"]), device="v100-16gb")


def bert_mib(trace: StepTrace) -> float:
    """Returns the MiB of the device that NVML reports."""
    return trace.peak_reserved / MIB + _BERT_CONTEXT


# --- forward and backward of BERT and GPT-2 in fp32 on four GPUs

_FP32: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert-large": (transformers.BertForMaskedLM, transformers.BertConfig, BERT_SIZES),
    "gpt2-large": (
        transformers.GPT2LMHeadModel, transformers.GPT2Config,
        {"n_embd": 1280, "n_layer": 36, "n_head": 20, "use_cache": False},
    ),
}  # fmt: skip


def fp32_trace(row: Cells) -> StepTrace:
    ids = torch.zeros(int(row["rows"]), int(row["tokens"]), dtype=torch.long)
    kind, config, settings = _FP32[row["model"]]

    def step(model: nn.Module, optimizer: object) -> None:
        model.zero_grad()
        model(input_ids=ids).logits.sum().backward()

    with torch.device("meta"):
        model = kind(config(**settings, attn_implementation="eager")).train()
    return trace_step(model, step, device=row["gpu"])


# --- a compiled ViT-huge with small optimizers, on an RTX 4070 Ti Super

VIT_GB = {"adamw_fused": 12.23, "adamw_8bit": 8.32, "ao_adamw_8bit": 8.33, "ao_adamw_4bit": 7.72}  # allocated


class ViT(nn.Module):
    """timm's vit_huge_patch14_224 with 45 classes."""

    def __init__(self, width: int = 1280) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 257, width))
        blocks = (nn.Sequential(SelfAttention(width, 16, False), FeedForward(width)) for _ in range(32))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 45)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


def vit_trace(optimizer: str) -> StepTrace:
    """Traces torchao's step (benchmarks/benchmark_low_bit_adam.py): compiled whole, bf16 autocast, batch 8."""
    with torch.device("meta"):
        model = ViT().train()

    def step(model: nn.Module, made: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(torch.empty(8, 3, 224, 224)), torch.zeros(8, dtype=torch.long))
        loss.backward()
        made.step()
        made.zero_grad()

    model.compile(fullgraph=True)
    return trace_step(model, step, make_optimizer=lambda m: make_optimizer(m, optimizer), device="rtx-4070-ti-super")


# --- prime-rl: Qwen3 under FSDP2, every block checkpointed and compiled


def prime_trace(row: Cells) -> StepTrace:
    """One rank's step, as its repository's benchmarks/scripts/run_single_benchmark.py makes it (January 2026).

    fp32 parameters, gradients and Adam states, bf16 computation, two micro-batches of one row. `sft` computes the loss
    of each token from fp32 logits; its loop deletes the name of the logits before the backward, but a dictionary still
    contains them. `rl` computes the loss in chunks; here it is that of ordinary training under the policy `head`,
    without what reinforcement learning adds.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    tokens, kind, gpu = int(row["tokens"]), row["kind"], row["gpu"]
    flash = 3 if gpu == "h100" and kind != "compiled" else 2
    spec = TrainingSpec.of(row["model"], seq_length=tokens, attn_implementation=f"flash_attention_{flash}")
    model: Any = load(spec, gpu).model
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_policy(model, f"{row['checkpointing']},head" if kind == "rl" else row["checkpointing"])
    for block in model.model.layers:
        block.compile()

    def sharded(model: Any) -> torch.optim.Optimizer:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        return torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: Any) -> None:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        labels = ids.clone()
        for _ in range(2):
            if kind != "rl":
                out = {"logits": model(input_ids=ids, use_cache=False).logits.float()}
                loss = functional.cross_entropy(out["logits"].flatten(0, 1), labels.flatten(), reduction="none").mean()
            else:
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with rank_of(int(row["gpus"])) as mesh:
        found = trace_step(model, step, make_optimizer=sharded, device=gpu)
    return replace(found, alloc_conf="expandable_segments:True")


def prime_experts_trace() -> StepTrace:
    """Qwen3-30B-A3B on eight H200: the step of one rank, with grouped products and the loss in chunks.

    Assumed: fp32 weights and Adam, bf16 computation, and a reduction of the gradients after each micro-batch.
    """
    spec = TrainingSpec.of(
        "Qwen/Qwen3-30B-A3B", seq_length=16384, mixed_precision="bf16", attn_implementation="flash_attention_2",
        launch=Launch("fsdp2", 8, mixed_precision="bf16"),
    )  # fmt: skip
    workload = load(spec, "h200")
    apply_policy(workload.model, "full,head")
    batch = workload.make_batch(1, None)

    def step(model: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            loss = workload.loss_of(model, dict(batch))
            loss.backward()
            del loss
        update(model, optimizer, 1.0)

    return replace(workload, loop=lambda samples, length: step).trace_of([step] * 2)
