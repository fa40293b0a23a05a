"""Converts a U-Net's LoRA to kohya's names, which AUTOMATIC1111, ComfyUI, InvokeAI and others load.

diffusers' converter chooses the names but sets every alpha to the rank; here alpha is the one used in training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.files import write
from ckpt_ft.reading import library_reads

from .run.resume import PIPELINE_LORA

_COMPONENTS = ("unet", "text_encoder", "text_encoder_2")
_METADATA = "lora_adapter_metadata"  # metadata key of the configurations in diffusers' files


def to_kohya(adapter: str, output: str) -> Path:
    """Write the LoRA of a run of recipes/diffusion_unet.py to the file `output`, under kohya's names.

    adapter: the run's output_dir, or the LoRA file in it.

    Raises:
        UserError: the LoRA is missing, incomplete, not a U-Net's or more than LoRA, or `output` exists or is not
            writable.
    """
    from safetensors.torch import save_file

    source, target = Path(adapter), Path(output)
    source = source / PIPELINE_LORA if source.is_dir() else source
    if not source.is_file():
        raise UserError(f"{adapter} holds no {PIPELINE_LORA}; give the output_dir of a U-Net's LoRA run")
    if target.suffix != ".safetensors" or target.exists():
        raise UserError(f"--output {output}: give a new file, NAME.safetensors")
    weights, settings = _read(source)
    named = _named(weights, settings, source)
    try:
        write(target, partial(save_file, named, metadata={"format": "pt"}))
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {one_line(error)}") from error
    return target


def _read(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns weights under PEFT's names, and the settings of their components, such as 'unet.lora_alpha'."""
    from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
    from safetensors import safe_open

    with library_reads(f"{source} cannot be read"):
        with safe_open(source, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
            settings = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
        foreign = next((name for name in weights if name.partition(".")[0] not in _COMPONENTS), None)
        if foreign is not None:
            raise UserError(
                f"{source}: {foreign} is of no U-Net, which alone diffusers has kohya's names for; a transformer's "
                "LoRA is loaded by those tools under the names that it has"
            )
        weights = {
            new: value
            for of_unet, convert in ((True, convert_unet_state_dict_to_peft), (False, convert_state_dict_to_peft))
            if (part := {name: value for name, value in weights.items() if name.startswith("unet.") is of_unet})
            for new, value in (part if _is_peft(part) else convert(part)).items()
        }
    other = next((name for name in weights if not name.endswith((".lora_A.weight", ".lora_B.weight"))), None)
    if other is not None:
        raise UserError(f"{source}: {other} is more than LoRA (DoRA?), for which diffusers has no name of kohya's")
    lone = next((name for name in weights if _other_half(name) not in weights), None)
    if lone is not None or not weights:
        raise UserError(f"{source} is no whole LoRA: it lacks {_other_half(lone) if lone else 'all of it'}")
    return weights, settings


def _other_half(name: str) -> str:
    a, b = ".lora_A.", ".lora_B."
    return name.replace(a, b) if a in name else name.replace(b, a)


def _is_peft(weights: Mapping[str, Tensor]) -> bool:
    return any(".lora_A." in name for name in weights)


def _named(weights: dict[str, Tensor], settings: Mapping[str, Any], source: Path) -> dict[str, Tensor]:
    from diffusers.utils import convert_state_dict_to_kohya

    named: dict[str, Tensor] = {}
    for name, down in weights.items():
        if not name.endswith(".lora_A.weight"):
            continue
        pair = {half: weights[half] for half in (name, _other_half(name))}
        with library_reads(f"{source}: {name}"):
            renamed = convert_state_dict_to_kohya(pair)
        alpha = next(key for key in renamed if key.endswith(".alpha"))
        renamed[alpha] = torch.tensor(_alpha(name, len(down), settings))
        named |= {key: value.contiguous() for key, value in renamed.items()}
    return named


def _alpha(name: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Returns kohya's alpha, which divided by the rank scales a module; the rank itself if the file has none."""
    from peft.utils.other import get_pattern_key

    component, _, rest = name.partition(".")
    module = rest.removesuffix(".lora_A.weight")
    own = {key.partition(".")[2]: value for key, value in settings.items() if key.partition(".")[0] == component}
    patterns = own.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(patterns.keys(), module), own.get("lora_alpha", rank))
    return float(alpha) * math.sqrt(rank) if own.get("use_rslora") else float(alpha)
