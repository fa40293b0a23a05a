"""Policies under DDP and FSDP2 on two CPU ranks: the gradients of the wrapped plain model."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

POLICIES = ["full", "segments:2", "save:attention+matmul", "modules:mlp"]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    from language_models import batch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(dist.get_rank())
    model(**batch()).loss.backward()
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model  # type: ignore[no-any-return]


def work(rank: int, store: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    compare(wrap)
    gc.collect()  # wrappers hold on to the process group
    dist.barrier()
    dist.destroy_process_group()


def compare(wrap: Callable[[nn.Module], nn.Module]) -> None:
    from language_models import make

    from ckpt_ft import apply_policy

    plain = gradients(wrap(make("llama", "dropout")))
    assert len(plain) == 39
    for policy in POLICIES:
        before = make("llama", "dropout")
        apply_policy(before, policy)
        after = wrap(make("llama", "dropout"))
        apply_policy(after, policy)
        for model in (wrap(before), after):  # a policy may come before or after the wrapper
            mine = gradients(model)
            assert mine.keys() == plain.keys()
            assert all(torch.equal(mine[name], plain[name]) for name in plain), policy


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_two_ranks(wrap: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    mp.spawn(work, args=(str(tmp_path / "store"), wrap), nprocs=2)
