"""Buffers are the same with and without checkpointing: BatchNorm counts a batch once, spectral norm iterates once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked_ranks import run_ranks
from tiny_models import OperatorCounts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint
from vision_models import UNet, assert_same, batches

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.errors import UserError

Layer = Callable[[], nn.Module]
POLICIES = ["full", "every:2", "segments:2", "save:conv", "save:aten.native_batch_norm"]


class Block(nn.Module):
    def __init__(self, norm: nn.Module, conv: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = conv or nn.Conv2d(4, 4, 3, padding=1)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Three blocks; with `shared`, each runs twice."""

    def __init__(self, norm: Layer, conv: Layer | None = None, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(norm(), conv() if conv else None) for _ in range(3)])
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks] if self.shared else self.blocks:
            x = block(x)
        return x.square().mean()


def make(norm: Layer, **kwargs: Any) -> Net:
    torch.manual_seed(0)
    return Net(norm, **kwargs)


def after_steps(model: nn.Module, steps: int = 3) -> dict[str, torch.Tensor]:
    """Returns losses, accumulated gradients and buffers after `steps` different micro-batches."""
    found = {}
    for step in range(steps):
        x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(step)) * (step + 1)
        loss = model(x)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


NORMS: dict[str, Layer] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch, momentum=None": lambda: nn.BatchNorm2d(4, momentum=None),
    "batch, no statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch, no weights": lambda: nn.BatchNorm2d(4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")  # group norm is no batch norm
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("norm", NORMS)
def test_buffers_after_three_micro_batches(norm: str, policy: str) -> None:
    plain, model = make(NORMS[norm]), make(NORMS[norm])
    apply_policy(model, policy)
    assert_same(after_steps(model), after_steps(plain))


def test_batch_norm_counts_twice_under_plain_checkpoint_and_once_under_a_policy() -> None:
    model = make(NORMS["batch"])
    model.forward = lambda x: checkpoint(model.blocks[0], x, use_reentrant=False).square().mean()  # type: ignore[method-assign]
    after_steps(model)
    assert model.blocks[0].norm.num_batches_tracked == 6
    model = make(NORMS["batch"])
    apply_policy(model, "full")
    after_steps(model)
    assert [block.norm.num_batches_tracked.item() for block in model.blocks] == [3, 3, 3]


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_batch_norm_of_a_block_that_runs_twice_counts_twice(policy: str) -> None:
    plain, model = make(NORMS["batch"], shared=True), make(NORMS["batch"], shared=True)
    apply_policy(model, policy)
    expected = after_steps(plain)
    assert expected["buffer blocks.0.norm.num_batches_tracked"] == 6
    assert_same(after_steps(model), expected)


def test_batch_norm_that_is_frozen_and_later_unfrozen() -> None:
    plain, model = make(NORMS["batch"]), make(NORMS["batch"])
    apply_policy(model, "full")
    for net in (plain, model):
        net.blocks[0].norm.eval()
        net.blocks[1].norm.requires_grad_(False)
    expected = after_steps(plain)
    assert expected["buffer blocks.0.norm.num_batches_tracked"] == 0
    assert_same(after_steps(model), expected)
    plain.train()
    model.train()
    assert_same(after_steps(model), after_steps(plain))
    assert model.blocks[0].norm.num_batches_tracked == 3


def test_eval_mode_with_gradients_writes_no_buffer() -> None:
    model = make(NORMS["batch"]).eval()
    apply_policy(model, "full")
    before = copy.deepcopy(model.state_dict())
    after_steps(model)
    assert_same(dict(model.state_dict()), before)


SPECTRAL: dict[str, Layer] = {
    "parametrization": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
    "hook": lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("policy", ["full", "segments:2", "save:conv"])
@pytest.mark.parametrize("kind", SPECTRAL)
def test_spectral_norm_iterates_once_per_step(kind: str, policy: str) -> None:
    """The power iteration changes the weight that the block uses; two iterations would change loss and gradients."""
    plain, model = make(NORMS["batch"], conv=SPECTRAL[kind]), make(NORMS["batch"], conv=SPECTRAL[kind])
    apply_policy(model, policy)
    assert_same(after_steps(model), after_steps(plain))


class Counting(nn.Module):
    """A user-defined norm with its own buffer names, one of which is replaced on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return F.batch_norm(x, self.level, self.spread, training=True) / self.calls


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_buffers_of_a_user_defined_norm(policy: str) -> None:
    plain, model = make(Counting), make(Counting)
    apply_policy(model, policy)
    assert_same(after_steps(model), after_steps(plain))
    assert model.blocks[0].norm.calls == 3


class Refreshed(nn.Module):
    """A norm that writes its buffers from the third call on: one in place, one by replacing it."""

    def __init__(self, columns: int = 1) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(4, columns))
        self.register_buffer("scale", torch.ones(()))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.step % 3 == 2:
            self.level += x.detach().mean((0, 2, 3)).abs()[:, None] + 1
            self.scale = self.scale * 1.5
        return (x * (1 + self.level[:, :1, None])).tanh() * self.scale


def at_step(net: Net, step: int) -> dict[str, torch.Tensor]:
    """Returns `after_steps` of one step; the norms know the step's number."""
    for block in net.blocks:
        block.norm.step = step
    return {f"{step}: {key}": value.clone() for key, value in after_steps(net, steps=1).items()}


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_buffer_first_written_in_a_later_call(policy: str) -> None:
    plain, model = make(Refreshed), make(Refreshed)
    apply_policy(model, policy)
    for step in range(4):
        assert_same(at_step(model, step), at_step(plain, step))
    assert model.blocks[0].norm.scale == 1.5


def test_large_buffer_first_written_in_a_later_call_is_one_error() -> None:
    """Buffers above 1 MiB are not copied as long as no call has written them."""
    model = make(lambda: Refreshed(columns=2**17))
    apply_policy(model, "full")
    at_step(model, 0)
    with OperatorCounts() as clones:
        at_step(model, 1)
    assert clones.calls["aten.clone.default"] == 6 + 13  # the copies that this file makes
    with pytest.raises(
        UserError, match=r"forward modified buffer 'level' of Refreshed \(2.0 MiB\) and did not in its"
    ):
        at_step(model, 2)
    for block in model.blocks[1:]:  # the failed step did not reach them
        block.norm.step = 0
    at_step(model, 3)


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_batch_norm_momentum_that_is_zero_at_first(policy: str) -> None:
    """The first call writes the statistics without changing their values."""
    plain, model = (make(lambda: nn.BatchNorm2d(4, momentum=0.0)) for _ in range(2))
    apply_policy(model, policy)
    for net in (model, plain):
        after_steps(net)
        for block in net.blocks:
            block.norm.momentum = 0.5
    assert_same(after_steps(model), after_steps(plain))
    assert model.blocks[0].norm.running_mean.abs().sum() > 0


class OwnNorm(nn.Module):
    """A user-defined BatchNorm whose kernel does not count versions. Its output depends on the written buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.level, self.spread, training=True) * (1 + self.level[:, None, None])


class OutOfMemory(Exception):
    pass


def fail(*args: Any) -> None:
    raise OutOfMemory


@pytest.mark.parametrize("kind", [OwnNorm, lambda: nn.BatchNorm2d(4)])
@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_failed_first_call_is_ignored(policy: str, kind: Layer) -> None:
    plain, model = make(kind), make(kind)
    apply_policy(model, policy)
    for net in (model, plain):
        for failing in ("conv", "norm"):  # before and after the buffers are written
            hook = getattr(net.blocks[0], failing).register_forward_hook(fail)
            with pytest.raises(OutOfMemory):
                net(torch.ones(4, 4, 8, 8))
            hook.remove()
    assert_same(after_steps(model), after_steps(plain))


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_first_call_on_fake_tensors_is_ignored(policy: str) -> None:
    plain, model = make(OwnNorm), make(OwnNorm)
    apply_policy(model, policy)
    x = torch.zeros(4, 4, 8, 8)
    trace_step(model, lambda net, _: net(x).backward(), device="cpu")
    assert_same(after_steps(model), after_steps(plain))


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_norms_and_buffers_replaced_after_the_policy(policy: str) -> None:
    plain, model = make(lambda: nn.GroupNorm(2, 4)), make(lambda: nn.GroupNorm(2, 4))
    apply_policy(model, policy)
    for net in (model, plain):
        after_steps(net)
        for block in net.blocks:
            block.norm = OwnNorm()
    assert_same(after_steps(model), after_steps(plain))
    for net in (model, plain):
        for block in net.blocks:
            block.norm.register_buffer("level", torch.full((4,), 0.5))
    assert_same(after_steps(model), after_steps(plain))


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_buffers_written_by_others_between_forward_and_backward(policy: str) -> None:
    plain, model = make(Refreshed), make(Refreshed)
    apply_policy(model, policy)
    for net in (plain, model):
        loss = net(torch.ones(4, 4, 8, 8))
        for block in net.blocks:
            block.norm.level += 1
            block.norm.scale = torch.full((), 3.0)
        loss.backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_buffers_stay_the_same_objects() -> None:
    """References held by others, such as DDP's broadcast or an average of weights, stay valid."""
    model = make(NORMS["batch"])
    apply_policy(model, "full")
    before = {name: (id(buffer), buffer.data_ptr()) for name, buffer in model.named_buffers()}
    after_steps(model)
    assert {name: (id(buffer), buffer.data_ptr()) for name, buffer in model.named_buffers()} == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_batch_norm_of_a_copied_model_counts_once(copied: Callable[[Net], Net]) -> None:
    plain, model = make(NORMS["batch"]), make(NORMS["batch"])
    apply_policy(model, "full")
    after_steps(plain)
    after_steps(model)  # what the policy knows about the buffers is copied too
    assert_same(after_steps(copied(model)), after_steps(copied(plain)))


def test_buffers_under_autocast() -> None:
    plain, model = make(NORMS["batch"]), make(NORMS["batch"])
    apply_policy(model, "full")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = after_steps(model), after_steps(plain)
    assert_same(found, expected)


@pytest.mark.parametrize(("training", "copies"), [(True, 3 * 3 * 2), (False, 0)])
def test_only_written_buffers_are_copied(training: bool, copies: int) -> None:
    """Three buffers of three norms are copied, before the first and before the second run; a constant buffer never."""
    model = make(NORMS["batch"]).train(training)
    for block in model.blocks:
        block.register_buffer("constant", torch.zeros(1000))
    apply_policy(model, "full")
    after_steps(model, steps=1)
    with OperatorCounts() as clones:
        after_steps(model, steps=1)
    in_report = len(list(model.buffers()))  # after_steps makes these
    assert clones.calls["aten.clone.default"] - in_report == copies
    assert clones.calls["aten.equal.default"] == 0


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:conv"])
def test_fake_step_copies_as_many_buffers_as_a_real_one(policy: str) -> None:
    counts = []
    for mode in (FakeTensorMode(), torch.enable_grad()):
        with mode:
            model = make(NORMS["batch"])
            apply_policy(model, policy)
            x = torch.randn(4, 4, 8, 8)
            model(x).backward()
            with OperatorCounts() as clones:
                model(x).backward()
        counts.append(clones.calls["aten.clone.default"])
    assert counts[0] == counts[1] > 0


class SyncedNorm(nn.BatchNorm2d):
    """BatchNorm over the images of all ranks, by differentiable collectives (`nn.SyncBatchNorm` is for GPUs only)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, square = all_reduce(moments) / dist.get_world_size()
        variance = square - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        return (x - mean[:, None, None]) * (variance + self.eps).rsqrt()[:, None, None]


def rank_of_two(rank: int, directory: str) -> None:
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    collectives_in_both_runs()
    results = [under_ddp(rank, policy) for policy in ("none", "stages", "full")]
    for found in results[1:]:
        assert_same(found, results[0])
    torch.save(results[0], f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def collectives_in_both_runs() -> None:
    plain, *others = (make(lambda: SyncedNorm(4)) for _ in range(4))
    expected = after_steps(plain)
    for model, policy in zip(others, ("full", "segments:2", "save:conv"), strict=True):
        apply_policy(model, policy)
        assert_same(after_steps(model), expected)
    assert plain.blocks[0].norm.num_batches_tracked == 3


def under_ddp(rank: int, policy: str) -> dict[str, torch.Tensor]:
    """Returns averaged gradients and buffers after two steps; DDP broadcasts rank 0's statistics in each forward."""
    torch.manual_seed(0)
    model = UNet()
    apply_policy(model, policy)
    ddp = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        torch.manual_seed(step)
        ddp(**batches(4, size=2)[2 * rank + step]).loss.backward()
    gradients = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, **dict(model.named_buffers())}


def test_buffers_on_two_ranks(tmp_path: Path) -> None:
    """Assertions on one rank are in the workers; those that need both ranks are below."""
    run_ranks(rank_of_two, str(tmp_path))
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one if name.startswith("grad"))
    assert one["mid_block.blocks.0.norm1.num_batches_tracked"] == 2
    statistics = "mid_block.blocks.0.norm1.running_mean"
    assert not torch.equal(one[statistics], other[statistics])  # each rank has its own images


def sync_batch_norm_rank(rank: int, directory: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("nccl", rank=rank, world_size=2, store=store)
    plain, model = (nn.SyncBatchNorm.convert_sync_batchnorm(make(NORMS["batch"])).cuda() for _ in range(2))
    apply_policy(model, "full")
    for step in range(3):
        x = torch.randn(4, 4, 8, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(10 * rank + step))
        plain(x).backward()
        model(x).backward()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="SyncBatchNorm takes CUDA tensors only; needs two GPUs")
def test_sync_batch_norm_on_two_gpus(tmp_path: Path) -> None:
    spawn(sync_batch_norm_rank, (str(tmp_path),), nprocs=2)
