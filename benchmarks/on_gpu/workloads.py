"""Workloads for the GPU: models by configuration, policies and sizes; and toy sizes for `--dry-run`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

LANGUAGE = ("none", "full", "pointwise", "head", "save:attention+matmul", "pointwise,head", "full,head", "offload")
CORE = ("none", "full", "pointwise", "save:attention+matmul")
UNET = ("none", "full", "save:attention+matmul+conv", "pointwise")
EXACT = (
    "full", "every:2", "first:2", "segments:2", "sqrt", "modules:attention", "modules:mlp", "save:attention",
    "save:attention+matmul", "offload", "full,offload", "tile", "pointwise", "head", "pointwise,offload",
    "full,head,offload",
)  # fmt: skip
FROZEN = ("swap:3", "full,swap:3", "pointwise,swap:3", "save:matmul,offload,swap:3")


@dataclass(frozen=True)
class Spec:
    """A workload; `model` is a name that ckpt_ft knows without a download, or a configuration as a dict."""

    name: str
    model: str | dict[str, Any]
    batch: int
    policies: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Workload:
        """The model on meta, its step and optimizer.

        Raises:
            UserError: diffusers is needed and absent.
        """
        settings = TrainingSpec.of(**self.settings)
        if isinstance(self.model, str):
            return load(settings.edit(model=self.model), "t4")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(self.model), encoding="utf-8")
            return load(settings.edit(model=str(path)), "t4")


_SD15, _SDXL = "stable-diffusion-v1-5/stable-diffusion-v1-5", "stabilityai/stable-diffusion-xl-base-1.0"
_LLAMA, _QWEN = "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B"
_LORA = {"dtype": "bfloat16", "lora_r": 16, "lora_dropout": 0.0, "seq_length": 2048}
_AMP = {"mixed_precision": "bf16"}

# peaks and seconds, the most informative first
SPECS = (
    Spec("Llama-1B LoRA", _LLAMA, 4, LANGUAGE, _LORA),
    Spec("0.5B full, AMP", _QWEN, 4, (*CORE, "pointwise,head"), {**_AMP, "seq_length": 1024}),
    Spec("0.5B full, fp32", _QWEN, 2, ("none", "full", "pointwise"), {"seq_length": 1024}),
    Spec("Llama-1B LoRA compiled", _LLAMA, 4, ("none", "full", "budget:0.5"), {**_LORA, "compile": "regional"}),
    Spec("SD 1.5 full", _SD15, 4, (*UNET, "stages"), _AMP),
    Spec("small batch", _LLAMA, 1, CORE, {**_LORA, "seq_length": 64}),  # the host's time shows
    Spec("large batch", _LLAMA, 8, CORE, _LORA),
    Spec("ResNet-50", "microsoft/resnet-50", 64, ("none", "full", "stages", "save:conv", "pointwise"), {}),
    Spec("ViT-L", "google/vit-large-patch16-224", 32, (*CORE, "offload"), _AMP),
    Spec("Llama-8B LoRA", "meta-llama/Llama-3.1-8B", 1, CORE, _LORA),
    Spec("SDXL LoRA", _SDXL, 1, UNET, {"dtype": "bfloat16", "lora_r": 16}),
)
OVERLAP = Spec("Llama-1B LoRA", _LLAMA, 4, ("none", "offload", "swap:8", "full,swap:16", "full,offload"), _LORA)
BUDGET = "24GiB"  # for the largest batch and the plan: less than any intended GPU has


def _llama(width: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "vocab_size": 2 * width, "max_position_embeddings": 512, "attention_dropout": 0.1,
    }  # fmt: skip


_TINY_RESNET = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "embedding_size": 8,
    "layer_type": "basic",
    "num_channels": 3,
}
_TINY_UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "block_out_channels": [8, 8],
    "layers_per_block": 1,
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}
_SMALL = _llama(256, 4)  # its saved tensors have 1 MiB and more, so that `offload` copies them
_LENGTH = {"seq_length": 512}
_ADAPTED = {**_LENGTH, "lora_r": 4, "lora_dropout": 0.1}

# numbers: small, because what differs does so at any size
NUMBERS = (
    Spec("Llama", _SMALL, 2, EXACT, _LENGTH),
    Spec("Llama LoRA", _SMALL, 2, (*FROZEN, "full", "pointwise", "offload"), _ADAPTED),
    Spec(
        "Llama AMP", _SMALL, 2, ("full", "save:attention+matmul", "pointwise", "head", "offload"), {**_LENGTH, **_AMP}
    ),
    Spec("ResNet", _TINY_RESNET, 4, ("full", "stages", "save:conv", "pointwise"), {"resolution": 32}),
    Spec("U-Net", _TINY_UNET, 2, ("full", "save:attention+matmul+conv", "pointwise"), {}),
)
RACES = (
    Spec("Llama", _SMALL, 2, ("offload", "full,offload", "pointwise,offload", "save:matmul,offload"), _LENGTH),
    Spec("Llama LoRA", _SMALL, 2, FROZEN, _ADAPTED),
)

_TINY_LORA = {"lora_r": 2, "lora_dropout": 0.0, "seq_length": 32}
DRY_SPECS = (
    Spec("Llama-1B LoRA", _llama(32, 2), 2, ("none", "full", "pointwise"), _TINY_LORA),
    Spec("ResNet-50", _TINY_RESNET, 2, ("none", "stages"), {"resolution": 32}),
    Spec("SD 1.5 full", _TINY_UNET, 2, ("full",), {}),
)
DRY_OVERLAP = Spec("Llama-1B LoRA", _llama(32, 3), 2, ("none", "offload", "swap:3"), _TINY_LORA)
DRY_BUDGET = "8MiB"
