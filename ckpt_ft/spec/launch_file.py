"""Accelerate's configuration files, read into a `Launch` and written from one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import yaml

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.units import whole_number
from ckpt_ft.validation import load_yaml

from .launch import OFFLOADS, SIZES, Launch, ZeroOptions
from .settings import read_settings

# Keys that accelerate refuses if there is a DeepSpeed file (accelerate/utils/dataclasses.py:
# _deepspeed_config_checks).
_IN_THE_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip


def read_launch(
    source: str | Path | Mapping[str, Any],
    processes: int | None = None,
    mixed_precision: str = "no",
    ignored: Collection[str] = (),
) -> tuple[Launch, dict[str, Any]]:
    """Returns the launch that an accelerate configuration describes, and the fields of a spec that it also sets.

    Args:
        source: the file, or its content.
        processes: overrides the file's `num_processes`.
        mixed_precision: overrides the file's, unless it is "no".
        ignored: settings that the user lets pass, although they are refused or unknown.

    Raises:
        UserError: the file does not exist, asks for what is not modelled, or is refused by accelerate.
    """
    path = "--config" if isinstance(source, Mapping) else source
    config = {key: value for key, value in _document(source).items() if key not in ignored}
    found = read_settings(config, ("accelerate",), f"launch {path}", ignored)
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind not in _SHARING:
        raise UserError(
            f"launch {path}: distributed_type {kind} is not modelled (MULTI_GPU, FSDP of version 2, DEEPSPEED)"
        )
    sizes = {name: _count(found.pop(name), f"{name} size", path) for name in (*SIZES, "dp_shard") if name in found}
    shard = sizes.pop("dp_shard", 0)
    rotation = {"rotation": found.pop("rotation")} if "rotation" in found else {}
    given = {
        **sizes,
        **rotation,
        "mixed_precision": str(config.get("mixed_precision") or "no"),
        **_SHARING[kind](config, path, ignored),
    }
    found |= given.pop("found", {})
    if mixed_precision != "no":
        given["mixed_precision"] = mixed_precision
    launch = Launch(
        **given,
        processes=_count(processes or config.get("num_processes", 1), "num_processes", path),
        machines=_count(config.get("num_machines", 1), "num_machines", path),
    )
    if shard > 1 and shard != launch.mesh.get("dp_shard", 1):
        raise UserError(
            f"launch {path}: {launch.processes} processes, and the sizes of parallelism_config make "
            f"{shard * prod(sizes.values())}; they must agree"
        )
    if launch.tp > 1 and launch.strategy == "fsdp2":
        raise UserError(
            f"launch {path}: tp {launch.tp} with FSDP: accelerate 1.15 imports ReplicateParallel for it, "
            "which transformers 5.23 does not have; --launch fsdp2 --tp predicts transformers' own DistributedConfig"
        )
    if not isinstance(source, Mapping):
        _check_with_accelerate(source)
    also = {key: found[key] for key in _ALSO if found.get(key) not in (None, "auto")}
    return launch, {key: float(value) if key == "max_grad_norm" else value for key, value in also.items()}


_ALSO = ("accumulation", "max_grad_norm", "batch_size")  # fields of a spec that a launch's file may set, too


def _document(path: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(path, Mapping):
        return path
    config = load_yaml(path, f"launch {path}")  # JSON is YAML
    if not isinstance(config, dict):
        raise UserError(f"launch {path}: not an accelerate configuration (`accelerate config` writes one)")
    return config


def _check_with_accelerate(path: str | Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        load_config_from_file(str(path))
    except (ValueError, TypeError, KeyError) as error:
        reason = one_line(error).removeprefix(f"The config file at {path} had ").partition(", please")[0]
        raise UserError(f"launch {path}: accelerate refuses it: {reason}") from error


def _ddp(config: Mapping[str, Any], path: str | Path, ignored: Collection[str]) -> dict[str, Any]:
    return {"strategy": "ddp"}


def _fsdp2(config: Mapping[str, Any], path: str | Path, ignored: Collection[str]) -> dict[str, Any]:
    options = {key.removeprefix("fsdp_"): value for key, value in _section(config, "fsdp_config", path).items()}
    if str(options.get("version", 1)) != "2":
        raise UserError(f"launch {path}: FSDP of version 1 is not modelled; set fsdp_version: 2 in fsdp_config")
    wrapping = str(options.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
    classes = options.get("transformer_layer_cls_to_wrap") or options.get("transformer_cls_names_to_wrap") or ""
    classes = classes if isinstance(classes, list) else str(classes).split(",")
    reshard = str(options.get("reshard_after_forward", True)).strip().lower()
    if reshard not in ("true", "1", "yes", "false", "0", "no"):
        raise UserError(
            f"launch {path}: fsdp_reshard_after_forward {reshard}: accelerate takes true or false for FSDP2"
        )
    return {
        "strategy": "fsdp2",
        "reshard_after_forward": _truth(reshard),
        "offload_params": _truth(options.get("offload_params", options.get("cpu_offload", False))),
        "wrap": None if wrapping == "NO_WRAP" else tuple(str(name).strip() for name in classes if str(name).strip()),
    }


def _zero(config: Mapping[str, Any], path: str | Path, ignored: Collection[str]) -> dict[str, Any]:
    options = _section(config, "deepspeed_config", path)
    file = options.get("deepspeed_config_file")
    if file in (None, "none"):
        away = {name: str(options.get(f"{name}_device") or "none").lower() == "cpu" for name in OFFLOADS}
        return {**_stage(options.get("zero_stage", 2), path), "zero": ZeroOptions(**away)}
    beside = [key for key in _IN_THE_FILE if key in options]
    if config.get("mixed_precision"):
        beside.append("mixed_precision")
    if beside:
        raise UserError(f"launch {path}: accelerate takes no {', '.join(beside)} beside a deepspeed_config_file")
    return _deepspeed_file(file, ignored)


def _deepspeed_file(file: Any, ignored: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a launch that DeepSpeed's configuration sets: a file, or its content."""
    name = "deepspeed" if isinstance(file, Mapping) else f"deepspeed_config_file {file}"
    try:
        config = dict(file) if isinstance(file, Mapping) else json.loads(Path(str(file)).read_text(encoding="utf-8"))
        zero = config["zero_optimization"]
        stage = zero["stage"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"launch: {name}: cannot be read, or has no ZeRO stage ({error!r})") from error
    named = config.get("optimizer")
    if isinstance(named, Mapping):
        config["optimizer"] = str(named.get("type"))
    found = read_settings(config, ("deepspeed",), f"launch: {name}", ignored)
    precision = [dtype for dtype in ("bf16", "fp16") if _truth(_section(config, dtype, name).get("enabled", False))]
    return {
        **_stage(stage, name),
        "zero": ZeroOptions.read({key: zero[key] for key in zero if key not in ignored}, f"launch: {name}"),
        "mixed_precision": precision[0] if precision else "no",
        "found": found,
    }


