"""A live model with bitsandbytes' layers is traced like one with their replacements, and stays unchanged."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from ckpt_ft import apply_policy
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.standins.quantised_layers import NF4Linear, swap_library_layers, to_int8, to_nf4


class Params4bit(nn.Parameter):
    quant_state: Any = None


class Linear4bit(nn.Linear):
    """Like bitsandbytes' layer: a packed weight that only its own kernel can read."""

    def __init__(self, inner: int, outer: int, compute_dtype: torch.dtype, nested: bool) -> None:
        super().__init__(inner, outer)
        self.weight = Params4bit(torch.zeros(inner * outer // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(nested=nested, blocksize=64, dtype=compute_dtype)
        self.compute_dtype = compute_dtype


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("bitsandbytes")
    module.nn = SimpleNamespace(
        Linear4bit=Linear4bit, Params4bit=Params4bit, Linear8bitLt=type("Linear8bitLt", (), {})
    )  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    return module


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.zeros(4, 128)).float().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("nested", [False, True])
def test_live_layer_is_traced_as_its_replacement(bitsandbytes: ModuleType, nested: bool) -> None:
    def model(quantised: bool) -> nn.Module:
        made = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
        if quantised:
            made[0], made[2] = (Linear4bit(128, 128, torch.bfloat16, nested) for _ in range(2))
        else:
            for number in (0, 2):
                # the live weights were packed from bfloat16
                made[number].weight.data = made[number].weight.data.bfloat16()
            to_nf4(made, torch.bfloat16, skip=("1",), nested=nested)
            for number in (0, 2):
                made[number].clones = False  # no PEFT adapter is around them
        made[1].requires_grad_(True)
        made[0].bias.requires_grad_(False)
        made[2].bias.requires_grad_(False)
        return made

    live = model(True)
    layers = list(live)
    trace, expected = (trace_step(each, step, make_optimizer=adamw, device="t4") for each in (live, model(False)))
    assert trace.peak_allocated == expected.peak_allocated
    assert trace.events == expected.events
    assert [op.name for op in trace.ops] == [op.name for op in expected.ops]
    assert all(now is before for now, before in zip(live, layers, strict=True))


def test_swap_of_live_4bit_layers(bitsandbytes: ModuleType) -> None:
    """`swap` identifies weights by their layers, which the trace of a live model replaces."""

    def trace(quantised: bool) -> StepTrace:
        def block() -> nn.Module:
            frozen = Linear4bit(128, 128, torch.bfloat16, False) if quantised else nn.Linear(128, 128).bfloat16()
            return nn.ModuleDict({"frozen": frozen, "trained": nn.Linear(128, 128)})

        model = Blocks([block() for _ in range(4)])
        if not quantised:
            to_nf4(model, torch.bfloat16, skip=("trained",))
            for layer in model.blocks:
                layer.frozen.clones = False
        for layer in model.blocks:
            layer.trained.requires_grad_(True)
            layer.frozen.bias.requires_grad_(False).data = layer.frozen.bias.data.float()
        apply_policy(model, "full,swap:3")
        return trace_step(model, step, make_optimizer=adamw, device="t4")

    live, expected = trace(True), trace(False)
    assert live.peak_host == 3 * 128 * 128 // 2
    assert (live.peak_allocated, live.peak_host) == (expected.peak_allocated, expected.peak_host)


class Blocks(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.frozen, self.trained = layers["frozen"], layers["trained"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x))  # type: ignore[no-any-return]


def test_layer_in_two_places_is_replaced_once(bitsandbytes: ModuleType) -> None:
    layer = Linear4bit(64, 64, torch.float16, False)
    other = Linear4bit(64, 64, torch.float16, False)
    other.weight.quant_state.blocksize = 128  # no replacement has this block size
    model = nn.ModuleList([layer, nn.Sequential(layer, layer), other])
    with swap_library_layers(model):
        assert type(model[0]) is NF4Linear
        assert model[1][0] is model[1][1] is model[0]
        assert model[2] is other
    assert model[0] is model[1][0] is model[1][1] is layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["nf4", "double", "int8"])
def test_packed_model_from_transformers_has_the_estimates_peak(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The model of the estimate needs no bitsandbytes."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).to(dtype)  # type: ignore[arg-type]
    plain.save_pretrained(tmp_path)
    nested = kind == "double"
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=nested,
    )  # fmt: skip
    asked = BitsAndBytesConfig(load_in_8bit=True) if kind == "int8" else four
    live = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=asked, dtype=dtype)
    estimated = to_int8(plain) if kind == "int8" else to_nf4(plain, torch.bfloat16, nested=nested)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = torch.zeros(2, 64, dtype=torch.long)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    traced = [
        trace_step(
            get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")),
            train,
            make_optimizer=adamw,
            device="t4",
        )
        for model in (live, estimated)
    ]
    assert traced[0].peak_allocated == traced[1].peak_allocated
    assert traced[0].at_peak["parameters"] == traced[1].at_peak["parameters"]
