"""ACCallback's prediction equals its measurement in random combinations of real Trainer runs on the CPU.

    RUNS=200 SEED=11 pytest -s -m slow tests/training/test_random_trainer_runs.py

Each run draws a tiny model, a trainer (transformers' or one of TRL's), an optimizer, a precision, an adapter, a
policy, a batch, rows of one length or of several, and an evaluation, trains four steps and compares the predicted peak
with the measured one of the phases that are predicted: an evaluation is only measured. Optimizers and trainers of
packages that are not installed are left out, and so is a combination that a library refuses. torchao's compile their
update, which runs eagerly, with more memory, in a step that is measured on a CPU.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.workloads.trl_trainers import ONLINE, TRL_TRAINERS, _no_reward, _tokenizer

RUNS, SEED = int(os.environ.get("RUNS", "12")), int(os.environ.get("SEED", "0"))
SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512, "use_cache": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 256, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32},
    "gemma2": {"intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "mixtral": {"intermediate_size": 128, "num_key_value_heads": 2, "num_local_experts": 4},
}
OPTIMIZERS = {
    "": ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"],
    "bitsandbytes": ["adamw_8bit", "lion_8bit", "ademamix", "ademamix_8bit", "rmsprop_bnb", "paged_adamw_32bit"],
    "galore_torch": ["galore_adamw", "galore_adafactor", "galore_adamw_layerwise"],
    "apollo_torch": ["apollo_adamw", "apollo_adamw_layerwise"],
    "lomo_optim": ["lomo"],
    "schedulefree": ["schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"],
    "grokadamw": ["grokadamw"],
    "optimi": ["stable_adamw"],
}
TRAINERS = ("trainer", "trainer", "trainer", *(TRL_TRAINERS if find_spec("trl") else ()))
POLICIES = (None, None, "full", "pointwise", "save:attention+matmul", "full,head", "every:2")


def draw(chance: random.Random) -> dict[str, Any]:
    """Draws a random combination that the Trainer accepts."""
    known = [name for package, names in OPTIMIZERS.items() if not package or find_spec(package) for name in names]
    kind, optim = chance.choice(list(MODELS)), chance.choice(known)
    whole = optim.endswith("layerwise") or optim == "lomo" or optim.startswith(("galore", "apollo"))
    trainer = chance.choice(TRAINERS)
    return {
        "model": kind,
        "trainer": trainer,
        "rows": chance.choice(("equal", "unlike")),
        "optim": optim,
        "adapter": "none" if whole else chance.choice(("none", "none", "lora", "dora", "ia3")),
        "precision": chance.choice(("fp32", "bf16", "bf16 weights")),
        "policy": chance.choice(POLICIES),
        "accumulation": 1 if whole else chance.choice((1, 1, 2, 3)),
        "batch": chance.choice((1, 2, 4)),
        "length": chance.choice((32, 64, 128)),
        "max_grad_norm": chance.choice((0.0, 1.0)),
        "evaluation": chance.choice(("none", "loss", "metrics") if trainer == "trainer" else ("none", "loss")),
    }


def run(drawn: dict[str, Any]) -> tuple[int, int | None, list[str]]:
    """Returns (measured bytes, predicted bytes, notes) of a run."""
    torch.manual_seed(0)
    kind = drawn["trainer"]
    config = AutoConfig.for_model(drawn["model"], **SIZES, **MODELS[drawn["model"]], pad_token_id=0)
    if kind == "reward":
        config.num_labels = 1
    of_config = (AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM).from_config
    model: Any = of_config(config)
    if drawn["precision"] == "bf16 weights":
        model = model.to(torch.bfloat16)
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    adapter: Any = None
    if drawn["adapter"] == "ia3":
        adapter = IA3Config(task_type=task, target_modules="all-linear", feedforward_modules=[])
    elif drawn["adapter"] != "none":
        dora = drawn["adapter"] == "dora"
        dropout = 0.0 if drawn["model"] == "mixtral" else 0.05  # PEFT adapts fused experts without dropout
        adapter = LoraConfig(task_type=task, r=8, target_modules="all-linear", use_dora=dora, lora_dropout=dropout)
    with tempfile.TemporaryDirectory() as out:
        options: dict[str, Any] = {
            "use_cpu": True, "disable_tqdm": True, "max_steps": 4, "save_strategy": "no", "report_to": "none",
            "optim": drawn["optim"], "optim_target_modules": "all-linear", "bf16": drawn["precision"] == "bf16",
            "max_grad_norm": drawn["max_grad_norm"], "per_device_train_batch_size": drawn["batch"],
            "gradient_accumulation_steps": drawn["accumulation"],
        }  # fmt: skip
        if drawn["evaluation"] != "none":
            options |= {"eval_strategy": "steps", "eval_steps": 2}
        rows = Dataset.from_list(_rows(drawn))
        if kind == "trainer":
            model = model if adapter is None else get_peft_model(model, adapter)
            metrics = (lambda told: {"rows": len(told.label_ids)}) if drawn["evaluation"] == "metrics" else None
            trainer = Trainer(
                model, TrainingArguments(out, **options), train_dataset=rows, eval_dataset=rows,
                data_collator=_padded, compute_metrics=metrics,
            )  # fmt: skip
        else:
            import trl

            model.save_pretrained(f"{out}/start")
            model = type(model).from_pretrained(f"{out}/start", dtype=model.dtype)
            options["gradient_checkpointing"] = False
            if kind in ONLINE:
                often = max(drawn["accumulation"], 2)
                options |= {"num_generations": drawn["batch"] * often, "steps_per_generation": often}
                options["max_completion_length"] = min(drawn["length"] // 2, 32)
            args = getattr(trl, f"{TRL_TRAINERS[kind]}Config")(out, **options)
            trainer = getattr(trl, f"{TRL_TRAINERS[kind]}Trainer")(
                model, args=args, train_dataset=rows, eval_dataset=rows,
                processing_class=_tokenizer(), peft_config=adapter,
                **({"reward_funcs": _no_reward} if kind in ONLINE else {}),
            )  # fmt: skip
        callback = ACCallback(ACArguments(ac_policy=drawn["policy"], ac_report="json")).attach(trainer)
        trainer.train()
    assert callback.report is not None
    rank = callback.report.ranks[0]
    if rank.predicted is None:
        return 0, None, callback.report.notes
    measured = max(rank.peaks[phase]["allocated"] for phase in rank.predicted.peaks)
    return measured, rank.predicted.allocated, callback.report.notes


def _rows(drawn: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns rows of `drawn["length"]` tokens, or of lengths between a tenth of them and all."""
    found = []
    for row in range(32):
        length = drawn["length"]
        tokens = length if drawn["rows"] == "equal" else length // 10 + 1 + (row * 37 % 32) * (length * 9 // 10) // 32
        ids, said = [1 + (7 * row + at) % 500 for at in range(tokens)], " ".join(["a"] * (tokens - 2))
        kinds: dict[str, dict[str, Any]] = {
            "trainer": {"input_ids": ids, "labels": ids},
            "sft": {"text": said},
            "dpo": {"prompt": "a", "chosen": f" {said}", "rejected": f" {said}"},
            "kto": {"prompt": "a", "completion": f" {said}", "label": row % 2 == 0},
            "reward": {"chosen": said, "rejected": said},
        }
        found.append(kinds.get(drawn["trainer"], {"prompt": said}))
    return found


