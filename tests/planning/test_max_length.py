"""The longest sequence that fits: compared with traces of each length, with real steps, and on the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Small
from test_batch_size import measured
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.cli import main as cli
from ckpt_ft.errors import NothingFits
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.planning.batch_size import predict_max_batch_size
from ckpt_ft.planning.budget import Candidate, memory_budget
from ckpt_ft.planning.estimate import estimate
from ckpt_ft.planning.max_length import GRANULARITY, by_length, find_max_length, predict_max_length
from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.scaled_traces import HIGH, Estimates
from ckpt_ft.planning.tracing import Tracer
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import MIB
from ckpt_ft.workloads.load import load

_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_SIZES}))
    return str(path)


def _peak(config: str, policy: str, length: int, batch_size: int = 1) -> int:
    workload = load(TrainingSpec.of(config, seq_length=length), "t4")
    apply_policy(workload.model, policy)
    return workload.trace(batch_size).peak_reserved


def test_predicted_length_is_the_longest_that_fits(config: str) -> None:
    workload = load(TrainingSpec.of(config), "t4")
    found = predict_max_length(workload, ("none", "full"), "260MiB", batch_size=3, margin="0")
    by_policy = {one.policy: one for one in found.ladder}
    assert list(by_policy) == ["full", "none"]
    assert found.length == by_policy["full"].length > by_policy["none"].length > 0
    assert [one.scaled for one in found.ladder] == [False, True]
    for policy, one in by_policy.items():
        assert one.length % GRANULARITY == 0
        assert one.peak_reserved == pytest.approx(_peak(config, policy, one.length, 3), rel=0.02 * one.scaled)
        assert one.peak_reserved <= found.room.limit
        # Reserved bytes come in segments, so a few hundred more tokens can reserve as much or less.
        assert _peak(config, policy, round(1.1 * one.length), 3) > found.room.limit


@pytest.mark.parametrize("lora_r", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_copies_with_fewer_blocks_find_the_lengths_of_a_deep_model(
    lora_r: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_SIZES, "num_hidden_layers": 12, "model_type": "llama"}))
    workload = load(TrainingSpec.of(str(path), dtype="bfloat16", lora_r=lora_r), "t4")
    search = partial(predict_max_length, workload, ("none", "full,head"), "2GiB", margin="0")
    found = search()
    assert min(one.length for one in found.ladder) > HIGH * GRANULARITY  # extrapolated
    monkeypatch.setattr("ckpt_ft.planning.max_length.Shallow.of", lambda *args, **kwargs: None)
    for one, whole in zip(found.ladder, search().ladder, strict=True):
        assert (one.policy, one.scaled) == (whole.policy, whole.scaled)
        assert one.length == pytest.approx(whole.length, rel=0.05 if one.scaled else 0.02)
        assert one.seconds / one.length == pytest.approx(whole.seconds / whole.length, rel=0.05)


@pytest.mark.parametrize("kind", ["eager", "a mask of a sliding window"])
def test_quadratic_growth_with_the_length_is_extrapolated(kind: str, config: str, tmp_path: Path) -> None:
    """Attention scores and masks of 50 pieces are extrapolated from 5 and 7 pieces, and those of 60 from 50."""
    spec = TrainingSpec.of(config, attn_implementation="eager")
    if kind != "eager":
        path = tmp_path / "gemma.json"
        more = {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 64, "max_position_embeddings": 64}
        path.write_text(json.dumps({**_SIZES, **more, "model_type": "gemma3_text"}))
        spec = TrainingSpec.of(str(path), dtype="bfloat16")
    pieces, _, _ = by_length(load(spec, "h100"), 1)
    with Tracer(pieces) as tracer:
        estimates = Estimates(tracer, memory_budget("79GiB", find_gpu("h100")), "effective_batch", separate=True)
        estimates.trace_candidates(["none"])
        guessed = estimates.estimate("none", 50)
        traces = {at: tracer.trace("none", at) for at in (50, 60)}
        exact = Candidate.of("none", 50, traces[50])
        assert guessed.peak == pytest.approx(exact.peak, rel=0.002)
        assert guessed.seconds == pytest.approx(exact.seconds, rel=0.05)
        estimates.following("none", 50)
        assert estimates.scaled_reserved("none", 60) == pytest.approx(traces[60].peak_reserved, rel=1e-4)


@pytest.mark.parametrize("launches", [(), (Launch("ddp", 2),)])
def test_evaluation_limits_the_length(config: str, launches: tuple[Launch, ...]) -> None:
    """Training steps have 1 row, evaluation batches have 64."""
    lengths = {}
    for rows in (0, 64):
        workload = load(TrainingSpec.of(config, eval_batch_size=rows), "t4")
        found = predict_max_length(workload, ("full",), "600MiB", margin="0", launches=launches)
        lengths[rows] = found.length
    assert 0 < lengths[64] < lengths[0] / 8
    spec = TrainingSpec.of(config, eval_batch_size=64, seq_length=lengths[64])
    (needed,) = (trace.peak_allocated for trace in load(spec, "t4").trace_phases(1).values())
    assert 0.8 * found.room.limit < needed <= found.room.limit


@pytest.mark.slow
def test_figures_of_a_deep_model_are_extrapolated_on_several_gpus(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_SIZES, "num_hidden_layers": 10, "model_type": "llama"}))
    launches, said = [Launch("fsdp2", 2), Launch("fsdp2", 2, cp=2)], []
    workload = load(TrainingSpec.of(str(path), dtype="bfloat16"), "rtx-3090")
    found = predict_max_length(
        workload, ("full,head",), "720MiB", margin="0", launches=launches, most=40_000, report=said.append
    )
    one = found.ladder[0]
    fields = fields_of({"launch": "fsdp2", "processes": 2, "cp": 2})
    spec = TrainingSpec.of(
        str(path), dtype="bfloat16", seq_length=one.length, policy="full,head", device="rtx-3090", **fields
    )
    whole = estimate(spec)
    assert one.launch == launches[1]
    assert 0.6 * found.room.limit < one.peak_reserved <= found.room.limit
    assert one.peak_allocated == pytest.approx(whole.peak_allocated, rel=1e-3)
    assert whole.peak_reserved <= one.peak_reserved < 1.15 * whole.peak_reserved
    assert one.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert found.holders == []
    assert "figures are extended from models with fewer blocks" in found.notes[-1]


@pytest.mark.slow
def test_long_sequences_are_planned_with_context_parallel_launches(tmp_path: Path) -> None:
    """Policies under which each GPU has its own sequences are not tried; the pick is traced on the complete model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_SIZES, "num_hidden_layers": 10, "model_type": "llama"}))
    launches, said = (Launch("fsdp2", 4), Launch("fsdp2", 4, cp=4)), []
    workload = load(TrainingSpec.of(str(path), dtype="bfloat16", seq_length=2**17), "rtx-3090")
    made = plan(workload, "862MiB", margin="0", launches=launches, report=said.append)
    best = made.best
    assert best.launch == launches[1]
    assert not any("none" in line for line in said)
    assert best.policy == "full,head"
    whole = replace(workload, launch=best.launch)
    apply_policy(whole.model, best.policy)
    assert whole.trace(best.batch).peak_reserved == best.reserved <= made.room.limit
    with pytest.raises(NothingFits, match=r"works is .*, under 'full,head,offload,tile:16' with fsdp2, cp 4"):
        plan(workload, "776MiB", batch_size=1, margin="0", launches=launches)


