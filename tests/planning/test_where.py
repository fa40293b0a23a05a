"""The command `ckpt-ft where`: rows equal estimates, GPUs with the same kernels share traces, prices rank the rows."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_ft.cli import main as cli
from ckpt_ft.cli.where import read_prices
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPUS, find_gpu
from ckpt_ft.memory.rules import cuda, sdpa
from ckpt_ft.planning import tracing
from ckpt_ft.planning.budget import Candidate
from ckpt_ft.planning.depth import Shallow, suits
from ckpt_ft.planning.estimate import estimate
from ckpt_ft.planning.tracing import Tracer
from ckpt_ft.planning.where import MOST_BATCH, Place, Places, where
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 512,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip


def small(name: str, nbytes: int) -> object:
    """Returns a GPU with less memory, under its own name."""
    from dataclasses import replace

    gpu = find_gpu(name)
    return replace(gpu, name=f"small-{name}", memory=gpu.context + nbytes)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture(scope="module")
def places(config: str) -> Places:
    spec = TrainingSpec.of(config, dtype="bfloat16", seq_length=128)
    cards = [find_gpu("rtx-4090"), find_gpu("rtx-3090")]
    kinds = ("none", "full,head")
    return where(
        spec, cards, methods=("full", "LoRA"), policies=kinds, prices={"rtx-3090": 0.3, "rtx-4090": 0.4}, jobs=1
    )


def test_every_row_equals_its_estimate(config: str, places: Places) -> None:
    assert [(place.card, place.method) for place in places.rows[:2]] == [("rtx-4090", "full"), ("rtx-3090", "full")]
    for place in places.rows:
        lora = {"lora_r": 16} if place.method == "LoRA" else {}
        told = estimate(TrainingSpec.of(
            config, dtype="bfloat16", seq_length=128, policy=place.policy, batch_size=place.batch, device=place.card,
            **lora,
        ))  # fmt: skip
        assert (place.peak_reserved, place.seconds) == (told.peak_reserved, told.seconds)
        assert told.headroom is not None
        assert told.headroom >= 0
        assert place.speed == pytest.approx(place.batch * 128 / place.seconds)


def test_gpus_with_the_same_kernels_share_traces(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, session = [], tracing._session

    def counted(workload: Workload, keys: list[tracing.Key], typical: bool) -> list[tracing.Traced]:
        made.extend(keys)
        return session(workload, keys, typical)

    monkeypatch.setattr(tracing, "_session", counted)
    spec, said = TrainingSpec.of(config, dtype="bfloat16", seq_length=64), []
    cards = [find_gpu(name) for name in ("rtx-4090", "rtx-3090", "l4")]
    found = where(spec, cards, methods=("full",), policies=("full",), most_gpus=1, jobs=1, report=said.append)
    assert len({place.seconds for place in found.rows}) == 3
    # two for the growth with the batch, one at the largest of all best batches
    assert made == [("full", 5), ("full", 7), ("full", MOST_BATCH)]
    assert [line.partition(":")[0] for line in said] == ["0 of 3", "1 of 3", "2 of 3", "3 of 3"]
    assert said[0] == "0 of 3: full takes at least 1 x rtx-4090: its weights have 69.5 MiB"


def _tenfold(number: int, tell: Callable[[int], None]) -> int:
    tell(number)
    return 10 * number


def test_tasks_report_while_they_run() -> None:
    heard: list[int] = []
    done = dict(tracing.run_tasks([partial(_tenfold, number) for number in range(3)], 2, heard.append))
    assert done == {0: 0, 1: 10, 2: 20}
    assert sorted(heard) == [0, 1, 2]


def _waiting(folder: Path, number: int, tell: Callable[[int], None]) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(600)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    tasks = [partial(_waiting, tmp_path, number) for number in range(2)]
    parent = multiprocessing.get_context("fork").Process(target=lambda: list(tracing.run_tasks(tasks, 2)))
    parent.start()
    deadline = time.monotonic() + 30
    while len(workers := [int(path.name) for path in tmp_path.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.join()
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    assert not any(map(_runs, workers))


def _runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_step_too_large_for_one_gpu_uses_the_fewest_gpus(tmp_path: Path) -> None:
    """Most weights are in blocks: accelerate before 1.14 gathers the embeddings and the head together."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "vocab_size": 1000, "intermediate_size": 2048, "num_hidden_layers": 6}))
    config, card = str(path), small("t4", 235 * 2**20)
    spec = TrainingSpec.of(config, dtype="bfloat16", seq_length=128)
    (full,) = where(spec, [card], methods=("full",), policies=("none", "full,head"), jobs=1).rows
    assert full.gpus == 4
    assert full.speed == pytest.approx(full.gpus * full.batch * 128 / full.seconds)
    assert f"--num_processes {full.gpus}" in full.command
    fields = fields_of({"launch": "fsdp2", "processes": full.gpus})
    told = estimate(TrainingSpec.of(
        config, dtype="bfloat16", seq_length=128, policy=full.policy, batch_size=full.batch, device="t4", **fields,
    ))  # fmt: skip
    assert (told.peak_reserved, told.seconds) == (full.peak_reserved, full.seconds)


