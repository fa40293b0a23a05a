"""What FSDP2 does for every rank is done for one: the same chunks, made when they are asked for."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from ckpt_ft.memory.distributed.fsdp2 import Chunks


@pytest.mark.parametrize("shape", [(8, 2), (7, 2), (3, 2), (9, 1), (4,)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_the_chunks_are_fsdp2s(shape: tuple[int, ...], ranks: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    theirs, ours = _fsdp_common._chunk_with_empty(tensor, ranks, 0), Chunks(tensor, ranks, 0)
    assert len(ours) == len(theirs) == ranks
    for mine, other in zip((ours[rank] for rank in range(ranks)), theirs, strict=True):
        assert mine.shape == other.shape
        assert mine.equal(other)
        assert not mine.numel() or mine.data_ptr() == other.data_ptr()
