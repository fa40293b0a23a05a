"""Workload.from_trainer: rows chosen by length, train mode, and predictions that equal the measured step."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.measure.profiler import LargestBatch, MemoryProfiler
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.text import PadCollator
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload, optimizer_step

LENGTHS = [8, 32, 16, 24, 9]
ROWS = Dataset.from_list([{"input_ids": [1] * length, "labels": [1] * length} for length in LENGTHS])


@pytest.mark.parametrize("policy", ["none", "save:attention+matmul", "pointwise,head"])
def test_predicted_peaks_equal_the_measured_ones(policy: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    ids = [torch.randint(0, 512, (64,)) for _ in range(16)]
    args = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=[{"input_ids": x, "labels": x} for x in ids])
    ACCallback(ACArguments(ac_policy=policy, ac_report="json")).attach(trainer)
    trainer.train()
    report = json.loads((tmp_path / "memory_report.json").read_text())
    measured = {phase: figures["allocated"] for phase, figures in report["ranks"][0]["peaks"].items()}
    predicted = report["ranks"][0]["predicted"]["peaks"]
    for phase in ("forward", "backward", "optimizer"):
        assert predicted[phase] == pytest.approx(measured[phase], rel=1e-3), phase
    assert report["provenance"]["shapes"] == {"input_ids": [2, 64], "labels": [2, 64]}


@pytest.mark.parametrize("policy", [pytest.param("none", marks=pytest.mark.slow), "full", "head"])
def test_estimate_equals_a_trainers_step_under_mixed_precision(policy: str, tmp_path: Path) -> None:
    """`ckpt-ft estimate CONFIG --mixed-precision bf16`, compared with the highest step that ACCallback measures."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=512
    )
    config.save_pretrained(tmp_path)
    workload = load(TrainingSpec.of(str(tmp_path), mixed_precision="bf16", seq_length=48), "cpu")
    apply_policy(workload.model, policy)
    estimated = workload.trace(4).peak_allocated

    ids = [torch.randint(0, 512, (48,)) for _ in range(16)]
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, report_to=[], bf16=True, use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=[{"input_ids": x, "labels": x} for x in ids])
    # a verified step keeps 8 bytes per saved tensor
    callback = ACCallback(ACArguments(ac_policy=policy, ac_report="json", ac_verify="never")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    measured = max(phase["allocated"] for phase in callback.report.ranks[0].peaks.values())
    assert estimated == pytest.approx(measured, rel=1e-4)
    real = LlamaForCausalLM(config)
    planned = Workload.from_trainer(Trainer(real, args, train_dataset=[{"input_ids": x, "labels": x} for x in ids]))
    apply_policy(real, policy)
    assert planned.trace(4).peak_allocated == pytest.approx(measured, rel=1e-3)  # and a row of the data


def test_shapes_of_the_largest_batch_are_kept() -> None:
    batch = LargestBatch()
    batch.note((torch.ones(2, 3),), {"labels": torch.ones(4, dtype=torch.long), "flag": True})
    batch.note((torch.ones(1, 3),), {"labels": torch.ones(1, dtype=torch.long), "flag": False})
    assert batch.shapes == {"input 0": [2, 3], "labels": [4]}
    (x,), kwargs = batch.rebuilt()
    assert torch.equal(x, torch.zeros(2, 3))
    assert kwargs["flag"] is True
    assert torch.equal(kwargs["labels"], torch.ones(4, dtype=torch.long))


def test_rebuilt_batch_has_the_original_containers() -> None:
    batch = LargestBatch()
    batch.note((Pair(torch.ones(2), [torch.ones(3)]),), {"more": {"x": (torch.ones(1), None)}})
    (pair,), kwargs = batch.rebuilt()
    assert type(pair) is Pair
    assert torch.equal(pair.first, torch.zeros(2))
    assert torch.equal(pair.others[0], torch.zeros(3))
    assert kwargs["more"]["x"] == (torch.zeros(1), None)


class Pair(NamedTuple):
    """An argument that a user-defined model may have."""

    first: torch.Tensor
    others: list[torch.Tensor]


class Recorder(nn.Module):
    """Stores the batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, **batch: torch.Tensor) -> Any:
        self.batch = batch
        return {"loss": self.weight.clone()}


def workload_of(model: nn.Module, args: TrainingArguments, rows: Any = ROWS) -> Workload:
    return Workload.from_trainer(Trainer(model, args, train_dataset=rows, data_collator=PadCollator(0)))


def test_batches_have_the_longest_row_and_padding(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, remove_unused_columns=False, train_sampling_strategy="group_by_length"
    )
    model = Recorder()
    workload = workload_of(model, args)
    assert workload.lengths is not None
    assert workload.lengths.by_length
    for length, shorter in ((32, 16), (9, 8), (8, 8), (25, 16)):
        workload.step(3, length)(model, torch.optim.SGD(model.parameters()))
        lengths = model.batch["attention_mask"].sum(1).tolist()
        assert lengths == [min(n for n in LENGTHS if n >= length), shorter, shorter]
    workload.step(2)(model, torch.optim.SGD(model.parameters()))
    assert model.batch["input_ids"].shape == (2, 32)


def test_a_note_tells_of_several_lengths_where_the_model_is_compiled(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, remove_unused_columns=False)
    workload = workload_of(Recorder(), args)
    assert workload.lengths is not None
    trace = workload.trace(2)
    compiled = replace(workload, compile="whole")
    alike = replace(compiled, lengths=workload.lengths.cut(min(workload.lengths.tokens)))
    told = [
        [note for note in each.with_metadata(trace).notes if "batches differ in length" in note]
        for each in (compiled, workload, alike)
    ]
    assert [len(notes) for notes in told] == [1, 0, 0]
    assert "runs all but eight lengths eagerly" in told[0][0]


def test_image_dataset_has_no_lengths(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert workload_of(Recorder(), args, [{"pixel_values": torch.zeros(3)}]).lengths is None


def tiny() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_model_in_eval_mode_is_traced_in_train_mode(tmp_path: Path) -> None:
    """`from_pretrained` returns a model in eval mode, in which policies recompute nothing."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    peaks = {}
    for training in (True, False):
        for policy in ("none", "full"):
            model = tiny().train(training)
            apply_policy(model, policy)
            peaks[training, policy] = workload_of(model, args).trace(16).peak_allocated
            assert model.training is training
            assert model.model.layers[0].training is training
    assert peaks[True, "full"] < 0.8 * peaks[True, "none"]
    assert (peaks[False, "none"], peaks[False, "full"]) == (peaks[True, "none"], peaks[True, "full"])


def test_seconds_and_bytes_of_gradient_accumulation(tmp_path: Path) -> None:
    """The seconds include all micro-batches, although only two are traced."""
    seconds, peaks = {}, {}
    for accumulation in (1, 2, 4, 32):
        args = TrainingArguments(str(tmp_path), use_cpu=True, gradient_accumulation_steps=accumulation)
        workload = replace(workload_of(tiny(), args), device="t4")
        trace = workload.trace(16)
        seconds[accumulation], peaks[accumulation] = trace.seconds, trace.peak_allocated
    one = seconds[4] - seconds[2]
    assert one > 0
    assert seconds[4] == pytest.approx(seconds[2] + 2 * (seconds[2] - seconds[1]), rel=0.05)
    assert seconds[32] == pytest.approx(seconds[2] + 30 / 2 * one)
    batch = 16 * 32 * 8 * 3  # ids, labels, mask: a Trainer loads all micro-batches of a step first
    assert peaks[32] - peaks[4] == 28 * batch


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss with a temporary tensor; a Trainer passes it the number of labels."""
    logits = outputs.logits.float()
    return -(logits.exp() / logits.exp().sum(-1, keepdim=True)).log().mean() * len(labels) / num_items_in_batch


LOSSES = {"label_smoothing": ({"label_smoothing_factor": 0.1}, None), "own": ({}, smoothed)}
FAST = [
    ("label_smoothing", False, "none"),
    ("own", False, "full"),
    ("label_smoothing", True, "full"),
    ("own", True, "none"),
]


@pytest.mark.parametrize(
    ("flags", "loss", "bf16", "policy"),
    [
        pytest.param(*LOSSES[name], *cell, marks=() if (name, *cell) in FAST else pytest.mark.slow)
        for name in LOSSES
        for cell in product((False, True), ("none", "full"))
    ],
)
def test_custom_loss_of_the_trainer_is_planned_and_predicted(
    policy: str, flags: dict[str, Any], loss: Any, bf16: bool, tmp_path: Path
) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=2048
    )
    ids = [torch.randint(0, 2048, (24,)) for _ in range(8)]
    args = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, bf16=bf16,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, **flags,
    )  # fmt: skip

    def make() -> Trainer:
        rows = [{"input_ids": x, "labels": x} for x in ids]
        return Trainer(LlamaForCausalLM(config), args, train_dataset=rows, compute_loss_func=loss)

    planned = make()
    workload = Workload.from_trainer(planned)
    apply_policy(planned.model, policy)
    trainer = make()
    callback = ACCallback(ACArguments(ac_policy=policy, ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    rank = callback.report.ranks[0]
    assert rank.predicted is not None, callback.report.notes
    assert rank.predicted.allocated == pytest.approx(rank.peak(), rel=1e-3)
    assert workload.trace(4).peak_allocated == pytest.approx(rank.peak(), rel=2e-3)


def test_reference_model_counts_as_parameters(tmp_path: Path) -> None:
    class WithReference(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.reference = tiny().requires_grad_(False)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                reference_logits = self.reference(**inputs).logits
            return (model(**inputs).logits - reference_logits).square().mean() + 1

    args = TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = WithReference(tiny(), args, train_dataset=ROWS, data_collator=PadCollator(0))
    callback = ACCallback(ACArguments(ac_policy="none", ac_report="json")).attach(trainer)
    trainer.train()
    assert callback.report is not None
    weights = sum(p.nbytes for p in trainer.model.parameters())
    rank = callback.report.ranks[0]
    assert rank.at_peak["parameters"] == 2 * weights
    assert rank.predicted is not None
    assert rank.predicted.allocated == pytest.approx(rank.peak(), rel=1e-3)


def test_evaluation_between_steps_is_a_phase(tmp_path: Path) -> None:
    """Evaluation has batches of 8 rows, the default, and training has 1: the evaluation's logits are the peak."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=4000
    )
    config.save_pretrained(tmp_path)
    rows = [{"input_ids": torch.ones(48, dtype=torch.long), "labels": torch.ones(48, dtype=torch.long)}] * 16
    args = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    with MemoryProfiler(trainer.accelerator, trainer.model, trainer.optimizer) as profiler:
        trainer.evaluate()
    workload = load(TrainingSpec.of(str(tmp_path), seq_length=48, eval_batch_size=8, policy="full"), "cpu")
    evaluation = workload.trace_phases(1)["evaluation"].peak_allocated
    assert evaluation == pytest.approx(profiler.meter.fullest.peak_allocated, rel=2e-3)
    assert evaluation > workload.trace(1).peak_allocated


def test_graph_of_a_micro_batch_is_freed_after_its_backward() -> None:
    """PEFT's DoRA creates parameters in forward, whose gradients live as long as the graph."""
    model, graphs = nn.Linear(4, 1), []

    def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert all(graph() is None for graph in graphs)
        made = nn.Parameter(torch.ones(4))
        graphs.append(weakref.ref(made))
        return model(batch * made).sum()

    optimizer_step(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2, 4)] * 3, compute_loss)
    assert len(graphs) == 3
