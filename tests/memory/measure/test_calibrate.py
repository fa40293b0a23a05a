"""Calibration: measuring this machine, writing its file, and using it in predictions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_configs import write_config
from torch import nn

from ckpt_ft import trace_step
from ckpt_ft.cli import main as cli
from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.kernels import STRIDED, WINDOW, device_seconds, kind_of
from ckpt_ft.memory.cost.schedule import HOST, Host
from ckpt_ft.memory.gpus import GPU, Calibration, calibrated, card_path, find_gpu, gpu_of, write_card
from ckpt_ft.memory.measure import calibrate
from ckpt_ft.memory.record.events import Op
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.optimizers import make_optimizer
from ckpt_ft.workloads.workload import Workload

CARD = GPU("cpu (x86_64, 1 threads)", (0, 0), 1, 2**34, 0, 2e10, 5e10, 0, 5e10, 5e10, 0)
MATMUL = (("matmul float32", ((1e-6, 8.0), (1e-4, 2.0))),)


def trace(**device: str) -> StepTrace:
    """Traces 64 x 64 values through a layer of 64 x 64, forward only: one product of 2**19 flops, and views."""
    x = torch.zeros(64, 64)
    return trace_step(nn.Linear(64, 64, bias=False), lambda model, _: model(x), **device)


def product(flops: int) -> Op:
    return Op("aten.mm.default", flops, 0, "float32", "", "", 0)


def test_measured_shares_correct_the_predicted_seconds() -> None:
    card = replace(CARD, calibration=Calibration("2026-11-23", curves=MATMUL))
    assert device_seconds(product(50_000), card) == pytest.approx(8e-6)
    # the midpoint between two measurements, on a logarithmic scale
    assert device_seconds(product(500_000), card) == pytest.approx(4e-5)
    assert device_seconds(product(500_000_000), card) == pytest.approx(2e-2)
    assert device_seconds(product(50), card) == pytest.approx(8e-6)  # the time of the shortest measurement
    assert device_seconds(product(500_000), CARD) == pytest.approx(1e-5)


def test_seconds_of_a_cpu_step_are_operators_and_host(own_cache: Path) -> None:
    write_card(replace(CARD, calibration=Calibration("2026-11-23", per_op=1e-3, curves=MATMUL)))
    found = trace(device="cpu")
    ops = [op for op in found.ops if op.at >= found.start]
    (matmul,) = (op for op in ops if op.flops)
    assert matmul.flops == 2 * 64**3
    share = 8.0 * (2.0 / 8.0) ** (torch.tensor(2 * 64**3 / 5e10 / 1e-6).log10().item() / 2)
    assert found.seconds == pytest.approx(len(ops) * 1e-3 + 2 * 64**3 / 5e10 * share)


def test_attention_on_the_cpu_has_flops() -> None:
    x = torch.zeros(1, 2, 16, 8)
    found = trace_step(
        nn.Linear(8, 8), lambda model, _: nn.functional.scaled_dot_product_attention(*[model(x)] * 3).sum().backward(),
        device="cpu",
    )  # fmt: skip
    flops = [op.flops for op in found.ops if op.at >= found.start and "attention" in op.name]
    assert flops == [4 * 2 * 16 * 16 * 8, 10 * 2 * 16 * 16 * 8]


def test_attention_on_the_cpu_takes_time_per_head() -> None:
    """Twice as many heads take twice as long, at every point of the measured curve."""
    curves = (("attention float32", ((1e-6, 8.0), (1e-2, 0.1))),)
    card = replace(CARD, calibration=Calibration("2026-11-23", curves=curves))
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    one, two = (Op(name, n * 10**6, 0, "float32", "", "", 0, shape=(n, 64, 64, 32)) for n in (1, 2))
    assert device_seconds(two, card) == pytest.approx(2 * device_seconds(one, card))


def test_kind_of_each_operator() -> None:
    kinds = {
        ("aten.addmm.default", ()): "matmul",
        ("aten.mm.default", (1, 512, 64, 8, 0)): "narrow matmul",
        ("aten.bernoulli_.float", ()): "random",
        ("aten.native_dropout.default", ()): "random",
        ("aten.convolution.default", (4, 100, 8, 9, 0, 0)): "grouped",
        ("aten.convolution_backward.default", (9, WINDOW)): "depthwise backward",
        ("aten.native_batch_norm.default", ()): "batch norm",
        ("aten.native_layer_norm_backward.default", (1, 2)): "norm backward",
        ("aten.add.Tensor", (9, STRIDED)): "strided",
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", (1, 2, 3, 4)): "attention",
        ("aten.relu.default", ()): "pointwise",
    }
    assert {key: kind_of(*key) for key in kinds} == kinds


@pytest.fixture
def one_operator_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures one operator of each dtype, and no Llama."""

    def one(cases: calibrate._Cases) -> Iterator[calibrate.Make]:
        yield lambda: cases.product(64, 64, 64)

    monkeypatch.setattr(calibrate._Cases, "__iter__", one)
    monkeypatch.setattr(calibrate, "_per_op", lambda *given: 2e-6)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


