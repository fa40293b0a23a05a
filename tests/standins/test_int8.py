"""The replacement for bitsandbytes' 8-bit layers: bytes of its layout and of a step."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.standins.quantised_layers import Int8Linear, to_int8


def test_int8_layer_has_one_byte_per_weight_and_one_scale_per_row() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"proj": nn.Linear(64, 48), "lm_head": nn.Linear(64, 32)})
    to_int8(model)
    layer = model["proj"]
    assert isinstance(layer, Int8Linear)
    assert type(model["lm_head"]) is nn.Linear
    assert sum(p.nbytes for p in (layer.weight, layer.scales)) == 64 * 48 + 4 * 48
    assert not any(p.requires_grad for p in model.parameters())


def test_temporary_tensors_of_a_step_of_an_int8_layer() -> None:
    """Forward: an 8-bit input, an int32 product and its float16 form. Backward: the weight in the input's dtype."""
    rows, n, m = 64, 256, 512
    model = nn.Sequential(Int8Linear(nn.Linear(n, m, bias=False)))
    x = torch.zeros(rows, n, dtype=torch.bfloat16, requires_grad=True)

    def step(model: nn.Module, optimizer: object) -> None:
        model(x).sum().backward()

    trace = trace_step(model, step, device="cpu")
    made = {(storage.op, storage.nbytes) for storage in trace.storages}
    expected = {
        ("ckpt_ft.quantize_rows.default", rows * n),
        ("ckpt_ft.int8_matmul.default", 4 * rows * m),
        ("ckpt_ft.dequantize_product.default", 2 * rows * m),
        ("aten._to_copy.default", 2 * n * m),
    }
    assert expected <= made
    (product,) = [op for op in trace.ops if "int8_matmul" in op.name and op.at >= trace.start]
    assert product.flops == 2 * rows * n * m


def test_peak_of_an_int8_layers_forward() -> None:
    """The int32 product and the 8-bit input live until the float16 form is cast to the layer's dtype."""
    rows, n, m = 64, 256, 512
    model = Int8Linear(nn.Linear(n, m, bias=False))
    x = torch.zeros(rows, n, dtype=torch.bfloat16, requires_grad=True)
    trace = trace_step(model, lambda model, optimizer: model(x), device="cpu")
    held = n * m + 4 * m + 2 * rows * n  # weight and scales, input
    assert trace.peak_allocated == held + (rows * n + 4 * rows) + (4 + 2 + 2) * rows * m