def _stage(stage: Any, path: str | Path) -> dict[str, Any]:
    if str(stage) not in ("1", "2", "3"):
        raise UserError(f"launch {path}: ZeRO stage {stage} is not modelled (1, 2, 3); for stage 0 take MULTI_GPU")
    return {"strategy": f"zero{stage}"}


def _section(config: Mapping[str, Any], key: str, path: str | Path) -> dict[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, dict):
        raise UserError(f"launch {path}: {key} {section}: give 'key: value' lines")
    return section


def _truth(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes")


def _count(value: Any, name: str, path: str | Path) -> int:
    number = whole_number(str(value))
    if not number:
        raise UserError(f"launch {path}: {name} {value}: give a whole number of at least 1")
    return number


_SHARING = {"NO": _ddp, "MULTI_GPU": _ddp, "FSDP": _fsdp2, "DEEPSPEED": _zero}


def accelerate_config(launch: Launch) -> str:
    """Returns the text of an accelerate configuration file for `launch`; `read_launch` reads it back.

    Raises:
        UserError: the launch has options that the file has no keys for.
    """
    if replace(launch.zero, **dict.fromkeys(OFFLOADS, False)) != ZeroOptions():
        raise UserError("launch: DeepSpeed's own options lie in its own file; name it as deepspeed_config_file")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _KINDS[launch.strategy],
        "use_cpu": False,
        "mixed_precision": launch.mixed_precision,
        "machine_rank": 0,
        "num_machines": launch.machines,
        "num_processes": launch.processes,
        "rdzv_backend": "static",
        "same_network": True,
        "debug": False,
        **sharing_options(launch),
    }
    if sizes := parallelism(launch):
        config["parallelism_config"] = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    if launch.machines > 1:
        config |= {"main_process_ip": "127.0.0.1", "main_process_port": 29500}
    return yaml.safe_dump(config, sort_keys=False)


def parallelism(launch: Launch) -> dict[str, int | str]:
    """Returns the fields of accelerate's ParallelismConfig; {} if the launch needs none."""
    if all(getattr(launch, name) == 1 for name in SIZES):
        return {}
    sizes: dict[str, int | str] = {
        f"{name}_size": launch.mesh.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    return {**sizes, "cp_comm_strategy": launch.rotation} if launch.cp > 1 else sizes


def sharing_options(launch: Launch) -> dict[str, dict[str, Any]]:
    """Returns the part of accelerate's configuration that describes how the model is shared."""
    if launch.strategy == "fsdp2":
        wrapped = {"fsdp_transformer_layer_cls_to_wrap": ",".join(launch.wrap)} if launch.wrap else {}
        return {
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_activation_checkpointing": False,
                "fsdp_auto_wrap_policy": "NO_WRAP" if launch.wrap is None else "TRANSFORMER_BASED_WRAP",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_offload_params": launch.offload_params,
                "fsdp_reshard_after_forward": launch.reshard_after_forward,
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                **wrapped,
            }
        }
    if launch.stage:
        return {
            "deepspeed_config": {
                "zero_stage": launch.stage,
                **{f"{name}_device": "cpu" if getattr(launch.zero, name) else "none" for name in OFFLOADS},
                "zero3_init_flag": launch.stage == 3,
                "zero3_save_16bit_model": launch.stage == 3,
            }
        }
    return {}


_KINDS = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
