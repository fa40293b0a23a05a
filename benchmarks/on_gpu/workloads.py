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

# The first three workloads run every policy, the others the most informative ones.
LANGUAGE = (
    "none",
    "full",
    "save:attention+matmul",
    "pointwise",
    "head",
    "pointwise,head",
    "full,head",
    "every:2",
    "sqrt",
    "modules:attention",
    "modules:mlp",
    "save:attention",
    "offload",
    "full,offload",
)
VISION = ("none", "full", "save:attention+matmul", "pointwise", "every:2", "sqrt", "modules:mlp", "offload")
STAGED = ("none", "full", "stages", "save:conv", "pointwise")
CORE = ("none", "full", "save:attention+matmul", "pointwise")
UNET = ("none", "full", "save:attention+matmul+conv", "pointwise")


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
_LORA = {"dtype": "bfloat16", "lora_r": 16, "lora_dropout": 0.0, "seq_length": 2048}
_AMP = {"mixed_precision": "bf16"}

SPECS = (
    Spec("Llama-1B LoRA", "meta-llama/Llama-3.2-1B", 4, LANGUAGE, _LORA),
    Spec("ViT-L", "google/vit-large-patch16-224", 32, VISION, _AMP),
    Spec("ResNet-50", "microsoft/resnet-50", 64, STAGED, {}),
    Spec("Llama-8B LoRA", "meta-llama/Llama-3.1-8B", 1, (*CORE, "pointwise,head"), _LORA),
    Spec("0.5B full", "Qwen/Qwen2.5-0.5B", 4, (*CORE, "pointwise,head"), {**_AMP, "seq_length": 1024}),
    Spec("SD 1.5 LoRA", _SD15, 4, UNET, {**_AMP, "lora_r": 16}),
    Spec("SD 1.5 full", _SD15, 4, (*UNET, "stages"), _AMP),
    Spec("SDXL LoRA", _SDXL, 1, UNET, {"dtype": "bfloat16", "lora_r": 16}),
    Spec("SDXL full", _SDXL, 1, UNET, _AMP),
)
# one where the host's time shows, and one where it does not
SMALL_BATCH = Spec("small batch", "meta-llama/Llama-3.2-1B", 1, CORE, {**_LORA, "seq_length": 64})
LARGE_BATCH = Spec("large batch", "meta-llama/Llama-3.2-1B", 8, CORE, _LORA)
BUDGET = "24GiB"  # for max-batch and plan: less than any intended GPU has

_TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
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
_TINY_LORA = {"lora_r": 2, "lora_dropout": 0.0, "seq_length": 32}

DRY_SPECS = (
    Spec("Llama-1B LoRA", _TINY_LLAMA, 2, ("none", "full", "pointwise"), _TINY_LORA),
    Spec("ResNet-50", _TINY_RESNET, 2, ("none", "stages"), {"resolution": 32}),
    Spec("SD 1.5 full", _TINY_UNET, 2, ("full",), {}),
)
DRY_SMALL = Spec("small batch", _TINY_LLAMA, 1, ("none",), {**_TINY_LORA, "seq_length": 8})
DRY_LARGE = Spec("large batch", _TINY_LLAMA, 4, ("none",), _TINY_LORA)
DRY_BUDGET = "8MiB"
