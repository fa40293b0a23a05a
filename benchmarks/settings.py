"""Writes docs/settings.md from the table of settings: python benchmarks/settings.py"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ckpt_ft.spec.optimizers import OPTIMIZERS
from ckpt_ft.spec.settings import KEYS, LIVE, MODELLED, NO_EFFECT, REFUSED, VALUE, Entry, table

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
TITLES = {
    "ckpt_ft": "ckpt_ft: flags of every recipe",
    "recipes": "ckpt_ft: flags of the recipes for text and images",
    "recipes.diffusion": "ckpt_ft: flags of the diffusion recipes",
    "transformers": "transformers: TrainingArguments and Seq2SeqTrainingArguments",
    "transformers.checkpointing_kwargs": "transformers: gradient_checkpointing_kwargs",
    "transformers.from_pretrained": "transformers: from_pretrained, and TRL's model_init_kwargs",
    "transformers.quantization_config": "transformers: quantisation configurations",
    "trl": "TRL: every trainer",
    "trl.sft": "TRL: SFTConfig",
    "trl.dpo": "TRL: DPOConfig",
    "trl.kto": "TRL: KTOConfig",
    "trl.reward": "TRL: RewardConfig",
    "trl.rollouts": "TRL: GRPOConfig and RLOOConfig",
    "trl.model": "TRL: ModelConfig and ScriptArguments",
    "peft": "PEFT: every configuration",
    "accelerate": "accelerate: configuration files",
    "accelerate.fsdp": "accelerate: FSDP, and fsdp_config of TrainingArguments",
    "accelerate.deepspeed": "accelerate: DeepSpeedPlugin",
    "accelerate.dynamo": "accelerate: TorchDynamoPlugin",
    "accelerate.fp8": "accelerate: FP8 recipes",
    "accelerate.parallelism": "accelerate: ParallelismConfig",
    "accelerate.accelerator": "accelerate: AcceleratorConfig, gradient accumulation, data loaders and DDP",
    "deepspeed": "DeepSpeed: configuration files",
    "deepspeed.precision": "DeepSpeed: bf16 and fp16",
    "deepspeed.compile": "DeepSpeed: compile",
    "deepspeed.zero_optimization": "DeepSpeed: zero_optimization",
    "deepspeed.offload": "DeepSpeed: offload_optimizer and offload_param",
    "diffusers": "diffusers: training scripts",
    "axolotl": "axolotl",
    "llama_factory": "LLaMA-Factory",
}
INTRODUCTION = """# Settings

<!-- Made by `python benchmarks/settings.py` from ckpt_ft/spec/settings.ini. -->

What `ckpt-ft` makes of each setting of another library: in a file (`--config`, `--launch`), on the command line, or of
a live `Trainer`. There are four answers:

- **modelled**: the prediction changes with the setting.
- **no effect**: neither memory nor time of a step depends on it.
- **live**: a live `Trainer`'s prediction runs it, because it traces the trainer's own code. In a file or on the
  command line it is refused.
- **refused**: it is not modelled. The command ends with one line and exit code 2. With a live `Trainer` the report
  says "no prediction" and the reason, and training goes on.

A value that is null, false, 0 or empty is never refused, and neither is a default. `--ignore NAME` goes on without a
setting that is refused or unknown; the head of the answer then names it.
"""


def page() -> str:
    """Returns the text of docs/settings.md."""
    kinds = (MODELLED, NO_EFFECT, LIVE, REFUSED)
    lines = [INTRODUCTION, "## Counts", "", "| settings of | modelled | no effect | live | refused | unknown |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    total: Counter[str] = Counter()
    for section, entries in table().items():
        counts = Counter(MODELLED if entry.kind == KEYS else entry.kind for entry in entries.values())
        total += counts
        lines.append(f"| {TITLES[section]} | {' | '.join(str(counts[kind]) for kind in kinds)} | 0 |")
    lines.append(f"| all | {' | '.join(str(total[kind]) for kind in kinds)} | 0 |")
    lines += ["", f"Modelled optimizers, by the names of the libraries: {', '.join(map(_code, OPTIMIZERS))}.", ""]
    lines += ["Refused: `adamw_torch_xla` and `adamw_torch_npu_fused`, which need a TPU or an NPU.", ""]
    for section, entries in table().items():
        lines += [f"## {TITLES[section]}", "", "| setting | answer |", "|---|---|"]
        groups: dict[str, list[str]] = {}
        for name, entry in entries.items():
            groups.setdefault(_answer(entry), []).append(name)
        lines += [f"| {', '.join(map(_code, names))} | {answer} |" for answer, names in groups.items()]
        lines.append("")
    return "\n".join(lines)


def _answer(entry: Entry) -> str:
    said = [_words(entry)]
    groups: dict[str, list[str]] = {}
    for value, one in entry.values.items():
        groups.setdefault(_words(one), []).append(value)
    said += [
        f"{', '.join(_code(value) if value else 'empty' for value in values)}: {one}" for one, values in groups.items()
    ]
    return "; ".join(said)


def _words(entry: Entry) -> str:
    if entry.kind == KEYS:
        return f"modelled, key by key: {TITLES[entry.text]}"
    if entry.kind in (MODELLED, VALUE):
        return f"modelled: {_code(entry.text)}"
    return f"{entry.kind}: {entry.text}"


def _code(name: str) -> str:
    return f"`{name}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
