"""A training file's estimate is what a live run of its entries takes, read by the file's own library, on the CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from test_trl_trainers import ROW, TOKENS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    LlamaConfig,
    MixtralConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from vision_language_configs import QWEN3

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
    "trl packed": "learning_rate: 1.0e-5\nbf16: true\nmax_length: 24\npacking: true\nper_device_train_batch_size: 3\n"
    "optim: adafactor\n",
    "trl qlora": "use_peft: true\nload_in_4bit: true\nuse_bnb_nested_quant: true\nlora_r: 8\nmax_length: 24\n"
    "bf16: true\nlora_target_modules: all-linear\ndtype: bfloat16\nper_device_train_batch_size: 2\n",
    "kto lora": "use_peft: true\nlora_r: 4\nbf16: true\nmax_length: 24\nper_device_train_batch_size: 2\n"
    "desirable_weight: 1.0\n",
    "reward full": "center_rewards_coefficient: 0.01\nbf16: true\nmax_length: 24\nper_device_train_batch_size: 2\n",
    "llama_factory freeze": "stage: sft\nfinetuning_type: freeze\nfreeze_trainable_layers: 2\ntemplate: qwen\n"
    "cutoff_len: 24\nbf16: true\nper_device_train_batch_size: 2\n",
    "llama_factory dpo": "stage: dpo\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\ntemplate: qwen\n"
    "pref_beta: 0.1\npref_loss: sigmoid\ncutoff_len: 24\nbf16: true\nper_device_train_batch_size: 2\n",
    "llama_factory kto": "stage: kto\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\ntemplate: qwen\n"
    "pref_beta: 0.1\ncutoff_len: 24\nbf16: true\nper_device_train_batch_size: 2\n",
    "axolotl qlora": "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\nsequence_len: 24\n"
    "micro_batch_size: 2\nbf16: auto\noptimizer: adamw_torch_fused\ngradient_checkpointing: true\n",
    "axolotl experts": "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_modules: [q_proj, o_proj]\n"
    "sequence_len: 24\nmicro_batch_size: 2\nbf16: auto\noptimizer: adamw_torch_fused\n",
    "llama_factory vision": "stage: sft\nfinetuning_type: full\nfreeze_vision_tower: true\nimage_max_pixels: 262144\n"
    "template: qwen3_vl_nothink\ncutoff_len: 24\nbf16: true\nper_device_train_batch_size: 1\n",
    "axolotl reward": "reward_model: true\nnum_labels: 1\nsequence_len: 24\nmicro_batch_size: 2\nbf16: auto\n"
    "optimizer: adamw_torch_fused\nattn_implementation: sdpa\ngradient_checkpointing: true\n",
    "axolotl unfrozen": "unfrozen_parameters: [lm_head.*, 'layers.[1-2].']\nsequence_len: 24\nmicro_batch_size: 2\n"
    "bf16: true\noptimizer: adamw_torch_fused\nattn_implementation: sdpa\n",
    "axolotl full": "sequence_len: 24\nmicro_batch_size: 2\nbf16: true\noptimizer: adafactor\nspecial_tokens: {a: b}\n"
    "gradient_checkpointing: false\nattn_implementation: sdpa\n",
}  # fmt: skip


SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A model whose logits are much larger than the scalars that a Trainer keeps."""
    folder = tmp_path_factory.mktemp("model")
    if name == "llama_factory vision":
        text = {**QWEN3["text_config"], **SIZES, "vocab_size": 4000, "head_dim": 16}  # type: ignore[dict-item]
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 2, 2]}
        sight = {**QWEN3["vision_config"], "out_hidden_size": 64}  # type: ignore[dict-item]
        qwen = {**QWEN3, "text_config": text, "vision_config": sight}
        qwen["architectures"] = ["Qwen3VLForConditionalGeneration"]
        (folder / "config.json").write_text(json.dumps(qwen))
    elif name == "axolotl experts":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
        MixtralConfig(vocab_size=4000, architectures=["MixtralForCausalLM"], **SIZES, **experts).save_pretrained(
            folder
        )
    else:
        LlamaConfig(vocab_size=4000, architectures=["LlamaForCausalLM"], **SIZES).save_pretrained(folder)
    return folder


def predicted(content: Mapping[str, Any], kind: str, rows: int) -> tuple[int, TrainingSpec]:
    """The peak of the file's step on the CPU, and what is trained."""
    spec = TrainingSpec.of(**{"model": content.get("base_model") or content["model_name_or_path"],
                              **fields_of(read_training_file("run.yaml", kind, content=content).flags)})  # fmt: skip
    workload = load(spec, "cpu")
    apply_policy(workload.model, spec.policy)
    return workload.trace(rows).peak_allocated, spec


