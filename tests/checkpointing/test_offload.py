"""The policy `offload`: equal gradients; which tensors are offloaded, when they return, and bytes on the host."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import build, gradients, loss_of
from torch import nn

from ckpt_ft import apply_policy, check_parity
from ckpt_ft.checkpointing import offload
from ckpt_ft.checkpointing.offload import CopyStream, Parked, Parking
from ckpt_ft.checkpointing.pointwise import install as pointwise
from ckpt_ft.checkpointing.recompute import Checkpointed
from ckpt_ft.errors import UserError
from ckpt_ft.memory.distributed.streams import Streams

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


def treat(model: nn.Module, blocks: Any, **options: Any) -> offload.Installed:
    return offload.install(model, {str(i): block for i, block in enumerate(blocks)}, **options)


def parked_bytes() -> int:
    return sum(one.host.nbytes for one in gc.get_objects() if type(one) is Parked)


def test_kernel_that_writes_saved_noise_later_is_refused() -> None:
    """RReLU saves memory for its noise before the kernel writes it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()) for _ in range(2)))
    treat(model, model, min_bytes=0)
    with pytest.raises(UserError, match="policy 'offload': autograd saves the noise of RReLU before its kernel"):
        model(torch.ones(ROWS, WIDTH)).sum().backward()


@pytest.mark.parametrize("also", ["", "full", "pointwise"])
@pytest.mark.parametrize("name", ["llama", "vit", "resnet", "t5", "unet"])
def test_offload_keeps_the_gradients(name: str, also: str) -> None:
    model, inputs = build(name)
    treated = copy.deepcopy(model)
    blocks = [m for m in treated.modules() if type(m).__name__.endswith(("Layer", "Block", "ResnetBlock2D"))]
    if also == "full":
        for block in blocks[-1:]:
            Checkpointed(block, None)
    if also == "pointwise":
        pointwise.install(treated, {"": treated})
    installed = treat(treated, blocks, min_bytes=256)
    for m in (model, treated):
        torch.manual_seed(3)
        loss = loss_of(m(**inputs))
        assert (parked_bytes() > 0) == (m is treated)
        loss.backward()
    assert all(g.equal(gradients(treated)[key]) for key, g in gradients(model).items())
    assert parked_bytes() == 0
    installed.remove()


def test_which_tensors_are_offloaded() -> None:
    """Two nodes share each block's Tanh output, which is offloaded once; weights and small tensors stay."""
    model = Stack(4)
    treat(model, model.blocks, min_bytes=NBYTES)
    x = torch.randn(ROWS, WIDTH)
    loss = model(x)
    assert parked_bytes() == 5 * NBYTES  # the input, and the outputs of four blocks
    assert not any(type(t) is torch.Tensor and t.shape == x.shape and t.requires_grad for t in gc.get_objects())
    loss.backward()
    assert parked_bytes() == 0


class ByName(Stack):
    """Calls its blocks with keyword arguments, as diffusers' transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(input=x)
        return x.sum()


def test_keyword_inputs_are_offloaded() -> None:
    """In checkpointed blocks these are inputs with a gradient, once it is known that no block writes into them."""
    model, x = ByName(4), torch.randn(ROWS, WIDTH)
    model(x).backward()
    plain = gradients(model)
    for block in model.blocks:
        Checkpointed(block, None)
    treat(model, model.blocks, min_bytes=NBYTES)
    for parked in (0, 3 * NBYTES):
        model.zero_grad()
        loss = model(x)
        assert parked_bytes() == parked
        loss.backward()
    assert all(plain[name].equal(gradient) for name, gradient in gradients(model).items())


def test_tensors_are_fetched_one_block_ahead() -> None:
    """When backward reads the tensors of block n, those of block n - 1 are fetched too, and no earlier ones."""
    model = Stack(4)
    back: list[list[int]] = []

    def note(grad: Any) -> None:
        parked = [o for o in gc.get_objects() if type(o) is Parked]
        back.append(sorted({p.block for p in parked if p.device is not None}))

    treat(model, model.blocks, min_bytes=NBYTES)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: output.register_hook(note) and None)
    model(torch.randn(ROWS, WIDTH, requires_grad=True)).backward()
    # before the backward of blocks 4, 3, 2, 1; block 3's input is block 2's output
    assert back == [[], [2, 3], [1, 2], [1]]


def test_dropped_graph_frees_host_memory() -> None:
    model, inputs = build("llama")
    treat(model, [], min_bytes=256)
    output = model(**inputs)
    assert parked_bytes() > 0
    del output
    assert parked_bytes() == 0


class Runs(nn.Module):
    """Runs a function of its layer and its input."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.linear, x)


