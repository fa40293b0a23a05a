"""`ckpt-ft check`: parity of a policy on a real model, with its saved weights where it has any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ckpt_ft.checkpointing.parity import Parity, check_parity
from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import read_config
from ckpt_ft.workloads.settings import Settings

_TIMESTEPS = 1000  # of a noise schedule


def check_model(name: str, policy: str, settings: Settings, batch_size: int, seed: int) -> Parity:
    """Parity of `policy` on the model `name` (Hub id, directory or config file) on a batch of random data.

    Weights are the saved ones of a directory or Hub model, and random ones where there is only a config.

    Raises:
        UserError: no such model, or the policy does not fit it.
    """
    torch.manual_seed(seed)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    workload = load(name, settings, current_gpu() or "cpu")
    model = _with_weights(name, workload.model).to(device)
    batch = _random(workload.make_batch(batch_size, None), model, device)

    return check_parity(model, batch, policy, loss=workload.loss_of, seed=seed)


def _with_weights(name: str, meta: nn.Module) -> nn.Module:
    """The model that `meta` describes with real weights: the saved ones, else the initialisation of its class."""
    adapted: Any = meta if hasattr(meta, "peft_config") else None
    base: Any = meta if adapted is None else adapted.get_base_model()
    kind: Any = type(base)
    path = Path(name)
    if "_class_name" in read_config(name):
        subfolder = next((part for part in ("unet", "transformer") if (path / part).is_dir()), None)
        saved = any(path.rglob("diffusion_pytorch_model*"))
        real = kind.from_pretrained(name, subfolder=subfolder) if saved else kind.from_config(base.config)
    elif any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        real = kind.from_pretrained(name, attn_implementation=base.config._attn_implementation)
    else:
        real = kind(base.config)
    if adapted is None:
        return real.train()
    from peft import get_peft_model

    return get_peft_model(real, adapted.peft_config["default"]).train()


def _random(batch: dict[str, Any], model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The batch with random content: token ids within the vocabulary, labels within the classes."""
    config: Any = model.config
    classes = getattr(config, "num_labels", _TIMESTEPS)
    top = config.get_text_config().vocab_size if "input_ids" in batch else classes

    def fill(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.randn(x.shape, device=device)
            if x.is_floating_point()
            else torch.randint(top, x.shape, device=device)
        )

    filled: dict[str, Any] = tree_map_only(torch.Tensor, fill, batch)
    if "input_ids" in filled:
        filled["labels"] = filled["input_ids"].clone()
    return filled