def log_probabilities(model: Any, batch: Mapping[str, Any], kind: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """As LLaMA-Factory's trainers of preferences compute them (get_batch_logps of train/trainer_utils.py)."""
    ids, mask = batch[f"{kind}input_ids"], batch[f"{kind}attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask, return_dict=True, use_cache=False).logits.to(torch.float32)
    labels, answers = ids[:, 1:].clone(), batch[f"{kind}completion_mask"][:, 1:] != 0
    labels[~answers] = 0
    each = torch.gather(logits[:, :-1, :].log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (each * answers).sum(-1), logits


class FactoryKTO(trl.KTOTrainer):
    """The loss of LLaMA-Factory's CustomKTOTrainer (train/kto/trainer.py), written as its source has it."""

    def sorted_by_label(self, model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        scores, logits = log_probabilities(model, batch)
        with torch.no_grad():
            mismatched = log_probabilities(model, batch, "KL_")[0]
        wanted = torch.as_tensor(batch["label"], dtype=torch.bool)
        return scores[wanted], scores[~wanted], mismatched, logits[wanted], logits[~wanted]

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        chosen, rejected, mismatched, *logits = self.sorted_by_label(model, inputs)
        with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
            before = self.sorted_by_label(model, inputs)
        divergence = (mismatched - before[2]).mean().clamp(min=0).detach()
        gains = 1 - torch.sigmoid(self.beta * (chosen - before[0] - divergence))
        losses = torch.cat((gains, 1 - torch.sigmoid(self.beta * (divergence - rejected + before[1]))), 0)
        for each in logits:
            each.nansum().item()
        return losses.nanmean()


class FactoryDPO(trl.DPOTrainer):
    """The loss of LLaMA-Factory's CustomDPOTrainer (train/dpo/trainer.py), written as its source has it."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        policy, logits = log_probabilities(model, inputs)
        with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
            reference = log_probabilities(model, inputs)[0]
        chosen, rejected = (policy - reference).chunk(2)
        logits.mean().item()
        return -torch.nn.functional.logsigmoid(self.beta * (chosen - rejected)).mean()


def started_model(content: Mapping[str, Any], kind: str, model: Path, out: Path) -> Any:
    """The model that a run starts from; in bitsandbytes' own 4-bit layers if the file asks for them."""
    config = AutoConfig.from_pretrained(model)
    if kind == "reward" or content.get("reward_model"):
        config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(config)
    seeing = hasattr(config, "vision_config")
    started = (AutoModelForImageTextToText if seeing else AutoModelForCausalLM).from_config(config)
    if not content.get("load_in_4bit"):
        return started
    pytest.importorskip("bitsandbytes")
    started.to(torch.bfloat16).save_pretrained(out / "weights")
    packed = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(out / "weights", quantization_config=packed, dtype=torch.bfloat16)


def measured(content: Mapping[str, Any], kind: str, model: Path, out: Path, spec: TrainingSpec) -> int:
    """The peak of a live run, whose arguments the file's own library reads from it, under the policy of `spec`."""
    plain = {name: value for name, value in content.items() if name not in OF_LIVE}
    started = started_model(content, kind, model, out)
    given: dict[str, Any] = {"output_dir": str(out), "optim": "adamw_torch_fused"}
    if kind in TRL:
        name = TRL_TRAINERS[TRL[kind]]
        parser = HfArgumentParser((getattr(trl, f"{name}Config"), trl.ModelConfig))
        args, of_model = parser.parse_dict({**given, **plain, **QUIET}, allow_extra_keys=True)
        more: dict[str, Any] = {"peft_config": trl.get_peft_config(of_model), "processing_class": _tokenizer()}
        make, row = getattr(trl, f"{name}Trainer"), ROW[TRL[kind]]
        if not of_model.load_in_4bit:
            started = started.to(getattr(torch, of_model.dtype or "float32"))
    else:
        names = {"micro_batch_size": "per_device_train_batch_size", "optimizer": "optim"}
        plain = {names.get(name, name): value for name, value in plain.items()} | {"bf16": True}
        of_pairs = {"max_length": TOKENS, "beta": content.get("pref_beta", 0.1)} if spec.trainer.trainer else {}
        plain |= of_pairs
        cls = TrainingArguments if kind == "axolotl" else Seq2SeqTrainingArguments
        if of_pairs:
            cls = getattr(trl, f"{TRL_TRAINERS[spec.trainer.trainer]}Config")
        (args,) = HfArgumentParser((cls,)).parse_dict({**given, **plain, **QUIET}, allow_extra_keys=True)
        rank = content.get("lora_r") or content.get("lora_rank")
        adapts = "adapter" in content or content.get("finetuning_type") == "lora"
        # Both load weights in bf16. LLaMA-Factory casts those that it trains to float32 if there are no adapters, and
        # axolotl embeddings, norms and head. Before adapters it prepares packed models, and casts the same back.
        part_of_it = content.get("finetuning_type") == "freeze"
        if not content.get("load_in_4bit"):
            started = started.to(torch.bfloat16)
        elif kind == "axolotl":
            started = prepare_model_for_kbit_training(started, use_gradient_checkpointing=False)
        trained = content.get("unfrozen_parameters") or (["layers.[12]."] if part_of_it else ["^(?!.*visual)"])
        for name, parameter in started.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and any(re.search(one, name) for one in trained))
            if kind != "axolotl" and parameter.requires_grad and not adapts:
                parameter.data = parameter.data.float()
        for part, layer in started.named_modules() if kind == "axolotl" else ():
            if "norm" in part or "embed" in part or part == "lm_head":
                layer.to(torch.bfloat16 if adapts else torch.float32)
        if adapts:
            dropout = content.get("lora_dropout", 0.0)
            targets = content.get("lora_target_modules", "all-linear")
            started = get_peft_model(started, LoraConfig(r=rank, lora_dropout=dropout, target_modules=targets))
        more = {"data_collator": DataCollatorForLanguageModeling(_tokenizer(), mlm=False)}
        make, row = (Trainer if kind == "axolotl" else Seq2SeqTrainer), {"input_ids": [1] * TOKENS}
        if of_pairs:
            more = {"processing_class": _tokenizer()}
            if adapts:
                started = started.get_base_model()
                more["peft_config"] = LoraConfig(r=rank, target_modules="all-linear")
            make, row = (
                {"reward": trl.RewardTrainer, "kto": FactoryKTO}.get(spec.trainer.trainer, FactoryDPO),
                ROW[spec.trainer.trainer],
            )
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
