"""Replacements for other libraries' optimizers, given as tables of bytes, have the memory of the originals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames
from versions import slow_except

from ckpt_ft.checkpointing.offload import CopyStream
from ckpt_ft.memory.cost.schedule import HOST
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.optimizers import NAMES, OFFLOADING, OPTIM_OF_TRAINER, OPTIMIZERS, OptimizerName
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.optimizers import LAYOUTS, Tabulated
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.optimizers import make_optimizer, notes_on, optimizer_maker
from ckpt_ft.workloads.workload import optimizer_step

IDS = torch.arange(128).view(2, 64)
_FOR_OTHER_DEVICES = {"adamw_torch_xla"}  # for TPUs; the one for NPUs is answered as AdamW


def language_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer_step(model, optimizer, [IDS], lambda model, ids: model(input_ids=ids, labels=ids).loss)


def measured(model: nn.Module, optimizer: Any, steps: int = 2) -> int:
    """Returns the highest peak of `steps` real steps on the CPU."""
    peaks = []
    with Tracker(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None) as tracker:
        for _ in range(steps):
            tracker.start_step()
            step(model, optimizer)
            peaks.append(tracker.trace().peak_allocated)
    return max(peaks)


def predicted(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return trace_step(language_model(dtype), step, make_optimizer=optimizer_maker(name, device="cpu"), device="cpu")


def of_library(name: str, model: nn.Module, tmp_path: Path) -> Any:
    """Returns the library's own optimizer as a Trainer creates it."""
    gap = "update_proj_gap=2" if name.startswith(("galore", "apollo")) else None  # 200 steps by default
    args = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        optim=OPTIM_OF_TRAINER.get(name, f"paged_{name}"),
        optim_target_modules="all-linear",
        optim_args=gap,
    )
    return Trainer(model=model, args=args).create_optimizer()


def test_every_optimizer_of_transformers_is_known() -> None:
    known = {name.value for name in OptimizerNames}
    assert known - OPTIMIZERS.keys() == _FOR_OTHER_DEVICES & known
    assert set(OPTIMIZERS.values()) <= set(NAMES) == set(get_args(OptimizerName))
    assert set(OPTIM_OF_TRAINER.values()) <= known
    assert {OPTIMIZERS[name] for name in OPTIM_OF_TRAINER.values()} == set(OPTIM_OF_TRAINER)


WITH_PEAK = (
    "galore_adamw", "galore_adafactor", "galore_adamw_layerwise", "apollo_adamw", "apollo_adamw_layerwise", "lomo",
    "grokadamw", "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd", "stable_adamw", "adafactor",
    "adagrad", "rmsprop",
)  # fmt: skip