def pair(body: Any, min_bytes: int = NBYTES) -> tuple[Runs, Runs]:
    plain = Runs(body)
    treated = copy.deepcopy(plain)
    treat(treated, [], min_bytes=min_bytes)
    return plain, treated


@pytest.mark.parametrize("min_bytes", [NBYTES, 100 * NBYTES], ids=["parked", "too small"])
@pytest.mark.parametrize(
    "write",
    [lambda h: h.mul_(3), lambda h: h.view(-1)[:2].zero_(), lambda h: h.detach().add_(1)],
    ids=["in place", "view", "detached"],
)
def test_write_after_saving_is_an_error(write: Any, min_bytes: int) -> None:
    """As in plain autograd, although the copy on the host would still be correct."""

    def body(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = linear(x)
        first = h.sin()
        write(h)
        return (first + h.square()).sum()

    for model in pair(body, min_bytes):
        loss = model(torch.randn(ROWS, WIDTH))
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[16, 8\].* is at version 1"):
            loss.backward()


def test_write_to_a_blocks_saved_input_is_an_error() -> None:
    """A checkpointed block saves its input, as plain checkpointing does."""

    class Edits(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks[0](x)
            y = self.blocks[1](h)
            h.add_(1)
            return (y + h).sum()

    for policy in ("full", "full,offload"):
        model = Edits(2)
        applied = apply_policy(model, policy)
        for engine in applied.engines:
            engine.stand_ins[-1].min_bytes = NBYTES  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="modified by an inplace operation|was changed in place after"):
            model(torch.randn(ROWS, WIDTH)).backward()


def test_tensor_written_and_saved_again_is_offloaded_again() -> None:
    def body(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = linear(x)
        first = h.exp_()  # saves its result
        g = first * 2
        g.add_(1)
        return (g.square() + linear(g)).sum()

    x = torch.randn(ROWS, WIDTH)
    plain, treated = pair(body)
    for model in (plain, treated):
        model(x).backward()
    assert all(g.equal(gradients(treated)[key]) for key, g in gradients(plain).items())


def as_complex(h: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(h.view(ROWS, WIDTH // 2, 2))


COMPLEX = {
    "conjugated and not": lambda m, x: ((z := torch.fft.fft(m(x))) * z.conj() * z).abs(),
    "conjugated first": lambda m, x: (z := torch.fft.fft(m(x))).conj().imag.sin() * z.real.exp() * (z * z).abs(),
    "real and complex views": lambda m, x: torch.view_as_real((z := as_complex(h := m(x))) * z).flatten(1) * h,
}


@pytest.mark.parametrize("body", COMPLEX.values(), ids=COMPLEX)
def test_complex_views_of_a_storage_are_offloaded(body: Any) -> None:
    """One storage is saved as real and complex numbers, conjugated and negated, and offloaded as its bits."""
    x = torch.randn(ROWS, WIDTH)
    plain, treated = pair(body)
    for model in (plain, treated):
        model(x).square().sum().backward()
    assert all(g.equal(gradients(treated)[key]) for key, g in gradients(plain).items())


@pytest.mark.parametrize("policy", ["full,offload", "segments:2,offload", "save:attention,offload"])
def test_saved_outputs_written_later_are_offloaded(policy: str) -> None:
    """Mixtral normalises the saved choice of experts in place."""
    model, inputs = build("mixtral")
    parity = check_parity(model, inputs, policy)
    assert parity.ok, str(parity)
    assert [row.difference for row in parity.rows] == [0.0] * 5


@pytest.mark.parametrize("rows", [ROWS, 32768], ids=["stays", "parked"])
@pytest.mark.parametrize("dims", [2, 3], ids=["addmm", "unsafe view"])
def test_saved_matmul_scaled_in_place_is_offloaded(rows: int, dims: int) -> None:
    class Scales(Stack):
        def __init__(self) -> None:
            super().__init__(0)
            self.blocks = nn.ModuleList(Runs(self.scaled) for _ in range(2))

        @staticmethod
        def scaled(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
            h = linear(x)
            h *= 1.7
            return h.tanh()

    shape = (rows, WIDTH) if dims == 2 else (2, rows // 2, WIDTH)
    parity = check_parity(Scales(), torch.randn(shape), "save:matmul,offload")
    assert parity.ok, str(parity)
    assert parity.rows[2].difference == 0.0


def test_dtensors_are_offloaded() -> None:
    """Tensors saved by column- and row-wise parallel layers are offloaded once and return as DTensors."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        results = []
        for offloaded in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
            plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
            parallelize_module(model, mesh, plan)
            if offloaded:
                treat(model, [], min_bytes=NBYTES)
            loss = model(torch.randn(ROWS, WIDTH)).square().sum()
            if offloaded:
                assert parked_bytes() == (WIDTH + 32) * ROWS * 4
            loss.backward()
            results.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        assert all(g.equal(results[1][name]) for name, g in results[0].items())
        assert parked_bytes() == 0
    finally:
        dist.destroy_process_group()


def test_other_tensor_subclasses_are_not_offloaded() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)).requires_grad_()
    model = Runs(lambda linear, x: (x.sin() * x).sum())
    treat(model, [], min_bytes=1)
    loss = model(x)
    assert parked_bytes() == 0
    loss.backward()
    assert x.grad.a.equal(x.a.cos() * x.a + x.a.sin())


def test_write_to_a_saved_dtensor_is_an_error() -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    class Edits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * 2
            first = h.sin()
            h.mul_(3)
            return (first + h.square()).sum()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Edits()
        treat(model, [], min_bytes=NBYTES)
        local = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss = model(DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Replicate()]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    finally:
        dist.destroy_process_group()


def test_keep_offloads_without_hooks() -> None:
    """`keep` is for outputs that a `save:` policy keeps."""

    class KeepsATensor(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = offload.keep(x.detach())
            return x.sum()

    model = KeepsATensor()
    treat(model, [], min_bytes=NBYTES)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model(x)
    assert parked_bytes() == NBYTES
    assert model.kept.get().equal(x)
    assert offload.keep(x).get().data_ptr() == x.data_ptr()  # nothing is offloaded outside a model's forward


class Listener:
    """Records the events on a GPU's streams, without a GPU."""

    def __init__(self) -> None:
        self.stream, self.said = "", []

    def synchronise(self, what: str, stream: str, back: int = 0) -> None:
        self.said.append((what, stream, back))


def test_copied_tensor_is_kept_until_the_computation_waits_for_the_copy() -> None:
    """Only then may its memory be used again. Fetched tensors that are never used must be waited for, too."""
    parking = Parking(1)
    source = torch.randn(4)
    parking.copies = CopyStream(source)
    parking.copies.streams = streams = Streams()
    parking.copies.side, streams.recorder = streams.Stream(), (heard := Listener())
    freed = weakref.ref(source)
    parking.inside = True  # inside a block
    parked = Parked(source, 0, parking)
    del source
    gc.collect()
    begins_late, copied = [("record", "", 0), ("wait", "stream 1", 0)], ("record", "stream 1", 0)
    assert (heard.said, freed() is None) == ([*begins_late, copied], False)
    heard.said.clear()
    parking.release()
    assert (heard.said, freed() is None) == ([("wait", "", 0)], True)
    heard.said.clear()
    parked.fetch()
    del parked
    assert heard.said == [*begins_late, copied, ("wait", "", 0)]


@pytest.mark.gpu
def test_offload_on_a_gpu() -> None:
    model = Stack(6).cuda()
    plain = copy.deepcopy(model)
    x = torch.randn(4096, WIDTH, device="cuda")
    treat(model, model.blocks, min_bytes=1024)
    before = torch.cuda.memory_allocated()
    loss = model(x)
    assert torch.cuda.memory_allocated() - before < x.nbytes
    loss.backward()
    plain(x).backward()
    torch.cuda.synchronize()
    assert all(g.equal(gradients(model)[key]) for key, g in gradients(plain).items())
    assert parked_bytes() == 0


@pytest.mark.slow
def test_outputs_kept_by_save_are_offloaded() -> None:
    from ckpt_ft.memory.fake.step import trace_step
    from ckpt_ft.spec.training_spec import TrainingSpec
    from ckpt_ft.workloads.load import load

    workload = load(
        TrainingSpec.of("HuggingFaceTB/SmolLM2-135M", dtype="bfloat16", optimizer="none", seq_length=1024), "t4"
    )
    kept = {}
    for policy in ("save:attention+matmul", "save:attention+matmul,offload"):
        applied = apply_policy(workload.model, policy)
        trace = trace_step(workload.model, workload.step(4), device="a100-40gb")
        kept[policy] = sum(trace.module_activations().values())
        applied.remove()
    assert kept["save:attention+matmul,offload"] < 0.01 * kept["save:attention+matmul"]


def test_storage_at_the_address_of_a_freed_weight_is_offloaded() -> None:
    """ZeRO-3 frees gathered weights; a new storage at such an address must not be taken for a weight."""
    layer = nn.Linear(WIDTH, WIDTH)
    parking = Parking(1)
    parking.resident |= offload._storages(layer)
    for parameter in layer.parameters():
        parameter.data = torch.empty(0)
    new = [torch.empty(WIDTH) for _ in range(100)]
    assert all(parking.leaves(tensor) for tensor in new)
