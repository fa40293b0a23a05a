"""Linear layers with 8-bit matrix products: torchao's numbers, what a trace sees of them, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from versions import is_older

from ckpt_ft import trace_step
from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import Launch, read_launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.float8 import E4M3, cast, to_float8
from ckpt_ft.workloads.load import load


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in ((64, 64), (64, 128), (128, 64), (64, 24), (24, 64), (64, 8))))


def test_products_are_those_of_the_rounded_operands() -> None:
    model = layers().bfloat16()
    plain = copy.deepcopy(model)
    to_float8(model)
    kinds = [type(layer) is nn.Linear for layer in model]
    assert kinds == [True, False, False, True, True, True]  # the first, those with 24 outputs or inputs, and the last
    assert list(model.state_dict()) == list(plain.state_dict())
    hidden = torch.randn(3, 8, 64, dtype=torch.bfloat16)
    (a, of_a), (b, of_b) = cast(hidden.reshape(24, 64), E4M3), cast(model[1].weight, E4M3)
    expected = (a.float() / of_a) @ (b.float() / of_b).t() + model[1].bias.float()
    torch.testing.assert_close(model[1](hidden).float().reshape(24, 128), expected, rtol=0.02, atol=0.02)
    for each in (model, plain):
        each(hidden).pow(2).mean().backward()
    for rounded, exact in zip(model.parameters(), plain.parameters(), strict=True):
        assert (rounded.grad - exact.grad).norm() < 0.1 * exact.grad.norm()


@pytest.mark.filterwarnings("ignore")  # of torch's own imports
def test_three_products_in_8_bits_and_operands_saved_as_they_are() -> None:
    def step(model: nn.Module, optimizer: object) -> None:
        model(torch.empty(4096, 1024, dtype=torch.bfloat16)).sum().backward()

    traces = []
    for converted, compiled in ((False, False), (True, False), (True, True)):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))).bfloat16()
        if converted:
            to_float8(model)
        if compiled:
            model.compile()
        traces.append(trace_step(model, step, device="h100", warmup_steps=0))
    _, eager, compiled = traces
    for trace in (eager, compiled):
        products = [op for op in trace.ops if op.name == "aten._scaled_mm.default"]
        assert len(products) == 3
        assert {op.flops for op in products} == {2 * 4096 * 1024**2}
        assert {op.dtype for op in products} == {"float8_e4m3fn", "float8_e5m2"}
    begins = [max(at for at, name in trace.marks if name == "backward") for trace in traces]
    kept, eagerly, compactly = (trace.replay.allocated[at - 1] for trace, at in zip(traces, begins, strict=True))
    assert eagerly == pytest.approx(kept, abs=2**12)  # operands as they are
    assert compactly == pytest.approx(kept - 4096 * 1024, abs=2**12)  # the second layer's input in 8 bits
    assert compiled.seconds < eager.seconds  # casts are fused


def test_fsdp2_gathers_weights_in_8_bits() -> None:
    """On the wire and at the peaks as many bytes as with torchao 0.18's own weights in the same trace."""
    width, traces = 1024, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.empty(64, width, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True)

    for eight in (False, True):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        to_float8(model)
        launch = Launch("fsdp2", 4, mixed_precision="fp8", float8_gather=eight, wrap=None)
        traces.append(trace_step(model, step, make_optimizer=adamw, device="h100", launch=launch))
        assert not model[1].gathers
    sent = [[(op.name, op.wire) for op in trace.ops if op.wire and op.at >= trace.start] for trace in traces]
    gathers = [[wire for name, wire in each if "allgather" in name] for each in sent]
    times = 2 if is_older("accelerate", "1.14") else 1  # older ones shard the root again after its forward
    whole, in_8_bits = 4 * 2 * width**2 * 3 // 4, (2 * 2 + 2) * width**2 * 3 // 4  # the first and last are plain
    assert gathers == [[whole] * times, [in_8_bits] * times]
    scales = [wire for name, wire in sent[1] if "all_reduce" in name]
    assert scales == [6, 6] * times  # of two weights
    assert (traces[1].peaks["forward"], traces[1].peaks["backward"]) == (93_983_232, 96_473_088)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": "a100-80gb"}, r"fp8 on a100-80gb \(compute capability 8.0\): it needs compute capability 8.9"),
        ({"device": "cpu"}, "fp8 on the CPU: it needs compute capability 8.9"),
        ({"device": "h100", "load_in_4bit": True, "lora_r": 8}, "mixed precision fp8 and 4-bit weights"),
        ({"device": "h100", "launch": Launch("zero2", 2)}, "mixed precision fp8 and zero2"),
    ],
)
def test_where_there_are_no_such_products(given: dict[str, object], says: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    with pytest.raises(UserError, match=says):
        load(TrainingSpec.of(str(path), **{"mixed_precision": "fp8", **given}))


def test_a_launch_in_8_bits_names_torchao(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    start = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: fp8\nfsdp_config: {fsdp_version: 2}\n"
    path.write_text(f"{start}fp8_config: {{backend: AO, enable_fsdp_float8_all_gather: true}}\n")
    assert read_launch(str(path))[0] == Launch("fsdp2", 2, mixed_precision="fp8")
    path.write_text(path.read_text().replace("true", "false"))
    assert not read_launch(str(path))[0].float8_gather
    path.write_text(path.read_text().replace("backend: AO", "backend: TE"))
    with pytest.raises(UserError, match="FP8 of TransformerEngine and MS-AMP is not predicted; set it to AO"):
        read_launch(str(path))


@pytest.mark.parametrize("name", ["NVFP4Linear", "MXFP8Linear"])
def test_layers_with_scales_of_blocks_are_refused_in_one_line(name: str) -> None:
    """torchao's prototypes: their kernels need Triton even on fake tensors."""
    kind = type(name, (nn.Linear,), {"__module__": "torchao.prototype.moe_training.layers"})
    with pytest.raises(UserError, match=f"^{name}: MXFP8 and NVFP4 training of torchao is not predicted"):
        trace_step(nn.Sequential(kind(128, 128)), lambda model, optimizer: None, device="b200")
