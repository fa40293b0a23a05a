"""Parameters in parts, as ZeRO-3 holds them, and how they come together.

Several are gathered through one buffer, which lives until the last of them is asked for, and are copied out of it; one
alone lies in its own (deepspeed/runtime/zero/partition_parameters.py: all_gather_coalesced).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(eq=False)
class Shard:
    """A parameter in parts, of which this rank has `part`; `number` is its place in the model.

    persistent: too small to be let go of. users: modules that are running on it.
    """

    parameter: nn.Parameter
    number: int
    part: Tensor
    persistent: bool
    shape: torch.Size
    flight: Flight | None = None  # that it is being gathered by
    here: bool = False
    users: set[Any] = field(default_factory=set)

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def free(self) -> None:
        """Let go of the whole parameter."""
        self.parameter.data = torch.empty(0, dtype=self.part.dtype)
        self.here = False


class Flight:
    """Parameters of one dtype that are gathered together."""

    def __init__(self, shards: list[Shard], group: dist.ProcessGroup) -> None:
        self.shards, self.over = shards, False
        for shard in shards:
            shard.flight = self
        size = sum(shard.part.numel() for shard in shards)
        self.buffer = torch.empty(size * group.size(), dtype=shards[0].part.dtype)
        part = shards[0].part
        if len(shards) > 1:
            part = self.buffer.narrow(0, size * group.rank(), size)
            torch.cat([shard.part for shard in shards], out=part)
        group._allgather_base(self.buffer, part)

    def land(self) -> None:
        """All of its parameters are there: copied out of the buffer, unless it is one parameter's alone."""
        if self.over:
            return
        self.over, at = True, 0
        for shard in self.shards:
            whole = self.buffer.narrow(0, at, shard.numel)
            shard.parameter.data = (torch.cat([whole]) if len(self.shards) > 1 else whole).view(shard.shape)
            shard.here, at = True, at + shard.numel
