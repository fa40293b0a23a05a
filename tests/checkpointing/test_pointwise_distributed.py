"""`pointwise` on two CPU ranks under DDP and FSDP2: gradients equal those without it."""

from __future__ import annotations

import copy
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from tiny_models import build

from ckpt_ft.checkpointing.pointwise import install as pointwise


def _shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in list(model.modules()):
        if type(module).__name__ in ("BertLayer", "LlamaDecoderLayer"):
            fully_shard(module)
    fully_shard(model)
    return model


def _gradients(model: nn.Module, rank: int, name: str) -> list[torch.Tensor]:
    _, inputs = build(name)
    inputs = {key: value.roll(rank, dims=1) for key, value in inputs.items()}
    torch.manual_seed(3)
    for _ in range(2):  # accumulates gradients
        model(**inputs).loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def _worker(rank: int, port: int, name: str, way: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    plain, _ = build(name)
    treated = copy.deepcopy(plain)
    pointwise.install(treated, {"": treated})
    wrap = _shard if way == "fsdp2" else nn.parallel.DistributedDataParallel
    results = [_gradients(wrap(model), rank, name) for model in (plain, treated)]
    assert len(results[0]) == len(results[1]) > 10
    # not bit-equal, because DDP sums its buckets as they fill
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("bert", "fsdp2"), ("llama", "fsdp2"), ("llama", "ddp")])
def test_pointwise_under_ddp_and_fsdp2(name: str, way: str) -> None:
    """BERT's blocks end in a norm, which the next block's backward recomputes after its parameters are sharded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(_worker, port, name, way)
