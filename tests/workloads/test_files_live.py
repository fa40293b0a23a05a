"""A training file's estimate is what a live run of its entries takes, read by the file's own library, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from test_trl_trainers import ROW, TOKENS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    LlamaConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.training_file import TRL, read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.trl_trainers import TRL_TRAINERS, _tokenizer

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.filterwarnings("ignore")]
QUIET = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
         "max_steps": 2, "gradient_checkpointing": False, "eval_strategy": "no"}  # fmt: skip
OF_LIVE = ("gradient_checkpointing_kwargs", "output_dir", "num_train_epochs", "warmup_ratio", "overwrite_output_dir")
FILES: dict[str, str] = {
    "trl full": "learning_rate: 1.0e-5\nbf16: true\nmax_length: 24\nper_device_train_batch_size: 3\n"
    "gradient_accumulation_steps: 2\ngradient_checkpointing: true\noptim: adamw_torch\nmax_grad_norm: 0.5\n"
    "dataset_name: a/b\nchat_template: x\nlog_level: info\npush_to_hub: false\n",
    "trl lora": "use_peft: true\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: [q_proj, v_proj, up_proj]\n"
    "lora_dropout: 0.1\ndtype: bfloat16\nbf16: true\nmax_length: 24\nper_device_train_batch_size: 2\n"
    "gradient_checkpointing: false\ndataset_mixture: {datasets: [{id: a}]}\n",
    "dpo lora": "use_peft: true\nlora_r: 4\nlora_modules_to_save: [lm_head]\nbeta: 0.1\nmax_length: 24\nbf16: true\n"
    "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\ngradient_checkpointing: true\n",
    "llama_factory lora": "stage: sft\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\ntemplate: llama3\n"
    "cutoff_len: 24\nper_device_train_batch_size: 2\nbf16: true\nddp_timeout: 180000000\nplot_loss: true\n",
    "llama_factory full": "stage: sft\nfinetuning_type: full\ntemplate: qwen\ncutoff_len: 24\nbf16: true\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\noverwrite_cache: true\n",
    "axolotl lora": "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.05\nlora_target_linear: true\n"
    "sequence_len: 24\nmicro_batch_size: 2\nbf16: auto\noptimizer: adamw_torch_fused\ngradient_checkpointing: true\n"
    "val_set_size: 0\nwandb_project: x\ndatasets: [{path: a, type: alpaca}]\nattn_implementation: sdpa\n",
    "axolotl full": "sequence_len: 24\nmicro_batch_size: 2\nbf16: true\noptimizer: adafactor\nspecial_tokens: {a: b}\n"
    "gradient_checkpointing: false\nattn_implementation: sdpa\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are much larger than the scalars that a Trainer keeps."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(vocab_size=4000, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


def predicted(content: Mapping[str, Any], kind: str, rows: int) -> tuple[int, TrainingSpec]:
    """The peak of the file's step on the CPU, and what is trained."""
    spec = TrainingSpec.of(**{"model": content.get("base_model") or content["model_name_or_path"],
                              **fields_of(read_training_file("run.yaml", kind, content=content).flags)})  # fmt: skip
    workload = load(spec, "cpu")
    apply_policy(workload.model, spec.policy)
    return workload.trace(rows).peak_allocated, spec


def measured(content: Mapping[str, Any], kind: str, model: Path, out: Path, spec: TrainingSpec) -> int:
    """The peak of a live run, whose arguments the file's own library reads from it, under the policy of `spec`."""
    plain = {name: value for name, value in content.items() if name not in OF_LIVE}
    started = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    given: dict[str, Any] = {"output_dir": str(out), "optim": "adamw_torch_fused"}
    if kind in TRL:
        name = TRL_TRAINERS[TRL[kind]]
        parser = HfArgumentParser((getattr(trl, f"{name}Config"), trl.ModelConfig))
        args, of_model = parser.parse_dict({**given, **plain, **QUIET}, allow_extra_keys=True)
        more: dict[str, Any] = {"peft_config": trl.get_peft_config(of_model), "processing_class": _tokenizer()}
        make, row = getattr(trl, f"{name}Trainer"), ROW[TRL[kind]]
        started = started.to(getattr(torch, of_model.dtype or "float32"))
    else:
        names = {"micro_batch_size": "per_device_train_batch_size", "optimizer": "optim"}
        plain = {names.get(name, name): value for name, value in plain.items()} | {"bf16": True}
        cls = TrainingArguments if kind == "axolotl" else Seq2SeqTrainingArguments
        (args,) = HfArgumentParser((cls,)).parse_dict({**given, **plain, **QUIET}, allow_extra_keys=True)
        rank = content.get("lora_r") or content.get("lora_rank")
        adapts = "adapter" in content or content.get("finetuning_type") == "lora"
        # Both load weights that are not trained in bf16; axolotl also those that are, but for embeddings, norms, head.
        started = started.to(torch.bfloat16 if adapts or kind == "axolotl" else torch.float32)
        if kind == "axolotl" and not adapts:
            for part, layer in started.named_modules():
                if "norm" in part or "embed" in part or part == "lm_head":
                    layer.to(torch.float32)
        if adapts:
            dropout = content.get("lora_dropout", 0.0)
            started = get_peft_model(started, LoraConfig(r=rank, lora_dropout=dropout, target_modules="all-linear"))
        more = {"data_collator": DataCollatorForLanguageModeling(_tokenizer(), mlm=False)}
        make, row = (Trainer if kind == "axolotl" else Seq2SeqTrainer), {"input_ids": [1] * TOKENS}
    rows = Dataset.from_list([row] * 2 * args.per_device_train_batch_size * args.gradient_accumulation_steps)
    trainer = make(started, args=args, train_dataset=rows, **more)
    ACCallback(spec.policy).attach(trainer)
    trainer.train()
    report = json.loads((out / "memory_report.json").read_text())["ranks"][0]
    return max(phase["allocated"] for phase in report["peaks"].values())


@pytest.mark.parametrize("name", FILES)
def test_live_run_of_a_file_takes_what_its_estimate_says(name: str, config: Path, tmp_path: Path) -> None:
    kind = name.partition(" ")[0]
    named = "base_model" if kind == "axolotl" else "model_name_or_path"
    content = {named: str(config), **yaml.safe_load(FILES[name])}
    rows = content.get("micro_batch_size") or content["per_device_train_batch_size"]
    expected, spec = predicted(content, kind, rows)
    assert measured(content, kind, config, tmp_path, spec) == pytest.approx(expected, rel=2e-3)
