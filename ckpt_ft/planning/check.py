"""`ckpt-ft check`: parity of a policy on a real model, with its saved weights if there are any."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # also required by accelerate
import torch
from torch import nn

from ckpt_ft.checkpointing.parity import Parity, check_parity
from ckpt_ft.compat.tensors import tree_map_only
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import format_bytes
from ckpt_ft.validation import library_reads, require_weights
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import hub_answers, hub_id
from ckpt_ft.workloads.transformers_models import task_of
from ckpt_ft.workloads.workload import Workload

_TOPS = {
    "timestep": 1000,
    "class_labels": 1000,
}  # ranges of a diffusion model's integer inputs; masks and styles stay zero


def check_model(spec: TrainingSpec, seed: int) -> Parity:
    """Parity of the spec's policy on its model (Hub id, directory or config file) and a batch of random data.

    The weights are those saved in a directory or on the Hub (offline: in the Hub's cache), or random ones if there is
    only a config. A note says which.

    Raises:
        UserError: an unknown model, weights that cannot be read or do not fit into memory, or an unsuitable policy.
    """
    name, batch_size = spec.model.name, spec.data.batch_size
    torch.manual_seed(seed)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    workload = load(spec, current_gpu() or "cpu")
    _check_room(name, workload.model, device)
    model, saved = _with_weights(name, workload.model)
    model = model.to(device)
    batch = tree_map_only(torch.Tensor, lambda x: x.to(device), _random(workload, spec, batch_size))
    if _of_diffusers(without_adapters(workload.model)):  # a trace needs only the size of the noise
        with torch.no_grad():
            noise: Any = model(**batch, return_dict=False)[0]
        batch["target"] = torch.randn_like(torch.stack(noise) if isinstance(noise, list) else noise)
    parity = check_parity(model, batch, spec.policy, loss=workload.loss_of, seed=seed)
    weights = "the saved weights" if saved else "random weights: none are saved there, or the Hub cannot be reached"
    return replace(parity, notes=[*parity.notes, f"note: {name} with {weights}"])


def _check_room(name: str, model: nn.Module, device: torch.device) -> None:
    """Raises UserError, before the system kills the process, if weights and two copies of gradients do not fit."""
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    needed = sum(size for size, _ in sizes) + 2 * sum(size for size, trained in sizes if trained)
    free = psutil.virtual_memory().available if device.type == "cpu" else torch.accelerator.get_memory_info(device)[0]
    if needed > free:
        raise UserError(
            f"{name}: a check needs {format_bytes(needed)} for weights and gradients alone, {format_bytes(free)} are "
            "free; check a config with fewer layers: the blocks are alike"
        )


def _with_weights(name: str, meta: nn.Module) -> tuple[nn.Module, bool]:
    """The model that `meta` describes, and whether it has saved weights instead of newly initialised ones."""
    adapted: Any = meta
    base = without_adapters(meta)
    real = _saved(name, base)
    saved = real is not None
    if real is None:
        real = type(base).from_config(base.config) if _of_diffusers(base) else type(base)(base.config)
    nn.Module.to(real, base.dtype)
    if base is meta:
        return real.train(), saved
    from peft import get_peft_model

    return get_peft_model(real, adapted.peft_config["default"]).train(), saved


def _saved(name: str, base: Any) -> Any:
    """The model with the weights of the directory or Hub model `name`; None if there are none."""
    if Path(name).is_file():
        return None
    source, local = (name, True) if Path(name).is_dir() else (hub_id(name), not hub_answers())
    options: list[dict[str, Any]] = (
        [{"subfolder": part} for part in ("unet", "transformer", None)]
        if _of_diffusers(base)
        else [{"config": base.config, "dtype": base.dtype}]
    )
    with library_reads(f"{name}: its saved weights cannot be read"):
        for option in options:
            try:
                found = type(base).from_pretrained(source, local_files_only=local, **option)
            except OSError:
                folder = Path(source, option.get("subfolder") or "")
                if any(path.suffix in (".safetensors", ".bin") for path in folder.glob("*")):
                    raise
                continue
            require_weights(found)
            return found
    return None


def _of_diffusers(model: nn.Module) -> bool:
    return type(model).__module__.startswith("diffusers.")


def _random(workload: Workload, spec: TrainingSpec, batch_size: int) -> dict[str, Any]:
    """A batch of random content: token ids within the vocabulary, labels within the classes."""
    model: Any = workload.model
    base = without_adapters(model)
    task = task_of(type(base).__name__)
    fields = task.fields(base, spec) if task is not None else {}

    def fill(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "input_ids" and spec.data.images:  # its tokens mark the places of images
            return x
        if x.is_floating_point():
            return torch.randn(x.shape)
        top = fields[name].top if name in fields else _TOPS.get(name)
        return x if top is None else torch.randint(top, x.shape)

    batch = workload.make_batch(batch_size, None)
    return {name: tree_map_only(torch.Tensor, partial(fill, name), value) for name, value in batch.items()}