def _padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns rows as a batch, with a mask if their lengths differ."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled = {
        name: torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in rows])
        for name, value in (("input_ids", 0), ("labels", -100))
    }
    if all(len(row["input_ids"]) == longest for row in rows):
        return filled
    return {**filled, "attention_mask": (filled["labels"] != -100).long()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_measured_peaks_are_the_predicted_ones() -> None:
    chance, errors = random.Random(SEED), []
    for number in range(RUNS):
        drawn = draw(chance)
        try:
            measured, predicted, notes = run(drawn)
        except Exception as refusal:
            print(f"{number} did not train: {type(refusal).__name__}: {str(refusal)[:120]} {drawn}", flush=True)
            continue
        assert predicted is not None, (number, drawn, notes)
        errors.append(abs(predicted / measured - 1))
        print(f"{number}: {predicted} predicted, {measured} measured ({errors[-1]:.4%}) {drawn}", flush=True)
    errors.sort()
    at = errors[int(0.95 * (len(errors) - 1))]
    print(f"{len(errors)} runs: median {statistics.median(errors):.4%}, 95 % {at:.4%}, worst {errors[-1]:.4%}")
    assert len(errors) > RUNS / 2
    assert statistics.median(errors) < 1e-4
    assert errors[-1] < 2e-3
