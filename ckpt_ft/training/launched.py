"""Describes the distributed launch of this process as a `Launch` that a trace can model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import Launch, ZeroOptions
from ckpt_ft.workloads.from_trainer import precision_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

Answer = TypeVar("Answer")


def launch_of(accelerator: Accelerator) -> Launch | None:
    """The launch of `accelerator` and this process's rank in it; None for one process.

    Raises:
        UserError: the launch is not modelled.
    """
    if accelerator.num_processes == 1:
        return None
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        raise UserError("what DeepSpeed's engine has made of model and optimizer is not traced")
    handler = accelerator.ddp_handler
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    sharing: dict[str, Any] = {}
    if plugin is not None:
        sharing = _fsdp2(plugin)
    elif handler is not None:
        sharing = {name: getattr(handler, name) for name in ("gradient_as_bucket_view", "find_unused_parameters")}
    return _launch(accelerator.mixed_precision, **sharing)


def launch_ahead(args: TrainingArguments) -> Launch | None:
    """The launch that a Trainer with `args` will make; equals what `launch_of` returns afterwards."""
    if PartialState().num_processes == 1:
        return None
    sharing: dict[str, Any] = {}
    if args.deepspeed_plugin is not None:
        sharing = _zero(args.deepspeed_plugin)
    elif args.fsdp_plugin_args is not None:
        sharing = _fsdp2(FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    elif os.environ.get("ACCELERATE_USE_FSDP") == "true":
        sharing = _fsdp2(FullyShardedDataParallelPlugin())  # reads the environment that `accelerate launch` sets
    else:  # as Trainer._build_accelerator_args, without the library's own checkpointing
        sharing = {"find_unused_parameters": args.ddp_find_unused_parameters is not False}
    return _launch(precision_of(args), **sharing)


def _launch(precision: str, **sharing: Any) -> Launch:
    state = PartialState()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
    machines = max(state.num_processes // here, 1)
    return Launch(
        **sharing, processes=state.num_processes, machines=machines, mixed_precision=precision,
        rank=state.process_index,
    )  # fmt: skip


def _fsdp2(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    if plugin.fsdp_version != 2:
        raise UserError("FSDP of version 1 is not modelled; set fsdp_version: 2")
    wraps: Any = plugin.auto_wrap_policy
    wraps = wraps.func if isinstance(wraps, functools.partial) else wraps  # a partial after set_auto_wrap_policy
    if wraps not in (None, transformer_auto_wrap_policy):
        raise UserError(
            "FSDP2 that wraps modules by their size is not modelled; set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UserError("FSDP2 with parameters on the host is not modelled; set fsdp_offload_params: false")
    return {
        "strategy": "fsdp2",
        "reshard_after_forward": plugin.reshard_after_forward,
        "wrap": None if wraps is None else tuple(plugin.transformer_cls_names_to_wrap or ()),
    }


def _zero(plugin: Any) -> dict[str, Any]:
    options = plugin.deepspeed_config["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        if ((options.get(part) or {}).get("device") or "none") != "none":
            raise UserError(f"DeepSpeed with {part} is not modelled")
    return {"strategy": f"zero{plugin.zero_stage}", "zero": ZeroOptions.read(options, "launch")}


def found_by_main(find: Callable[[], Answer]) -> Answer:
    """Runs `find` on the main process and returns its answer, or raises its UserError, on every process.

    Every process must call it.
    """
    state = PartialState()
    if state.num_processes == 1:
        return find()
    found: list[Any] = [None]
    if state.is_main_process:
        try:
            found = [find()]
        except UserError as error:
            found = [error]
    broadcast_object_list(found)
    answer: Answer = found[0]
    if isinstance(answer, UserError):
        raise answer
    return answer
