"""`head` under FSDP2 on two CPU ranks: gradients equal the plain model's; the output weight is gathered once."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 2  # rows of logits per chunk: 12 tokens are 6 chunks


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"_allgather_base_": 0, "_reduce_scatter_base_": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in self.count:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def root_only(model: Any, **kwargs: Any) -> Any:
    return fully_shard(model, **kwargs)


def head_in_its_own_group(model: Any, **kwargs: Any) -> Any:
    fully_shard(model.lm_head, **kwargs)
    return fully_shard(model, **kwargs)


def norm_and_head(model: Any, **kwargs: Any) -> Any:
    fully_shard([model.model.norm, model.lm_head], **kwargs)
    return fully_shard(model, **kwargs)


def as_accelerate_does(model: Any, **kwargs: Any) -> Any:
    for block in model.model.layers:
        fully_shard(block, **kwargs)
    fully_shard(model.model.embed_tokens, **kwargs)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **kwargs)
    return fully_shard(model, **kwargs)


def step(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    from language_models import batch

    model.zero_grad(set_to_none=True)
    with Collectives() as seen:
        model(**batch()).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, seen.count  # type: ignore[union-attr]


def check(wrap: Any, half: bool, chunked: bool = True) -> tuple[int, int]:
    """Returns the numbers of gathers and reductions of a step beyond those of the plain model."""
    from language_models import VOCABULARY, batch, make

    from ckpt_ft.checkpointing import deferred_logits, head

    deferred_logits.CHUNK_BYTES = 4 * VOCABULARY * ROWS
    kwargs = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)} if half else {}
    model = wrap(make("llama"), **kwargs)
    step(model)  # FSDP prefetches in the order of the last step
    plain, before = step(model)
    head.install(model)
    step(model)
    mine, after = step(model)
    bound = 2**-7 if half else 1e-6
    for name, gradient in plain.items():
        assert (mine[name] - gradient).norm() <= bound * gradient.norm(), name
    assert isinstance(model(**batch()).logits, head.NoLogits) == chunked
    gathers, reductions = (after[name] - before[name] for name in before)
    return gathers, reductions


def work(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert check(root_only, half=True) == (0, 0)
    for half in (False, True):  # one more gather, for the call of the layer that returns no logits
        assert check(head_in_its_own_group, half) == (1, 0)
    for half in (False, True):
        assert check(as_accelerate_does, half) == (0, 0)
    assert check(norm_and_head, half=False, chunked=False) == (
        0,
        0,
    )  # complete logits: FSDP2 supports no group of which only a part runs twice
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_output_weight_is_gathered_once(tmp_path: Path) -> None:
    run_ranks(work, str(tmp_path / "store"))
