"""What FSDP2 and DTensor do for every rank, or for every pair of parameters, done once: a trace would wait for it.

Both are quick on real tensors and few ranks. On fakes, 64 views of each of a thousand parameters took a third of a
trace, and the sharding of their foreach ops a quarter. Nothing is allocated by what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard


class Chunks:
    """The chunks of `tensor` along `dim`, one for each of `ranks`, made when they are asked for.

    As FSDP2's `_chunk_with_empty`: the last ranks' are smaller, or have no elements.
    """

    def __init__(self, tensor: Tensor, ranks: int, dim: int) -> None:
        self.tensor, self.ranks, self.dim = tensor, ranks, dim

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: int) -> Tensor:
        if rank >= self.ranks:
            raise IndexError(rank)
        length = self.tensor.size(self.dim)
        each = -(-length // self.ranks)
        start = each * rank
        if start >= length:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(each, length - start))


@contextmanager
def done_once() -> Iterator[None]:
    """Only this rank's chunk of a parameter is made; whether an op's arguments are strided shards is asked once."""
    flag = getattr(_sharding_prop, "_propagate_use_strided_shard_flag", None)  # not before torch 2.13
    asked: list[Any] = [None, False]  # the op last asked about, the answer

    def flagged(strategy: Any, schema: Any) -> None:
        if asked[0] is not schema:
            asked[:] = schema, any(isinstance(p, _StridedShard) for spec in schema.args_spec for p in spec.placements)
        if asked[1] and flag is not None:
            flag(strategy, schema)

    with patch.object(_fsdp_param, "_chunk_with_empty", Chunks):
        if flag is None:
            yield
            return
        with patch.object(_sharding_prop, "_propagate_use_strided_shard_flag", flagged):
            yield
