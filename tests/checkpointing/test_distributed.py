"""Policies under DDP and FSDP2 on two CPU ranks: gradients equal those without a policy, and each step is verified."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn

POLICIES = ["full", "segments:2", "save:attention+matmul", "modules:mlp", "every:2", "offload", "pointwise"]


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


def fsdp2(model: Any, keeps: bool = False) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=not keeps)
    fully_shard(model)
    return model  # type: ignore[no-any-return]


def fsdp2_kept(model: Any) -> nn.Module:
    return fsdp2(model, keeps=True)


def work(rank: int, store: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    warnings.filterwarnings("error", "policy .* no block was given the output of the one before")
    from ckpt_ft.checkpointing import offload

    offload.install.__kwdefaults__["min_bytes"] = 1  # type: ignore[index]
    compare(wrap)
    all_ranks_raise(wrap)
    if wrap is ddp:
        swapped_blocks_are_equal()
    if wrap is fsdp2:
        compare(fsdp2_kept)
        joined_blocks_keep_one_input()
    gc.collect()  # wrappers hold the process group
    dist.barrier()
    dist.destroy_process_group()


def swapped_blocks_are_equal() -> None:
    from language_models import make

    from ckpt_ft import apply_policy

    plain = gradients(ddp(make("llama", "lora")))
    for first in (True, False):  # the policy first or the wrapper first, which must not broadcast absent weights
        model = make("llama", "lora")
        if first:
            apply_policy(model, "full,swap:4", verify="always")
        wrapped = ddp(model)
        if not first:
            apply_policy(model, "full,swap:4", verify="always")
        mine = gradients(wrapped)
        assert all(plain[name].equal(gradient) for name, gradient in mine.items())
        assert mine.keys() == plain.keys()


def compare(wrap: Callable[[nn.Module], nn.Module]) -> None:
    from language_models import make

    from ckpt_ft import apply_policy

    plain = gradients(wrap(make("llama", "dropout")))
    assert len(plain) == 39
    for policy in POLICIES:
        before = make("llama", "dropout")
        apply_policy(before, policy, verify="always")
        after = wrap(make("llama", "dropout"))
        applied = apply_policy(after, policy, verify="always")
        for model in (wrap(before), after):  # a policy may be applied before or after the wrapper
            mine = gradients(model)
            assert mine.keys() == plain.keys()
            close = torch.allclose if policy == "pointwise" else torch.equal
            assert all(close(mine[name], plain[name]) for name in plain), policy
        assert applied.verification.comparisons  # the step was verified


class Scaled(nn.SiLU):
    """Reads the environment, which no policy can restore."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = int(os.environ.get("COPIES", 1))
        if copies == 0:
            return x.detach()  # saves nothing for backward
        return super().forward(torch.cat([x] * copies))[: len(x)] * float(os.environ.get("FACTOR", 1))


def all_ranks_raise(wrap: Callable[[nn.Module], nn.Module], steps: int = 4) -> None:
    """Asserts that a difference on rank 1 raises on rank 0 too, which would otherwise wait, and both can go on."""
    from language_models import batch, make

    from ckpt_ft import apply_policy
    from ckpt_ft.checkpointing.verify import VerificationError

    model: Any = make("llama", "dropout")
    model.model.layers[1].mlp.act_fn = Scaled()
    apply_policy(model, "full", verify="always")
    model = wrap(model)
    changes = [("FACTOR", "2", "values"), ("COPIES", "2", "shape: "), ("COPIES", "0", "")]
    for name, value, differs in (changes * 2)[:steps]:
        loss = model(**batch()).loss
        os.environ[name] = value if dist.get_rank() else "1"
        with pytest.raises(VerificationError) as error:
            model.backward(loss) if hasattr(model, "backward") else loss.backward()
        os.environ[name] = "1"
        if dist.get_rank():
            assert error.value.region == "model.layers.1"
            assert error.value.differs.startswith(differs)
        else:
            assert (error.value.region, error.value.differs) == ("", "rank 1")


def joined_blocks_keep_one_input() -> None:
    """Asserts that a segment keeps as much as 'full' without the inputs of all blocks but its first."""
    from language_models import batch, make

    from ckpt_ft import apply_policy
    from ckpt_ft.memory.record.tracker import Tracker

    kept = {}
    for policy in ("full", "segments:1"):
        model = fsdp2(make("llama", "dropout"))
        apply_policy(model, policy)
        gradients(model)
        with Tracker(model) as tracker:
            loss = model(**batch()).loss
            kept[policy] = tracker.recorder.allocated
        del loss
    blocks, rows = len(model.model.layers), batch()["input_ids"].numel()
    assert kept["full"] - kept["segments:1"] == (blocks - 1) * rows * model.config.hidden_size * 4


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_policies_under_ddp_and_fsdp2(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    run_ranks(work, str(tmp_path / "store"), wrap)