def test_real_steps_prove_the_longest_sequence() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, use_cache=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(model: Any, pieces: int) -> torch.Tensor:
        ids = torch.arange(pieces * GRANULARITY)[None] % 99
        return model(input_ids=ids, labels=ids).loss

    small = Small(model, loss)
    apply_policy(model, "full")
    peaks = measured(small, range(1, 5))
    budget = (peaks[3] + peaks[4]) // 2
    model.load_state_dict(before)
    found = find_max_length(
        model, lambda tokens: small.step_for_batch(tokens // GRANULARITY), budget, make_optimizer=small.make_optimizer
    )
    assert (found.length, found.predicted) == (3 * GRANULARITY, 3 * GRANULARITY)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "proved 768 (3 steps" in str(found) or "proved 768 (2 steps" in str(found)


def _search(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "max-length", *argv])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_command_prints_the_length_and_the_training_command(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = config, "--device", "t4", "--budget", "300MiB", "--policy", "full,head"
    code, out, _ = _search(monkeypatch, capsys, *asked, "--json")
    answer = json.loads(out)
    assert (code, answer["length"]) == (0, answer["ladder"][0]["length"])
    assert _peak(config, "full,head", answer["length"]) == answer["ladder"][0]["peak_reserved"]
    command = f"--max_length {answer['length']} --rope_scaling none"  # longer than the configuration's 128 positions
    assert command in answer["command"]
    code, out, _ = _search(monkeypatch, capsys, *asked)
    assert f"{answer['length']:,}" in out
    assert answer["command"] in out


def test_learned_positions_limit_length(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _search(monkeypatch, capsys, "gpt2", "--device", "h100", "--policy", "full", "--json")
    assert (code, json.loads(out)["length"]) == (0, 1024)


def test_smallest_sufficient_budget_is_named_if_nothing_fits(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = predict_max_length(load(TrainingSpec.of(config), "t4"), ("full",), 110 * MIB)
    assert few.length == 0
    enough = predict_max_length(load(TrainingSpec.of(config), "t4"), ("full",), few.needed)
    assert enough.length >= GRANULARITY
    assert predict_max_length(load(TrainingSpec.of(config), "t4"), ("full",), few.needed - 2 * MIB).length == 0
    code, _, err = _search(monkeypatch, capsys, config, "--device", "t4", "--budget", "110MiB", "--policy", "full")
    assert code == 1
    assert "not even 256 tokens fit in 110.0 MiB; the smallest budget that would do is" in err


def test_model_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _search(monkeypatch, capsys, "resnet-50", "--device", "t4")
    assert code == 2
    assert "hold no sequences" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_launch_with_the_longest_sequence_is_first(config: str) -> None:
    workload = load(TrainingSpec.of(config), "t4")
    launches = [Launch("ddp", 2), Launch("fsdp2", 2)]
    found = predict_max_length(workload, ("full",), "700MiB", launches=launches)
    first = found.ladder[0]
    assert first.launch in launches
    assert found.length == max(one.length for one in found.ladder)
    launched = replace(load(TrainingSpec.of(config, seq_length=first.length), "t4"), launch=first.launch)
    apply_policy(launched.model, "full")
    assert launched.trace(1).peak_reserved == first.peak_reserved <= found.room.limit


def test_host_memory_limits_lengths_and_batches(config: str) -> None:
    """Under `offload`, the tensors that leave the GPU must fit into host memory."""
    workload = load(TrainingSpec.of(config, seq_length=128), "t4")
    whole = predict_max_length(workload, ["offload"], "300MiB").length
    less = predict_max_length(workload, ["offload"], "300MiB", host_memory=32 * MIB).length
    assert 0 < less < whole
    longest, rows = (load(TrainingSpec.of(config, seq_length=length), "t4") for length in (less, 2048))
    batch = predict_max_batch_size(rows, "offload", "300MiB", host_memory=64 * MIB).batch
    assert 0 < batch < predict_max_batch_size(rows, "offload", "300MiB").batch
    for workload, samples, host in ((longest, 1, 32 * MIB), (rows, batch, 64 * MIB)):
        apply_policy(workload.model, "offload")
        assert 0 < workload.trace(samples).peak_host <= host
    assert predict_max_batch_size(rows, "offload", "300MiB", host_memory=MIB).batch == 0
