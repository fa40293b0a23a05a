"""Policies under tensor parallelism on one rank, where autograd saves DTensors, keep the bits of gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tiny_models import build, gradients
from versions import is_older

from ckpt_ft import apply_policy

POLICIES = ["full", "pointwise", "offload", "full,offload", "segments:2,offload", "save:matmul,offload"]
POLICIES += ["pointwise,offload"]


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(policy: str, sequence: bool) -> dict[str, torch.Tensor]:
    """Returns gradients of a step of a Llama sharded over a mesh; with `sequence`, norms are sharded by tokens."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, inputs = build("llama")
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        if sequence:
            plan["input_layernorm"] = SequenceParallel(use_local_output=False)
        parallelize_module(layer, init_device_mesh("cpu", (1,)), plan)
    for engine in apply_policy(model, policy).engines:
        if engine.term == "offload":
            engine.stand_ins[-1].min_bytes = 64  # type: ignore[attr-defined]
    model(**inputs).loss.backward()
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients(model).items()}


@pytest.mark.parametrize("sequence", [False, True], ids=["layers", "norms too"])
def test_policies_under_tensor_parallelism_keep_the_gradients(sequence: bool) -> None:
    if sequence and is_older("torch", "2.13"):
        pytest.skip("an older DTensor, which flattens no sharded sequence")
    plain = step("none", sequence)
    assert len(plain) == 21
    for policy in POLICIES:
        treated = step(policy, sequence)
        assert treated.keys() == plain.keys()
        assert all(g.equal(treated[name]) for name, g in plain.items()), policy
