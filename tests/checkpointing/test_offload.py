"""`offload`: same gradients, what is parked and when it comes back, the cap on host bytes."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from tiny_models import build, gradients, loss_of
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import offload
from ckpt_ft.checkpointing.offload import Parked, Usage
from ckpt_ft.checkpointing.pointwise import install as pointwise
from ckpt_ft.checkpointing.recompute import Checkpointed
from ckpt_ft.errors import UserError

WIDTH, ROWS = 8, 16
NBYTES = WIDTH * ROWS * 4


class Stack(nn.Module):
    """Blocks of one linear layer and one activation."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def treat(model: nn.Module, blocks: Any, **options: Any) -> tuple[offload.Installed, Usage]:
    installed = offload.install(model, {str(i): block for i, block in enumerate(blocks)}, **options)
    return installed, installed.stand_ins[-1].usage  # type: ignore[attr-defined]


@pytest.mark.parametrize("also", ["", "full", "pointwise"])
@pytest.mark.parametrize("name", ["llama", "vit", "resnet", "t5", "unet"])
def test_same_gradients(name: str, also: str) -> None:
    model, inputs = build(name)
    treated = copy.deepcopy(model)
    blocks = [m for m in treated.modules() if type(m).__name__.endswith(("Layer", "Block", "ResnetBlock2D"))]
    if also == "full":
        for block in blocks[-1:]:
            Checkpointed(block, None)
    if also == "pointwise":
        pointwise.install(treated, {"": treated})
    installed, usage = treat(treated, blocks, min_bytes=256)
    for m in (model, treated):
        torch.manual_seed(3)
        loss_of(m(**inputs)).backward()
    assert all(g.equal(gradients(treated)[key]) for key, g in gradients(model).items())
    assert usage.peak_host_bytes > 0
    assert usage.host_bytes == 0
    installed.remove()


def test_what_is_parked() -> None:
    """Each block's Tanh output serves two nodes and is parked once; weights and small tensors stay."""
    model = Stack(4)
    _, usage = treat(model, model.blocks, min_bytes=NBYTES)
    x = torch.randn(ROWS, WIDTH)
    loss = model(x)
    assert usage.host_bytes == 5 * NBYTES  # the input, and the outputs of four blocks
    assert not any(type(t) is torch.Tensor and t.shape == x.shape and t.requires_grad for t in gc.get_objects())
    loss.backward()
    assert (usage.host_bytes, usage.peak_host_bytes) == (0, 5 * NBYTES)


def test_fetched_a_block_ahead() -> None:
    """When backward opens what block n parked, block n - 1's comes back too, and nothing before it."""
    model = Stack(4)
    back: list[list[int]] = []

    def note(grad: Any) -> None:
        parked = [o for o in gc.get_objects() if type(o) is Parked]
        back.append(sorted({p.block for p in parked if p.device is not None}))

    treat(model, model.blocks, min_bytes=NBYTES)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: output.register_hook(note) and None)
    model(torch.randn(ROWS, WIDTH, requires_grad=True)).backward()
    assert back == [[], [2, 3], [1, 2], [1]]  # before the backward of blocks 4, 3, 2, 1; block 3's input is block 2's


def test_cap() -> None:
    model = Stack(4)
    _, usage = treat(model, model.blocks, min_bytes=NBYTES, max_host_bytes=2 * NBYTES)
    for _ in range(2):
        model(torch.randn(ROWS, WIDTH)).backward()
        assert (usage.host_bytes, usage.peak_host_bytes) == (0, 2 * NBYTES)
    with pytest.raises(UserError, match="host cap of"):
        treat(model, model.blocks, min_bytes=1024, max_host_bytes=1023)


def test_graph_that_is_dropped_frees_the_host() -> None:
    model, inputs = build("llama")
    _, usage = treat(model, [], min_bytes=256)
    output = model(**inputs)
    assert usage.host_bytes > 0
    del output
    assert usage.host_bytes == 0


def test_change_in_place_is_parked_anew_or_an_error() -> None:
    class Edits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * 2
            first = h.sin()
            h.mul_(3)
            return (first + h.square()).sum()

    model = Edits()
    treat(model, [], min_bytes=NBYTES)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model(x).backward()
    torch.testing.assert_close(x.grad, 2 * torch.cos(2 * x) + 72 * x)


def test_kept_outside_of_hooks() -> None:
    """`keep` and `give`, for outputs that a `save:` policy keeps."""

    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = offload.keep(x.detach())
            return x.sum()

    model = Keeps()
    _, usage = treat(model, [], min_bytes=NBYTES)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model(x)
    assert usage.host_bytes == NBYTES
    assert offload.give(model.kept).equal(x)
    assert offload.give(offload.keep(x)) is x  # outside of a model's forward nothing is parked


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = Stack(6).cuda()
    plain = copy.deepcopy(model)
    x = torch.randn(4096, WIDTH, device="cuda")
    _, usage = treat(model, model.blocks, min_bytes=1024)
    before = torch.cuda.memory_allocated()
    loss = model(x)
    assert torch.cuda.memory_allocated() - before < x.nbytes
    loss.backward()
    plain(x).backward()
    torch.cuda.synchronize()
    assert all(g.equal(gradients(model)[key]) for key, g in gradients(plain).items())
    assert usage.host_bytes == 0


def test_outputs_that_save_keeps_are_parked_too() -> None:
    from ckpt_ft.memory.fake.step import trace_step
    from ckpt_ft.workloads.load import load
    from ckpt_ft.workloads.settings import Settings

    workload = load("HuggingFaceTB/SmolLM2-135M", Settings(dtype="bfloat16", optimizer="none", seq_length=1024))
    kept = {}
    for policy in ("save:attention+matmul", "save:attention+matmul,offload"):
        applied = apply_policy(workload.model, policy)
        trace = trace_step(workload.model, workload.step(4), device="a100-40gb")
        kept[policy] = sum(trace.module_activations().values())
        applied.remove()
    assert kept["save:attention+matmul,offload"] < 0.01 * kept["save:attention+matmul"]
