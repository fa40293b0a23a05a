"""A checkpoint's quantization_config decides the packed bytes, what is unpacked and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record import cpu_kernels
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.quantised_layers import PACKINGS, PackedLinear
from ckpt_ft.workloads.load import load

SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320,
}  # fmt: skip
N = 2 * (4 * 256 * 256 + 3 * 256 * 512)  # number of packed weights
ROWS, COLUMNS = 2 * (4 * 256 + 2 * 512 + 256), 2 * (4 * 256 + 2 * 256 + 512)
REST = 2 * (2 * 320 * 256 + 5 * 256)  # bytes of embeddings, head and norms in bfloat16
LORA = TrainingSpec.of(lora_r=8, dtype="bfloat16", device="cpu", seq_length=32)


def checkpoint(path: Path, quantisation: Any) -> str:
    (path / "config.json").write_text(json.dumps({**SIZES, "quantization_config": quantisation}))
    return str(path)


def frozen(path: Path, quantisation: Any, spec: TrainingSpec = LORA) -> int:
    """Returns the bytes of the base: everything except adapters and rotary frequencies."""
    model = load(spec.edit(model=checkpoint(path, quantisation))).model
    held = [*model.named_parameters(), *model.named_buffers()]
    return sum(t.nbytes for name, t in held if "lora" not in name and "inv_freq" not in name)


@pytest.mark.parametrize(
    ("quantisation", "nbytes"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, N // 2 + N // 128 * 5 // 2 + 4 * COLUMNS),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, N + 3 * ROWS + 4 * COLUMNS),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, N // 2 + N // 64 * 5 // 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, N + 4 * N // 128**2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, N // 2 + 4 * N // 64 + 14 * 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, N + 4 * ROWS),
        ({"quant_method": "compressed-tensors"}, 2 * N),
        ({"quant_method": "mxfp4"}, 2 * N),
    ],
)  # fmt: skip
def test_bytes_of_a_quantised_base(tmp_path: Path, quantisation: Any, nbytes: int) -> None:
    assert frozen(tmp_path, quantisation) == REST + nbytes


def test_layers_excluded_from_quantisation_are_not_packed(tmp_path: Path) -> None:
    quantisation = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    left = frozen(tmp_path, {**quantisation, "modules_to_not_convert": ["lm_head", "down_proj"]})
    n = 256 * 512
    assert left - frozen(tmp_path, quantisation) == 2 * (2 * n - n // 2 - n // 128 * 5 // 2 - 4 * 512)


@pytest.mark.parametrize(
    ("quantisation", "changes", "says"),
    [
        ({"quant_method": "gptq"}, {"lora_r": 0}, "is quantised by gptq, and such weights cannot be trained"),
        ({"quant_method": "compressed-tensors"}, {"lora_r": 0}, "by compressed-tensors, and such weights cannot be"),
        ({"load_in_4bit": True}, {"lora_r": 0}, "is quantised by bitsandbytes, and such weights cannot be trained"),
        ({"quant_method": "mxfp4"}, {"load_in_4bit": True}, "is quantised by mxfp4, over which transformers loads no"),
        ({"quant_method": "spqr"}, {}, "is quantised by spqr, over which transformers trains nothing"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, {}, "by torchao, which is not modelled"),
        ({"quant_method": "awq", "bits": 4}, {"load_in_4bit": True}, "by awq already: leave --load-in-4bit"),
        ({"quant_method": "sinq"}, {}, "by sinq, which is not modelled (bitsandbytes, gptq, "),
        ({"quant_method": "gptq", "bits": 3}, {}, "is quantised by gptq in 3 bits, which is not modelled"),
        ("gptq", {}, "quantization_config is an object with a quant_method"),
    ],
)  # fmt: skip
def test_other_quantisation_is_refused(tmp_path: Path, quantisation: Any, changes: dict[str, Any], says: str) -> None:
    spec = LORA.edit(model=checkpoint(tmp_path, quantisation))
    with pytest.raises(UserError) as refused:
        load(spec.edit(**changes))
    assert says in str(refused.value)


def test_packed_experts_are_refused(tmp_path: Path) -> None:
    config = {
        **SIZES, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="packed weights of experts are not modelled"):
        load(LORA.edit(model=str(tmp_path)))


@pytest.mark.parametrize("method", PACKINGS)
def test_peak_of_unpacked_weights(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers: all unpacked weights at once, or one at a time.

    Memory inside a half-precision matmul is left out, because it differs between CPUs (AMX packs the weight).
    """
    monkeypatch.setattr(cpu_kernels, "takes_scratch", lambda func, args: False)
    size, rows = 1024, 8
    unpacked = 2 * size**2

    def step(model: nn.Module, optimizer: object) -> None:
        model(torch.ones(rows, size, dtype=torch.bfloat16).requires_grad_()).sum().backward()

    with torch.device("meta"):
        layers = [
            PackedLinear(nn.Linear(size, size, bias=False, dtype=torch.bfloat16), PACKINGS[method], 8, 0)
            for _ in range(2)
        ]
    trace = trace_step(nn.Sequential(*layers), step, device="cpu")
    base = sum(t.nbytes for layer in layers for t in (layer.weight, *layer.buffers()))
    peak = trace.peak_allocated - base
    assert peak == pytest.approx(unpacked, abs=unpacked // 8)