def test_same_kernels_means_every_rule_agrees() -> None:
    kinds = {gpu.arch: gpu for gpu in GPUS.values()}
    for one, other in combinations(kinds.values(), 2):
        if cuda.same_kernels(one) != cuda.same_kernels(other):
            continue
        a, b = one.capability, other.capability
        assert cuda.cublas_workspace(a) == cuda.cublas_workspace(b)
        for head, dtype in product((64, 100, 128, 200, 256), (torch.float16, torch.bfloat16, torch.float32)):
            tensor = torch.zeros(1, 2, 4, head, dtype=dtype, device="meta", requires_grad=True)
            call = sdpa.Call(tensor, tensor, tensor, None, 0.1, True, False)
            assert sdpa.choose(call, a) == sdpa.choose(call, b), (one.name, other.name, head, dtype)


def test_prices_are_read_from_flags() -> None:
    assert read_prices(["rtx-4090=0.4, H100 = 2.5", "l4=0.7"]) == {"rtx-4090": 0.4, "h100": 2.5, "l4": 0.7}
    for wrong in ("h100=cheap", "prices.yaml", "/etc/passwd", ""):
        with pytest.raises(UserError, match=f"--price {wrong}: give dollars an hour"):
            read_prices([wrong])
    assert Place("h100", "full", 0, 2, speed=1e6 / 3600, dollars_per_hour=5.0).dollars_per_million == pytest.approx(5)


def test_command_sorts_rows_by_price(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "where.html"
    words = ["where", config, "--dtype", "bfloat16", "--device", "l4,rtx-3090", "--method", "lora", "--policy", "full",
             "--seq-length", "64", "--price", "l4=9,rtx-3090=0.1", "--jobs", "1", "--html", str(page)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    shown = capsys.readouterr().out
    assert shown.index("rtx-3090") < shown.index("l4 ")
    assert "cheapest on 1 x rtx-3090: ckpt-ft recipe llm" in shown
    assert "rtx-3090" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "where", config, "--method", "qat"])
    with pytest.raises(UserError, match="choose from full, LoRA, QLoRA"):
        cli._main()


@pytest.mark.slow
def test_step_of_a_deep_model_is_extrapolated_from_shallow_models(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "num_hidden_layers": 14}))
    fields = fields_of({"launch": "fsdp2", "processes": 2})
    spec = TrainingSpec.of(str(config), dtype="bfloat16", seq_length=256, lora_r=8, device="l4", **fields)
    whole = load(spec, "l4")
    shallow = Shallow.of(whole)
    assert shallow is not None
    assert shallow.more_unused == 0.02
    assert [(run.units, len(run.left)) for run in shallow.runs] == [(14, 4), (14, 8)]
    assert Shallow.of(shallow.workloads[1]) is None
    traces = [Tracer(workload).trace("full,head", 2) for workload in (*shallow.workloads, whole)]
    _, of_more, of_all = (Candidate.of("full,head", 2, trace) for trace in traces)
    found = shallow.candidate("full,head", 2, traces[:2])
    assert abs(found.peak / of_all.peak - 1) < 0.01
    assert abs(found.seconds / of_all.seconds - 1) < 0.01
    assert abs(found.reserved / of_all.reserved - 1) < 0.03
    assert of_more.seconds < 0.7 * of_all.seconds
    assert suits("full,head,tile:16")
    assert not suits("first:3,head")


def test_frozen_weights_wait_on_the_host_or_sequences_are_shorter_before_it_says_no(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "vocab_size": 1000, "intermediate_size": 4096, "num_hidden_layers": 12}))
    deep = TrainingSpec.of(str(path), dtype="bfloat16", seq_length=512, lora_r=4)
    (tmp_path / "wide.json").write_text(json.dumps(TINY))
    wide = TrainingSpec.of(str(tmp_path / "wide.json"), dtype="bfloat16", seq_length=4096, lora_r=4)

    def needs(spec: TrainingSpec, **edits: Any) -> int:
        return estimate(spec.edit(device="rtx-4090", **edits)).peak_reserved

    def ask(spec: TrainingSpec, policy: str, nbytes: int) -> Place:
        cards = [small("rtx-4090", nbytes)]
        return where(spec, cards, methods=("LoRA",), policies=(policy,), most_gpus=1, jobs=1).rows[0]

    row = ask(deep, "full,head", 170 * 2**20)
    assert needs(deep, policy="full,head") > 170 * 2**20
    assert (row.policy, row.shorter) == ("full,head,swap:12", 0)
    assert row.host > 12 * 2**20
    assert row.peak_reserved == needs(deep, policy=row.policy, batch_size=row.batch)
    assert "--ac_policy full,head,swap:12" in row.command
    whole, half = needs(wide, policy="none"), needs(wide, policy="none", seq_length=2048)
    row = ask(wide, "none", (whole + half) // 2)
    assert (row.policy, row.batch, row.shorter, row.peak_reserved) == ("none", 1, 2048, half)
    assert "--max_length 2048" in row.command
