"""Checks, before a recipe loads anything, that the host has enough memory for what a run moves there.

`swap:N`, `offload`, `--offload_optimizer` and the launch (DeepSpeed ZeRO, FSDP2) put weights, activations or optimizer
state into host memory. How much is predicted as by `ckpt-ft estimate`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # also required by accelerate
import yaml

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.planning.estimate import traced_estimate
from ckpt_ft.policy import Policy
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch, ZeroOptions
from ckpt_ft.spec.settings import KINDS, LIVE, REFUSED, entry_of
from ckpt_ft.spec.training_file import read_training
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.model_config import hub_id

logger = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = (  # of version 2 and 1: limit, use, and in memory.stat what the system can take back
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def check_host_memory(tokens: Iterable[str], recipe: str) -> None:
    """Raises UserError if the host has too little memory.

    The first process of a machine checks for all of them. A run without a GPU, or one that cannot be predicted, is not
    checked.

    Args:
        tokens: the flags of the run, with those of its `--config`.
        recipe: the name of the script.
    """
    gpu, flags, launch = current_gpu(), _values(tokens), _offloading_launch()
    users = [f"--ac_policy {flags['ac_policy']}"] if _uses_host(str(flags.get("ac_policy", ""))) else []
    users += [f"--offload_optimizer {flags['offload_optimizer']}"] if flags.get("offload_optimizer") else []
    users += [str(launch)] if launch is not None else []
    if gpu is None or not users or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        read = read_training(flags, "the flags", recipe, ignored=_not_predicted(flags, recipe))
        fields = {**fields_of(dict(read.flags)), "device": gpu.name, **({"launch": launch} if launch else {})}
        found, _ = traced_estimate(TrainingSpec.of(hub_id(read.model), **fields), logger.debug, suggests=False)
    except Exception as error:  # what cannot be predicted may still run
        logger.debug("host memory is not predicted: %s", one_line(error))
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, free = found.peak_host * processes, free_host_bytes()
    if needed > free:
        raise UserError(
            f"{' and '.join(users)}: {format_bytes(needed)} of host memory are needed, and {format_bytes(free)} are "
            "free; keep more on the card, or use a larger host"
        )


def free_host_bytes() -> int:
    """Bytes that this process can still take: of the machine, and of its control group (a container, a job)."""
    free = int(psutil.virtual_memory().available)
    for limit, used, cached in _GROUPS:
        try:
            most = int((_CGROUP / limit).read_text())  # "max" without a limit
            stated = (line.split() for line in (_CGROUP / limit).with_name("memory.stat").read_text().splitlines())
            taken = int((_CGROUP / used).read_text()) - int(dict(stated).get(cached, 0))
        except (OSError, ValueError):
            continue
        free = min(free, max(most - taken, 0))
    return free


def _not_predicted(flags: Mapping[str, Any], recipe: str) -> list[str]:
    """Flags that a prediction leaves out: they are unknown to it, are about the live run, or would be refused."""
    entries = ((name, entry_of(name, KINDS[recipe]), value) for name, value in flags.items())
    return [name for name, entry, value in entries if entry is None or entry.of(value).kind in (LIVE, REFUSED)]


def _values(tokens: Iterable[str]) -> dict[str, Any]:
    """The values of a command line by the names of their flags, typed as in a YAML file."""
    found: dict[str, list[Any]] = {}
    for token in tokens:
        if token.startswith("--"):
            name, equals, word = token[2:].partition("=")
            found[name] = [_typed(word)] if equals else []
        elif found:
            found[name].append(_typed(token))
    return {name: values[0] if len(values) == 1 else values or True for name, values in found.items()}


def _typed(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:  # "*" or "=", for example
        return word


def _uses_host(policy: str) -> bool:
    """Whether a policy keeps weights or activations in host memory."""
    try:
        parsed = Policy.parse(policy)
    except UserError:  # a plan file, or none
        return False
    return bool(parsed.swap or parsed.offload)


def _offloading_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch that `accelerate launch` describes in the environment, if it offloads to the host; else None."""
    processes = int(environment.get("WORLD_SIZE", "1"))
    machines = max(processes // int(environment.get("LOCAL_WORLD_SIZE", "1")), 1)
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    away: dict[str, Any] = {
        f"offload_{what}": environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE") == "cpu"
        for what in ("optimizer", "param")
    }
    if any(away.values()):
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        return Launch(f"zero{stage}", processes, machines, mixed_precision=precision, zero=ZeroOptions(**away))
    if environment.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
        return Launch("fsdp2", processes, machines, mixed_precision=precision, offload_params=True)
    return None