@pytest.mark.usefixtures("one_operator_only")
def test_calibrated_device_is_listed_and_becomes_the_default(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--device here: this machine's card is not known yet"):
        gpu_of("here")
    assert gpu_of("") is find_gpu("a100-80gb")
    assert trace().device == "a100-80gb"  # in Python as on the command line
    assert Workload.of_loop(nn.Linear(2, 2), lambda samples: lambda model, _: None).device is find_gpu("a100-80gb")
    run(monkeypatch, "calibrate")
    card = calibrated("cpu")
    assert card is not None
    assert card.calibration is not None
    assert [name for name, _ in card.calibration.curves] == ["matmul float32", "matmul bfloat16"]
    assert card.calibration.per_op == 2e-6
    assert gpu_of("here") is gpu_of("") is None  # this machine's CPU
    assert trace().device == Workload.of_loop(nn.Linear(2, 2), lambda samples: lambda model, _: None).device == "cpu"
    assert 1e-6 < trace().seconds < 1
    capsys.readouterr()
    run(monkeypatch, "gpus", "cpu")
    assert f"calibrated on {card.calibration.date}" in capsys.readouterr().out
    config = write_config(tmp_path, {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64})
    run(monkeypatch, "estimate", config, "--device", "here", "--seq-length", "16", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["device"] == "cpu"
    assert answer["seconds"] > 1e-5


@pytest.mark.usefixtures("one_operator_only")
def test_interrupted_calibration_writes_no_file(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "_copies", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate()
    assert not list(own_cache.rglob("*.json"))


def test_invalid_calibration_file_is_refused(own_cache: Path) -> None:
    path = card_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(UserError, match="not a file that `ckpt-ft calibrate` wrote; delete it, or calibrate again"):
        trace().seconds  # noqa: B018


def ten_matrices() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(10)))


def seconds_on_the_host(rate: float) -> float:
    """Returns the predicted seconds of AdamW on the host for `ten_matrices`."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.zeros(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def offloaded(model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model, "ao_adamw_offload")

    card = replace(find_gpu("h100"), calibration=Calibration("2026-11-24", per_op=1e-6, host_memory=rate))
    found = trace_step(ten_matrices(), step, make_optimizer=offloaded, device=card)
    return sum(span.end - span.start for span in found.schedule() if span.stream == HOST)


def test_adam_on_the_host_moves_28_bytes_per_parameter() -> None:
    """It reads four fp32 tensors and writes three."""
    assert seconds_on_the_host(20e9) == pytest.approx(10 * 2**20 * 28 / 20e9)


@pytest.mark.slow
def test_seconds_of_adam_on_the_host() -> None:
    """The measured rate for one tensor predicts a real step.

    Measures CPU time of one thread, because other processes use the machine. Both steps use more than 150 MB, which
    few caches hold.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        predicted = seconds_on_the_host(calibrate.host_memory())
        real = [torch.optim.AdamW([p], fused=True) for p in ten_matrices().parameters()]
        for one in real:
            one.param_groups[0]["params"][0].grad = torch.zeros(1024, 1024)
        measured = min(calibrate.timer(lambda: [one.step() for one in real], 0.2).times)
    finally:
        torch.set_num_threads(threads)
    assert predicted == pytest.approx(measured, rel=0.25)


def test_default_bandwidth_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is the default of `accelerate launch`; the processes of a DGX H100 share its memory channels."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Host.beside(find_gpu("h100"), 8).bandwidth == 12.8e9
    monkeypatch.setenv("OMP_NUM_THREADS", "28")
    assert Host.beside(find_gpu("h100"), 8).bandwidth == pytest.approx(0.8 * 2 * 8 * 4.8e9 * 8 / 8)
    assert Host.beside(find_gpu("rtx-4090")).bandwidth == pytest.approx(0.8 * 2 * 5.6e9 * 8)
