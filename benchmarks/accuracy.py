"""How far `trace_step` is from published measurements: a row for each, signed errors, median and worst.

    python benchmarks/accuracy.py                  # prints, and writes docs/accuracy.md
    python benchmarks/accuracy.py --rows 3 --no-write

Models are built from the numbers of benchmarks/data/t4_lora_steps.csv, on the meta device, offline; the training loop
is the one its README describes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from figures import resnet, twelve_blocks  # type: ignore[import-not-found]  # beside this script
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ckpt_ft.errors import run
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.standins.nf4 import prepare_kbit, to_nf4
from ckpt_ft.units import MIB

HERE = Path(__file__).parent
PHASES = ("forward", "backward", "optimizer")


def efficient_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """SDPA pinned to the memory-efficient kernel, keys and values repeated to the number of query heads."""
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa_efficient", efficient_attention)
AttentionMaskInterface.register("sdpa_efficient", sdpa_mask)


def build(row: dict[str, str]) -> nn.Module:
    """The row's model with its adapters, on the meta device."""
    theirs = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads"}
    ours = (
        "hidden_size",
        "num_layers",
        "num_attention_heads",
        "num_kv_heads",
        "intermediate_size",
        "vocab_size",
        "head_dim",
    )
    kind = "qwen2" if row["model_id"].startswith("Qwen/Qwen2") else "llama"  # Qwen2 has biases on q, k and v
    sizes = {theirs.get(name, name): int(row[name]) for name in ours}
    config = AutoConfig.for_model(
        kind, **sizes, tie_word_embeddings=row["tie_word_embeddings"] == "true", use_cache=False
    )
    rank = int(row["lora_rank"])
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", target_modules=row["lora_targets"].split("|")
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation=row["attention"])
        if row["quantization"] == "nf4":
            model = prepare_kbit(to_nf4(model))  # as the published runs did
        model = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def trace(row: dict[str, str]) -> StepTrace:
    """The row's step, traced for its card."""
    model = build(row)
    shape = int(row["batch_size"]), int(row["seq_len"])
    batch = torch.zeros(shape, dtype=torch.long)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    return trace_step(model, step, make_optimizer=adamw, device="t4")


def errors(row: dict[str, str], trace: StepTrace) -> dict[str, float]:
    """Signed relative errors: predicted over published, less one."""
    have = {"peak_allocated": trace.peak_allocated, "peak_reserved": trace.peak_reserved}
    have |= {f"peak_{phase}": trace.peaks[phase] for phase in PHASES}
    found = {name: have[name] / MIB / float(row[f"{name}_mib"]) - 1 for name in have}
    return {**found, "seconds": trace.seconds / float(row["step_seconds"]) - 1}


def label(row: dict[str, str]) -> str:
    """One row's name."""
    weights = "nf4" if row["quantization"] == "nf4" else "fp16"
    return f"{row['model_id'].split('/')[1]} {weights} {row['attention']} {row['batch_size']}x{row['seq_len']}"


def percent(error: float) -> str:
    return f"{100 * error:+.2f} %"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(found: dict[str, dict[str, float]], title: str) -> str:
    """Median and worst of each column, for the rows whose name contains `title`."""
    rows = [errors for name, errors in found.items() if title in name]
    cells = []
    for column in rows[0]:
        sizes = [abs(row[column]) for row in rows]
        cells.append(f"{100 * statistics.median(sizes):.2f} / {100 * max(sizes):.2f} %")
    return table([f"{title}, median / worst", *map(short, rows[0])], [[f"{len(rows)} rows", *cells]])


def short(column: str) -> str:
    return column.removeprefix("peak_")


def replay_rows(rows: Sequence[dict[str, str]]) -> tuple[str, float]:
    """The table of the T4 rows with its summaries, and the rank correlation of the seconds."""
    found, have, want = {}, [], []
    for row in rows:
        step = trace(row)
        found[label(row)] = errors(row, step)
        have.append(step.seconds)
        want.append(float(row["step_seconds"]))
        print(label(row), *(f"{short(k)} {percent(v)}" for k, v in found[label(row)].items()), flush=True)
    columns = list(next(iter(found.values())))
    body = table(["row", *map(short, columns)], [[name, *map(percent, e.values())] for name, e in found.items()])
    kinds = [kind for kind in ("fp16", "nf4") if any(kind in name for name in found)]
    rank = rank_correlation(have, want) if len(rows) > 2 else 1.0
    return "\n\n".join([body, *(summary(found, kind) for kind in kinds)]), rank


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: of the ranks, where equal values share the mean of theirs."""
    ranks = ([sum((x < y) + (x <= y) for x in values) for y in values] for values in (a, b))
    return statistics.correlation(*ranks)


def replay_figures() -> str:
    """The table of ResNet-50 and the twelve blocks."""
    lines = []
    for name, published, traced, step in (*resnet(), *twelve_blocks()):
        lines.append(
            [name, f"{published:.0f}", f"{traced:.0f}", percent(traced / published - 1), f"{1e3 * step.seconds:.0f}"]
        )
        print(*lines[-1], flush=True)
    return table(["workload", "published MB", "traced MB", "error", "predicted ms"], lines)


def document(rows: str, rank: float, figures: str) -> str:
    """docs/accuracy.md."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    return f"""# How true a trace is

Made by `python benchmarks/accuracy.py` with {versions}, on a CPU. What is called traced or predicted is; what it is
compared with was measured by others (benchmarks/data/README.md). Errors are signed: predicted over published, less 1.

## LoRA steps on a T4

{rows}

Seconds: rank correlation over these rows {rank:.3f}.

What is left:
- fp16, allocated: where an error is not zero, a large block keeps up to 1 MiB that is not split off, and which block
  that is depends on what the process loaded and freed before the first step.
- NF4, allocated: the same; quantising while loading leaves holes, and the base is up to 9 MiB above its tensors in the
  published runs (Qwen). The trace starts from a clean load.
- reserved: also the holes that loading leaves, which a trace does not have, most visible where the whole step is
  small; published repeats differ by up to 12 MiB themselves.
- seconds: a roofline, not a simulation (memory/record/cost.py); NF4's kernels and the memory-efficient attention are
  its weak spots.

## ResNet-50 on a T4, twelve blocks on an A100

{figures}

Megabytes of 1e6 bytes, allocated. What is left in ResNet-50 is convolution workspace: which algorithm cuDNN takes for
strided and 1x1 convolutions is not documented, and the trace takes none for them (memory/rules/cudnn.py). In the
twelve blocks it grows with the number of models that were trained before: something of theirs was still alive.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="only the first N rows of the CSV, and no figures")
    parser.add_argument("--no-write", action="store_true", help="leave docs/accuracy.md as it is")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with (HERE / "data" / "t4_lora_steps.csv").open() as file:
        rows = list(csv.DictReader(file))[: arguments.rows]
    table_of_rows, rank = replay_rows(rows)
    print(f"rank correlation of the seconds: {rank:.3f}")
    if arguments.rows is not None:
        return 0
    figures = replay_figures()
    if not arguments.no_write:
        (HERE.parent / "docs" / "accuracy.md").write_text(document(table_of_rows, rank, figures))
    return 0


if __name__ == "__main__":
    run(main)
