"""Writes docs/settings.md from the table of settings: python benchmarks/settings.py"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ckpt_ft.spec.optimizers import OPTIMIZERS
from ckpt_ft.spec.settings import KEYS, LEFT_OUT, LIVE, MODELLED, NO_EFFECT, REFUSED, VALUE, Entry, table

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
TITLES = {
    "*": "every library, by pattern",
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
    "llama_factory.v1": "LLaMA-Factory v1",
    "llama_factory.v1.peft": "LLaMA-Factory v1: peft_config",
    "llama_factory.v1.quant": "LLaMA-Factory v1: quant_config",
    "llama_factory.v1.kernel": "LLaMA-Factory v1: kernel_config",
    "llama_factory.v1.dist": "LLaMA-Factory v1: dist_config",
    "llama_factory.v1.optim": "LLaMA-Factory v1: optim_config",
}
INTRODUCTION = """# Settings

<!-- Made by `python benchmarks/settings.py` from ckpt_ft/spec/settings.ini. -->

What `ckpt-ft` makes of each setting of another library: in a file (`--config`, `--launch`), on the command line, or of
a live `Trainer`. There are five answers:

- **modelled**: the prediction changes with the setting.
- **no effect**: neither memory nor time of a step depends on it.
- **left out**: it is not modelled, but the answer comes: one line on top ("not modelled: ...") names the setting and
  what it would move. A name that is not in these tables is left out, too.
- **live**: a live `Trainer`'s prediction runs it, because it traces the trainer's own code. From a file or on the
  command line it is left out.
- **refused**: the answer would be another run's: another model, another algorithm, another launcher. The command ends
  with one line and exit code 2.

With a live `Trainer` the report says "no prediction" for what is left out or refused, and why; training goes on.
Null, false, 0, empty and the library's default are neither refused nor left out. `--strict`
refuses what is left out; `--ignore NAME` goes on without a setting, which the head of the answer then names.
"""


def page() -> str:
    """Returns the text of docs/settings.md."""
    kinds = (MODELLED, NO_EFFECT, LIVE, LEFT_OUT, REFUSED)
    lines = [INTRODUCTION, "## Counts", "", f"| settings of | {' | '.join(kinds)} |", "|---|---:|---:|---:|---:|---:|"]
    total: Counter[str] = Counter()
    for section, entries in table().items():
        counts = Counter(MODELLED if entry.kind == KEYS else entry.kind for entry in entries.values())
        total += counts
        lines.append(f"| {TITLES[section]} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    lines.append(f"| all | {' | '.join(str(total[kind]) for kind in kinds)} |")
    lines += ["", f"Modelled optimizers, by the names of the libraries: {', '.join(map(_code, OPTIMIZERS))}.", ""]
    lines += ["Refused: `adamw_torch_xla`, which needs a TPU.", ""]
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
        return f"modelled, key by key: {', '.join(TITLES[section] for section in entry.text.split(', '))}"
    if entry.kind in (MODELLED, VALUE):
        return f"modelled: {_code(entry.text)}"
    return f"{entry.kind}: {entry.text}"


def _code(name: str) -> str:
    return f"`{name}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
