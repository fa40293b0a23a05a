"""A script as one rank of several: the environment that `accelerate launch` gives it, and a group without the others.

Fake ranks run the rank's real code: collectives of PyTorch's "fake" group return at once. FSDP2 is Python and runs as
it is. DDP's Reducer is C++ and refuses fakes, so its buckets follow the rules of memory/distributed/ddp.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d, fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.distributed.ddp import Buckets
from ckpt_ft.spec.launch import Launch


def environment_of(words: Sequence[str], launch: Launch, on_cpu: bool) -> dict[str, str]:
    """The environment of rank 0 under `accelerate launch` with the options `words`.

    Raises:
        UserError: accelerate refuses them.
    """
    from accelerate.commands import launch as accelerate
    from torch.distributed import run

    def alone(args: Any) -> None:
        raise UserError("accelerate starts one process; set distributed_type: MULTI_GPU or FSDP")

    found: dict[str, str] = {}
    here = ["--main_process_ip", "127.0.0.1", "--main_process_port", "0", "--machine_rank", "0"]
    started = patch.object(run, "run", lambda args: found.update(os.environ))
    with started, patch.object(accelerate, "simple_launcher", alone):
        try:
            accelerate.launch_command(accelerate.launch_command_parser().parse_args([*words, *here, "script.py"]))
        except ValueError as error:
            raise UserError(f"launch: {one_line(error)}") from error
    local = str(launch.processes // launch.machines)
    ranks = {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(launch.processes),
        "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        # the weights that rank 0 would send to the others are not read
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }  # fmt: skip
    return {**found, **ranks, **({"ACCELERATE_USE_CPU": "true"} if on_cpu else {})}


def join_ranks(on_cpu: bool, note: Callable[[str], None]) -> None:
    """Replace PyTorch's process groups: those that this process makes, of any backend, have no other processes."""
    begin, make = dist.init_process_group, dist.new_group

    def init(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
        **others: Any,
    ) -> None:  # fmt: skip
        size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        begin("fake", world_size=size, rank=max(rank, 0))

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make(ranks, None, None, *args, **{**kwargs, "device_id": None})

    for owner in (dist, distributed_c10d):
        owner.init_process_group, owner.new_group = init, new_group  # type: ignore[attr-defined]
    dist.Reducer, dist.Logger = Reducer, _Nothing  # type: ignore[misc,assignment]
    shard, whole = fsdp.fully_shard, cache(lambda: init_device_mesh("cuda", (dist.get_world_size(),)))

    @wraps(shard)
    def fully_shard(module: Any, *, mesh: Any = None, **kwargs: Any) -> Any:
        return shard(module, mesh=mesh or whole(), **kwargs)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UserError("FSDP 1 is not known to a dry run; FSDP2 is fsdp_version: 2 of accelerate, or fully_shard")

    def leave_out_hook(*args: Any, **kwargs: Any) -> None:
        note("DDP's communication hook is left out: gradients are reduced as they are")

    DistributedDataParallel.register_comm_hook = leave_out_hook  # type: ignore[method-assign]
    fsdp.FullyShardedDataParallel.__init__ = refuse  # type: ignore[method-assign]
    if not on_cpu:  # PyTorch would take the device that this machine has
        fsdp.fully_shard = fully_shard


class _Nothing:
    """Takes the place of an object of C++ that a step's memory does not depend on."""

    def __init__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Reducer(Buckets, _Nothing):
    """Takes the place of DDP's Reducer. It has no buckets before `begin`: the parameters may be real until then."""

    def __init__(
        self, parameters: Any, indices: Any, limits: Any, group: Any, sparse: Any, cap: int, unused: bool,
        as_view: bool, *others: Any,
    ) -> None:  # fmt: skip
        self._given = parameters, group, as_view, cap

    def begin(self) -> list[Tensor]:
        """Make the buckets, and return them."""
        super().__init__(*self._given)
        self.synchronises = False
        return [bucket.flat for bucket in self.buckets]

    def prepare_for_backward(self, outputs: Any) -> None:
        """Called by DDP after each forward whose gradients are reduced."""
        self.synchronises = True

    def _finish(self) -> None:
        super()._finish()
        self.synchronises = False


def buckets_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Make the buckets of each module in DDP, and return them."""
    reducers: list[Any] = [module.reducer for module in modules if isinstance(module, DistributedDataParallel)]
    return [bucket for reducer in reducers for bucket in reducer.begin()]


def as_wrapped(launch: Launch, modules: Iterable[nn.Module]) -> Launch:
    """Returns the launch with the strategy of the script's wrapped models; raises UserError if no model is wrapped."""
    found = list(map(type, modules))
    if any(issubclass(kind, fsdp.FSDPModule) for kind in found):
        return replace(launch, strategy="fsdp2")
    if not any(issubclass(kind, DistributedDataParallel) for kind in found):
        raise UserError(
            "it wraps no model in DDP or FSDP2, so that each of its processes would train alone; leave --launch out, "
            "or let accelerate or the script wrap the model"
        )
    return replace(launch, strategy="ddp")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model
