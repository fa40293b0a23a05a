"""DeepSpeed ZeRO-2 and ZeRO-3 on two CPU ranks: policies keep the bits of loss, gradients and weights.

Each step is verified.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install -e '.[deepspeed]' (see the Makefile)")

POLICIES = ["full", "every:2", "save:attention+matmul", "segments:2", "pointwise", "head", "full,offload", "offload"]
# ZeRO stage, model, persistence threshold in elements, policies: ZeRO-3 partitions norms of 16 elements, or keeps them
# whole as it does by default.
ALL = [
    (2, "dropout", 0, POLICIES),
    (2, "lora", 0, POLICIES),
    (3, "dropout", 0, POLICIES),
    (3, "lora", 0, POLICIES),
    (3, "lora", 20, ["full"]),
]
FEW = [
    (2, "dropout", 0, ["save:attention+matmul"]),
    (3, "lora", 0, ["segments:2", "head"]),
    (3, "lora", 20, ["full"]),
]
STEPS = 2  # ZeRO-3 records the order of its gathers in the first step and prefetches by it afterwards


def build(variant: str) -> nn.Module:
    """Returns a Llama of four layers that trains all weights ("dropout") or adapters on a frozen base ("lora")."""
    from language_models import make
    from peft import LoraConfig, get_peft_model

    model = make("llama", "dropout")
    if variant == "dropout":
        return model
    adapters = LoraConfig(r=2, lora_dropout=0.1, init_lora_weights="gaussian", target_modules=["q_proj", "down_proj"])
    model = get_peft_model(model, adapters)
    # adapters start at zero, which would give half of them no gradient
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model.train()


def train(model: nn.Module, stage: int, persistent: int, **options: int) -> dict[str, torch.Tensor]:
    """Returns this rank's losses and its shards of the weights and of the gradients' momentum, which has each step's.

    persistent: parameters up to this many elements are never freed under ZeRO-3.
    """
    from language_models import batch

    engine, optimizer = wrap(model, stage, persistent, **options)
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    numbers: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = engine(**batch()).loss
        engine.backward(loss)
        engine.step()
        numbers[f"loss {step}"] = loss.detach()
    for index, (weights, state) in enumerate(optimizer.state.items()):
        numbers |= {f"weights {index}": weights.detach(), f"momentum {index}": state["momentum_buffer"]}
    engine.destroy()
    shard = sum(value.numel() for name, value in numbers.items() if name.startswith("momentum"))
    assert elements / 2 <= shard < elements  # every trained parameter is compared
    return numbers


def wrap(model: nn.Module, stage: int, persistent: int, **options: int) -> tuple[Any, torch.optim.Optimizer]:
    """Returns DeepSpeed's engine and its optimizer."""
    import deepspeed

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10_000,
            "stage3_param_persistence_threshold": persistent,
            **options,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def compare(rank: int, store: str, few: bool) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from language_models import differing
    from test_distributed import all_ranks_raise

    from ckpt_ft import apply_policy
    from ckpt_ft.checkpointing import offload

    offload.install.__kwdefaults__["min_bytes"] = 1  # type: ignore[index]
    # Their compilation takes more than a minute at first use; gloo's collectives exist already.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    warnings.filterwarnings("error", "policy .* no block was given the output of the one before")
    for stage, variant, persistent, policies in FEW if few else ALL:
        plain = train(build(variant), stage, persistent)
        assert all(value.abs().max() > 0 for value in plain.values())
        for policy in policies:
            model = build(variant)
            apply_policy(model, policy, verify="always")
            wrong = differing(train(model, stage, persistent), plain)
            assert not wrong, (stage, variant, persistent, policy, wrong)
    for stage in (2, 3):
        # the last test, because the engine is unusable afterwards
        all_ranks_raise(lambda model, stage=stage: wrap(model, stage, 0)[0], steps=1)
    dist.destroy_process_group()


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_policies_under_zero_keep_the_bits(few: bool, tmp_path: Path) -> None:
    run_ranks(compare, str(tmp_path / "store"), few)


def gathered_by(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Returns the numbers of `train` under ZeRO-3 without prefetched weights, and the bytes of each gather."""
    from deepspeed.comm.torch import TorchBackend

    sizes: list[int] = []
    gather = TorchBackend.all_gather_into_tensor

    def count(self: Any, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(output_tensor.nbytes)
        return gather(self, output_tensor, *args, **kwargs)

    TorchBackend.all_gather_into_tensor = count
    try:
        numbers = train(model, 3, 0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    finally:
        TorchBackend.all_gather_into_tensor = gather
    return numbers, sizes


def tiled(rank: int, store: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from language_models import make

    from ckpt_ft import apply_policy

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    found = {}
    for policy in ("full", "full,tile:4"):
        model = make("llama", "plain")
        apply_policy(model, policy, verify="always")
        found[policy] = gathered_by(model)
    (plain, whole), (numbers, pieces) = found.values()
    mlps = sum(p.nbytes for name, p in make("llama", "plain").named_parameters() if ".mlp." in name)
    assert sum(pieces) == sum(whole) + 2 * mlps  # the first step runs each MLP on one and on two tokens first
    for name, value in plain.items():
        assert (numbers[name] - value).norm() <= 1e-6 * value.norm(), name
    dist.destroy_process_group()


def test_tile_gathers_the_weights_of_an_mlp_once(tmp_path: Path) -> None:
    run_ranks(tiled, str(tmp_path / "store"))
