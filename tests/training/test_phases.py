"""Evaluation and generation between training steps: predictions equal measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from ckpt_ft.memory.measure.report import RankMemory
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.trl_trainers import _no_reward, _tokenizer

pytestmark = [pytest.mark.filterwarnings("ignore")]
SIZES = {"vocab_size": 700, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
ROWS = Dataset.from_list([{"input_ids": (row := [1 + (7 * i + j) % 200 for j in range(24)]), "labels": row}
                          for i in range(21)])  # fmt: skip
ARGUMENTS = {
    "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 2, "logging_strategy": "no",
}  # fmt: skip
METRICS = {"compute_metrics": lambda predictions: {"size": float(predictions.predictions[0].size)}}


def llama(folder: Path) -> Any:
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **SIZES)).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def reported(trainer: Any) -> RankMemory:
    callback = ACCallback(ACArguments(ac_policy=None, ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    (rank,) = callback.report.ranks
    return rank


def check(rank: RankMemory, phase: str) -> int:
    """Returns the predicted bytes of a phase, after comparing them with the measured ones."""
    assert rank.predicted is not None
    found = rank.predicted.peaks[phase]
    assert found == pytest.approx(rank.peaks[phase]["allocated"], rel=2e-3)
    return found


def test_logits_kept_for_metrics_are_the_peak(tmp_path: Path) -> None:
    """In batches of 8, 8 and 5 rows, the last concatenation is the peak of the run."""
    model = llama(tmp_path)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **ARGUMENTS), None, ROWS, ROWS, **METRICS)
    rank = reported(trainer)
    found = rank.peaks["evaluation"]["allocated"]
    assert rank.predicted is not None
    assert found > 1.3 * rank.predicted.allocated
    assert sum(rank.at_peak.values()) == rank.peak() == rank.peaks["evaluation"]["allocated"]
    spec = TrainingSpec.of(str(tmp_path), seq_length=24, batch_size=2, eval_batch_size=8, eval_samples=21)
    traces = load(spec, "cpu").trace_phases(2)
    assert traces["evaluation"].peak_allocated == pytest.approx(found, rel=2e-3)


def test_evaluation_of_a_spec(tmp_path: Path) -> None:
    """In 13 batches, of which the last has one row; if predictions go to the host, those of two batches stay."""
    args = TrainingArguments(str(tmp_path), **ARGUMENTS, per_device_eval_batch_size=2)
    rows = Dataset.from_list([*ROWS, *ROWS][:25])
    rank = reported(Trainer(llama(tmp_path), args, None, rows, rows, **METRICS))

    def predicted(samples: int, every: int) -> int:
        kept = {"eval_batch_size": 2, "eval_samples": samples, "eval_accumulation_steps": every}
        spec = TrainingSpec.of(str(tmp_path), seq_length=24, batch_size=2, **kept)
        return load(spec, "cpu").trace_phases(2)["evaluation"].peak_allocated

    assert predicted(25, 0) == pytest.approx(rank.peaks["evaluation"]["allocated"], rel=2e-3)
    assert predicted(25, 2) == predicted(4, 0) < predicted(25, 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GRPO", {"beta": 0.1}),
        pytest.param("RLOO", {"use_cache": False}, marks=pytest.mark.slow),
        pytest.param("GRPO", {"gradient_accumulation_steps": 4}, marks=pytest.mark.slow),
        pytest.param("RLOO", {}, marks=pytest.mark.slow),
    ],
)
def test_generation_is_measured_and_predicted(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Completions and their log-probabilities; the evaluation generates too."""
    trl = pytest.importorskip("trl")
    options, cached = dict(options), options.get("use_cache", True)
    options.pop("use_cache", None)
    args = getattr(trl, f"{kind}Config")(
        str(tmp_path), **{**ARGUMENTS, "per_device_train_batch_size": 4, "bf16": False}, num_generations=4,
        max_completion_length=16, gradient_checkpointing=False, **options,
    )  # fmt: skip
    model = llama(tmp_path)
    model.generation_config.use_cache = cached
    rows = Dataset.from_list([{"prompt": " ".join(["a"] * 8)}] * 8)
    trainer = getattr(trl, f"{kind}Trainer")(
        model, _no_reward, args, train_dataset=rows, eval_dataset=rows, processing_class=_tokenizer()
    )
    rank = reported(trainer)
    assert rank.peaks["evaluation"]["allocated"] > check(rank, "generation")
    assert rank.peaks["forward"]["allocated"] == pytest.approx(rank.predicted.peaks["forward"], rel=2e-3)