def has_the_peak_of_the_library(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = language_model(dtype)
    optimizer = of_library(name, model, tmp_path)
    getattr(optimizer, "train", lambda: None)()
    steps = 6 if name == "schedule_free_radam" else 3  # its sixth step is another one
    assert predicted(name, dtype).peak_allocated == pytest.approx(measured(model, optimizer, steps), rel=2e-3)


@pytest.mark.filterwarnings("ignore")  # warnings of those libraries
@pytest.mark.parametrize("name", WITH_PEAK)
def test_step_has_the_peak_of_the_library(name: str, tmp_path: Path) -> None:
    has_the_peak_of_the_library(name, torch.float32, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_except(WITH_PEAK, "galore_adamw", "lomo", "stable_adamw"))
def test_step_in_half_precision_has_the_peak_of_the_library(name: str, tmp_path: Path) -> None:
    """Some cast gradients and weights to float32, and torch-optimi keeps what bfloat16 rounds away."""
    has_the_peak_of_the_library(name, torch.bfloat16, tmp_path)


@pytest.mark.parametrize(
    ("name", "package", "kind"),
    [
        ("came", "came_pytorch", "CAME"),
        ("adam_mini", "adam_mini", "Adam_mini"),
        ("optimi_adamw", "optimi", "AdamW"),
    ],
)
def test_step_has_the_peak_of_a_library_outside_the_trainer(name: str, package: str, kind: str) -> None:
    made: Callable[..., Any] = getattr(importlib.import_module(package), kind)
    model = language_model()
    if name == "adam_mini":
        optimizer = made(list(model.named_parameters()), lr=1e-4, dim=256, n_heads=4, verbose=False)
    else:
        optimizer = made(model.parameters(), lr=1e-4)
    assert predicted(name).peak_allocated == pytest.approx(measured(model, optimizer), rel=2e-3)


def states(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the states; shared tensors count once."""
    held: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            parts = (
                [getattr(value, name) for name in value.__tensor_flatten__()[0]]
                if hasattr(value, "codes")
                else [value]
            )
            held |= {id(part): part.nbytes for part in parts if isinstance(part, torch.Tensor) and part.ndim}
    return sum(held.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        *(name for name, row in LAYOUTS.items() if row.source.startswith("bitsandbytes")),
        "adamw_torch_4bit", "adamw_torch_8bit",
    ],
)  # fmt: skip
def test_states_equal_the_librarys(name: str, tmp_path: Path) -> None:
    """The CPU kernels of these libraries have temporaries that GPU kernels lack, so only states are compared."""
    model = language_model(torch.bfloat16)
    optimizer = of_library(name, model, tmp_path)
    if hasattr(optimizer, "init_state"):  # bitsandbytes, whose AdEMAMix has no step on a CPU and no paged memory
        optimizer.is_paged = False
        optimizer.check_overrides()  # as its first step does: embeddings
        for row, group in enumerate(optimizer.param_groups):
            for column, p in enumerate(group["params"]):
                optimizer.init_state(group, p, row, column)
    else:
        with torch.compiler.set_stance("force_eager"):
            step(model, optimizer)
    twin = make_optimizer(language_model(torch.bfloat16), name)
    for p in (p for group in twin.param_groups for p in group["params"]):
        p.grad = torch.zeros_like(p)
    twin.step()
    assert states(twin) + sum(level.nbytes for level in twin.levels) == states(optimizer) > 0


LAYER = nn.Linear(512, 256, bias=False)
N, L = 512 * 256, 128  # elements, rank
BLOCKS = N + 4 * N // 256
PAGED = {
    "paged_adamw_8bit": 2 * BLOCKS, "paged_adamw_32bit": 8 * N, "paged_ademamix_32bit": 12 * N,
    "paged_ademamix_8bit": 3 * BLOCKS, "paged_lion_8bit": BLOCKS, "paged_lion_32bit": 4 * N,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("adamw_8bit", 2 * (N + 4 * N // 256)), ("adamw_32bit", 8 * N), ("ademamix", 12 * N),
        ("ademamix_8bit", 3 * (N + 4 * N // 256)), ("lion_8bit", N + 4 * N // 256), ("lion_32bit", 4 * N),
        ("rmsprop_8bit", N + 4 * N // 256), ("rmsprop_32bit", 4 * N),
        ("adamw_torch_8bit", 2 * (N + 4 * N // 256 + 4 * 256)),
        ("adamw_torch_4bit", 2 * (N // 2 + 4 * N // 256 + 4 * 16)),
        ("ao_adamw_4bit", 2 * (N // 2 + 4 * N // 128 + 4 * 16)), ("ao_adamw_8bit", 2 * (N + 4 * N // 256 + 4 * 256)),
        ("ao_adamw_fp8", 2 * (N + 4 * N // 256)),
        ("galore_adamw", 4 * (256 * 256 + 2 * L * 512)), ("apollo_adamw", 4 * (L * 256 + 2 * L * 512)),
        ("galore_adamw_8bit", 4 * 256 * 256 + 2 * (L * 512 + 4 * L * 512 // 256)),
        ("galore_adafactor", 4 * (256 * 256 + 512 + L)),
        ("lomo", 0), ("adalomo", 4 * (512 + 256)), ("grokadamw", 0), ("schedule_free_adamw", 8 * N),
        ("schedule_free_radam", 8 * N), ("schedule_free_sgd", 4 * N), ("stable_adamw", 8 * N), ("optimi_adamw", 8 * N),
        ("adamw_in_backward", 8 * N), *PAGED.items(),
        ("adamw_anyprecision", 8 * N), ("came", 4 * (N + 2 * (512 + 256))), ("adam_mini", 4 * (N + 256)),
    ],
)  # fmt: skip
def test_bytes_of_states_for_one_matrix(name: str, nbytes: int) -> None:
    """Computed from the sources that the table names, without the libraries."""
    layer = nn.Linear(512, 256, bias=False)
    before = layer.weight.detach().clone()
    optimizer = Tabulated(layer, LAYOUTS[name])
    if LAYOUTS[name].release:
        layer(torch.ones(1, 512)).sum().backward()
    else:
        layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    if hasattr(optimizer, "fused_backward"):
        optimizer._release([layer.weight])
    assert states(optimizer) == nbytes
    assert torch.equal(layer.weight, before)
    assert (layer.weight.grad is None) == bool(LAYOUTS[name].release)


def test_every_row_of_the_table_is_tested() -> None:
    tested = {row[0] for row in test_bytes_of_states_for_one_matrix.pytestmark[0].args[1]}
    assert {name.removesuffix("_layerwise") for name in LAYOUTS} == tested


def test_layers_outside_of_the_targets_keep_whole_states() -> None:
    """As in LLaMA-Factory, which projects no head, and by names as transformers matches them."""
    layers = nn.ModuleDict({name: nn.Linear(512, 256, bias=False) for name in ("q_proj", "lm_head")})
    of_rank_16 = 4 * (256 * 256 + 2 * 16 * 512)
    for targets, projected in {"": 2, "(?!.*lm_head).*": 1, "q_,head": 2, "mlp": 0}.items():
        optimizer = make_optimizer(layers, "galore_adamw", targets=targets, rank=16)
        for layer in layers.values():
            layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        assert states(optimizer) == projected * of_rank_16 + (2 - projected) * 8 * N


def test_lomo_has_neither_states_nor_all_gradients() -> None:
    """Weights are updated in backward, so that gradients are freed early."""
    adam, lomo = predicted("adamw"), predicted("lomo")
    parameters = sum(p.nbytes for p in language_model().parameters())
    assert adam.peak_allocated - lomo.peak_allocated > 2 * parameters
    assert lomo.peaks["optimizer"] < 1.2 * parameters


def on_card(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    made = optimizer_maker(name, device="rtx-4090")
    return trace_step(language_model(dtype), step, make_optimizer=made, device="rtx-4090")


def test_adamw_in_backward_has_the_peak_of_a_real_step() -> None:
    """As in torchtune: one optimizer per parameter, in a hook that frees the gradient."""
    model = language_model()
    own = {p: torch.optim.AdamW([p], fused=True) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        own[p].step()
        p.grad = None

    for p in own:
        p.register_post_accumulate_grad_hook(update)
    found = predicted("adamw_in_backward")
    assert found.peak_allocated == pytest.approx(measured(model, None), rel=2e-3)
    assert found.at_peak["gradients"] < sum(p.nbytes for p in model.parameters()) / 5


def test_paged_states_are_in_managed_memory() -> None:
    """States of parameters below 100,000 elements, and scales of 8-bit blocks, stay in PyTorch's memory."""
    kept, paged = on_card("adamw_32bit"), on_card("paged_adamw_32bit")
    large = sum(8 * p.numel() for p in language_model().parameters() if p.numel() >= 100_000)
    assert paged.host_kinds == {"managed": large} == {"managed": paged.peak_host}
    assert kept.peak_allocated - paged.peak_allocated == large
    assert kept.host_kinds == {}
    assert paged.seconds == pytest.approx(kept.seconds), "a card with room has all states"
    card = find_gpu("rtx-4090")
    small = replace(card, memory=paged.peak_reserved + card.context + large // 4)
    more = paged.seconds_on(small).total - paged.seconds
    assert more == pytest.approx(2 * 0.75 * large / card.host_bandwidth)


def test_bytes_of_torchaos_offloaded_optimizer() -> None:
    """Weights and gradients are pinned, states pageable; parameters below 4,096 elements stay on the GPU."""
    plain, states_away, all_away = map(on_card, ("adamw_fused", *OFFLOADING.values()))
    large = sum(p.numel() for p in language_model().parameters() if p.numel() >= 4096)
    assert states_away.at_host_peak == {"gradients": 2 * large, "optimizer": 6 * large}
    assert states_away.host_kinds == {"pinned": 4 * large, "pageable": 4 * large}
    assert plain.at_peak["optimizer"] - states_away.at_peak["optimizer"] == pytest.approx(4 * large, rel=1e-2)
    assert all_away.peaks["optimizer"] == pytest.approx(states_away.peaks["optimizer"] - 2 * large, rel=1e-2)
    on_host = sum(op.nbytes for op in states_away.ops if op.stream == HOST and op.at >= states_away.start)
    assert on_host == pytest.approx(14 * large, rel=1e-2), "AdamW reads four tensors in bfloat16 and writes three"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", OFFLOADING)
def test_torchaos_offloaded_optimizer_has_the_same_trace(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = importlib.import_module("torchao.optim.cpu_offload")
    monkeypatch.setattr(source, "get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)

    def make(model: nn.Module) -> Any:
        streams = CopyStream.of(next(model.parameters()))
        for name in ("Stream", "current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
        return source.CPUOffloadOptimizer(list(model.parameters()), offload_gradients=what == "gradients", lr=1e-4)

    theirs = trace_step(language_model(torch.bfloat16), step, make_optimizer=make, device="rtx-4090")
    ours = on_card(OFFLOADING[what])
    assert theirs.at_host_peak == ours.at_host_peak
    assert theirs.host_kinds == ours.host_kinds
    assert theirs.peaks == ours.peaks
    assert theirs.seconds == pytest.approx(ours.seconds, rel=0.01)
    assert theirs.seconds_parts.copying == pytest.approx(ours.seconds_parts.copying)


def test_muon_updates_the_matrices_of_blocks() -> None:
    model = language_model()
    optimizer = make_optimizer(model, "muon")
    step(model, optimizer)
    own = [sum(v.nbytes for s in part.state.values() for v in s.values() if v.ndim) for part in optimizer.parts]
    inside = sum(p.nbytes for p in model.model.layers.parameters() if p.ndim == 2)
    rest = sum(p.nbytes for p in model.parameters()) - inside
    assert own == [2 * rest, inside]
    assert predicted("muon").peak_allocated == pytest.approx(measured(language_model(), None), rel=1)


def test_assumptions_are_noted() -> None:
    assert "all linear layers are projected, to rank 128" in notes_on("galore_adamw")[0]
    assert notes_on("adamw") == ()


def test_states_are_counted_as_the_optimizers() -> None:
    trace = predicted("adamw_8bit")
    held = sum(s.nbytes for s in trace.storages if s.category == "optimizer")
    assert held == states_of_8bit(language_model())


def states_of_8bit(model: nn.Module) -> int:
    """Returns bytes in bitsandbytes' layout; a Trainer keeps float32 moments for embeddings, as small tensors do."""
    embedding = model.get_input_embeddings().weight
    small = sum(8 * p.numel() for p in model.parameters() if p.numel() < 4096 or p is embedding)
    large = sum(
        2 * (p.numel() + 4 * p.numel() // 256) for p in model.parameters() if p.numel() >= 4096 and p is not embedding
    )
    return small + large  # without the two quantisation maps, which all tensors share


def test_8bit_states_of_a_shard(tmp_path: Path) -> None:
    """torchao keeps one byte per element of a rank's shard, and a scale per 256 elements."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", vocab_size=2048, **sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    for ranks in (2, 4):
        spec = TrainingSpec.of(
            str(tmp_path), optimizer="adamw_torch_8bit", seq_length=16, launch=Launch("fsdp2", ranks), device="h100"
        )
        asked = load(spec, "h100")
        weights = sum(p.numel() for p in asked.model.parameters()) // ranks
        assert asked.trace(1).at_peak["optimizer"] == pytest.approx(2 * weights * (1 + 4 / 256), rel=0.03)
