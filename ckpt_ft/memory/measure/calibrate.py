"""Measures single operators of every kind, over sizes and dtypes, on the GPU of this machine, or on its CPU.

The measured seconds of each operator are divided by those that cost/kernels.py predicts for it. The card keeps these
shares by kind, dtype and predicted seconds. An operator takes turns on several copies of its arguments, so that it
finds the caches as in a step. The host's seconds per op are those of a tiny Llama, whose kernels are short.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import cycle, groupby
from math import log, prod
from statistics import geometric_mean
from typing import Any

import psutil  # type: ignore[import-untyped]  # also required by accelerate
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Measurement, Timer
from torch.utils.benchmark.utils.timer import timer as default_timer

from ckpt_ft.compat.tensors import tree_map_only
from ckpt_ft.memory.cost.kernels import device_seconds, in_turn, kind_of
from ckpt_ft.memory.cost.op_work import measure
from ckpt_ft.memory.cost.schedule import Host, step_seconds
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import CPU, GPU, Calibration, Curve, current_gpu
from ckpt_ft.memory.record.events import Op
from ckpt_ft.units import MIB

aten = torch.ops.aten
Case = partial[Any]  # an operator with its arguments
Make = Callable[[], Case]
_COPIES = 64 * MIB  # bytes of all copies of an operator's arguments: a step's weights and states pass the caches, too
_PRODUCTS = (
    (8, 16, 16), (64, 64, 64), (256, 64, 256), (128, 256, 256), (512, 256, 1024), (1024, 768, 768), (2048, 1024, 1024),
    (4096, 4096, 4096), (8192, 8192, 8192), (64, 64, 8), (512, 512, 8), (512, 8, 512), (4096, 4096, 16),
)  # fmt: skip
_BATCHED = (
    (4, 8, 8, 8),
    (8, 64, 16, 64),
    (16, 128, 64, 128),
    (32, 256, 64, 256),
    (64, 512, 64, 512),
    (96, 2048, 128, 2048),
)
_IMAGES = (  # images, channels, side, groups
    (1, 8, 8, 1), (4, 16, 16, 1), (4, 32, 32, 1), (8, 64, 56, 1), (32, 256, 56, 1),
    (1, 8, 8, 8), (4, 32, 32, 32), (8, 64, 56, 64), (4, 32, 32, 8), (8, 64, 56, 8),
)  # fmt: skip
_HEADS = ((2, 8, 8), (4, 64, 16), (16, 128, 32), (8, 128, 64), (8, 512, 64), (32, 4096, 128))  # heads, tokens, size
_ELEMENTS = (64, 4096, 65536, 2**20, 2**23)


class _Cases:
    """The operators that are timed, in one dtype on one device; `most`: multiplications of the largest."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.most = 2**30 if device.type == "cpu" else 2**40

    def x(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def ids(self, rows: int) -> Tensor:
        return torch.randint(1000, (rows,), device=self.device)

    def __iter__(self) -> Iterator[Make]:
        for size in (size for size in _PRODUCTS if prod(size) <= self.most):
            yield from (partial(make, *size) for make in (self.product, self.product_backward))
        yield from (partial(self.batched, *size) for size in _BATCHED if prod(size) <= self.most)
        for images, channels, side, groups in _IMAGES:
            if 9 * images * channels**2 // groups * side**2 <= self.most:
                yield partial(self.convolution, images, channels, side, groups)
                yield partial(self.convolution_backward, images, channels, side, groups)
        for heads, tokens, head in _HEADS if self.has_attention else ():
            if 2 * heads * tokens**2 * head <= self.most:
                yield partial(self.attention, heads, tokens, head)
                yield partial(self.attention_backward, heads, tokens, head)
        for count in _ELEMENTS:
            yield from self.elementwise(count)
            yield from self.rows(max(count // 256, 1), min(count, 256))
            if count >= 4096:
                yield from self.images(round((count / 64) ** 0.5))

    def product(self, rows: int, terms: int, columns: int) -> Case:
        return partial(aten.mm.default, self.x(rows, terms), self.x(columns, terms).t())

    def product_backward(self, rows: int, terms: int, columns: int) -> Case:
        return partial(aten.mm.default, self.x(terms, rows).t(), self.x(terms, columns))

    def batched(self, heads: int, rows: int, terms: int, columns: int) -> Case:
        return partial(aten.bmm.default, self.x(heads, rows, terms), self.x(heads, columns, terms).transpose(1, 2))

    def convolution(self, images: int, channels: int, side: int, groups: int) -> Case:
        given, weight = self.x(images, channels, side, side), self.x(channels, channels // groups, 3, 3)
        return partial(aten.convolution.default, given, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)

    def convolution_backward(self, images: int, channels: int, side: int, groups: int) -> Case:
        forward = self.convolution(images, channels, side, groups)
        given, weight, _, *window = forward.args
        gradient = self.x(images, channels, side, side)
        return partial(aten.convolution_backward.default, gradient, given, weight, None, *window, [True, True, False])

    @property
    def has_attention(self) -> bool:
        """Whether this dtype has a kernel that takes queries, keys and values as they are."""
        on_gpu = self.device.type == "cuda"
        return not on_gpu or (self.dtype.itemsize == 2 and torch.cuda.get_device_capability(self.device) >= (8, 0))

    def attention(self, heads: int, tokens: int, size: int) -> Case:
        name = f"_scaled_dot_product_flash_attention{'_for_cpu' if self.device.type == 'cpu' else ''}"
        return partial(
            getattr(aten, name).default, *(self.x(1, tokens, heads, size).transpose(1, 2) for _ in range(3))
        )

    def attention_backward(self, heads: int, tokens: int, size: int) -> Case:
        forward = self.attention(heads, tokens, size)
        out, lse, *more = forward()
        gradient = torch.ones_like(out)
        if self.device.type == "cpu":
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return partial(backward, gradient, *forward.args, out, lse, 0.0, False)
        backward = aten._scaled_dot_product_flash_attention_backward.default
        sizes, (seed, offset, *_) = more[:4], more[4:]
        return partial(backward, gradient, *forward.args, out, lse, *sizes, 0.0, False, seed, offset)

    def elementwise(self, n: int) -> list[Make]:
        x = self.x
        made: list[Make] = [
            lambda: partial(aten.add.Tensor, x(n), x(n)),
            lambda: partial(aten.mul.Tensor, x(n), x(n)),
            lambda: partial(aten.gelu.default, x(n)),
            lambda: partial(aten.silu.default, x(n)),
            lambda: partial(aten.gelu_backward.default, x(n), x(n)),
            lambda: partial(aten.sum.default, x(n)),
            lambda: partial(aten.bernoulli_.float, x(n), 0.9),
            lambda: partial(aten._to_copy.default, x(n), dtype=_other(self.dtype)),
        ]
        if self.device.type == "cuda":
            made.append(lambda: partial(aten._foreach_add.List, [x(n)] * 4, [x(n)] * 4))
        return made

    def rows(self, rows: int, width: int) -> list[Make]:
        x, ids = self.x, self.ids

        def row_norm_backward() -> Case:
            given, weight = x(rows, width), x(width)
            _, mean, spread = aten.native_layer_norm.default(given, [width], weight, weight, 1e-5)
            more = given, [width], mean, spread, weight, weight, [True] * 3
            return partial(aten.native_layer_norm_backward.default, x(rows, width), *more)

        return [
            lambda: partial(aten.clone.default, x(width, rows).t(), memory_format=torch.contiguous_format),
            lambda: partial(aten.add.Tensor, x(rows, width), x(width)),
            lambda: partial(aten._softmax.default, x(rows, width), -1, False),
            lambda: partial(aten._softmax_backward_data.default, x(rows, width), x(rows, width), -1, self.dtype),
            lambda: partial(aten.native_layer_norm.default, x(rows, width), [width], x(width), x(width), 1e-5),
            row_norm_backward,
            lambda: partial(aten.embedding.default, x(1000, width), ids(rows)),
            lambda: partial(aten.embedding_dense_backward.default, x(rows, width), ids(rows), 1000, -1, False),
        ]

    def images(self, side: int) -> list[Make]:
        x = self.x

        def image() -> Tensor:
            return x(1, 64, side, side)

        def batch_norm_backward() -> Case:
            mean, spread = x(64), x(64).abs()
            more = x(64), mean, spread, mean, spread, True, 1e-5, [True] * 3
            return partial(aten.native_batch_norm_backward.default, image(), image(), *more)

        return [
            lambda: partial(aten.max_pool2d_with_indices.default, image(), [3, 3], [2, 2], [1, 1]),
            lambda: partial(
                aten.native_batch_norm.default, image(), x(64), x(64), x(64), x(64).abs(), True, 0.1, 1e-5
            ),
            batch_norm_backward,
            lambda: partial(aten.native_group_norm.default, image(), x(64), x(64), 1, 64, side**2, 8, 1e-5),
        ]


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


def calibrate(say: Callable[[str], object] = lambda line: None) -> GPU:
    """Measures the operators of the current GPU, or of the CPU if PyTorch sees no GPU, in about a minute.

    say: called with a line for each step.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = current_gpu()
    card = _cpu() if gpu is None else replace(gpu, calibration=None)
    curves = _curves(card, device, say)
    say("timing launches and copies")
    own = Calibration(date.today().isoformat(), curves=curves, host_memory=host_memory(), **_copies(device))
    card = replace(card, calibration=own)
    per_launch = 0.0 if card.is_cpu else _per_launch(device)
    return replace(card, calibration=replace(own, per_op=_per_op(card, device, per_launch), per_launch=per_launch))


def _cpu() -> GPU:
    """The CPU as a card, with round rates, which the shares of its operators correct."""
    threads = torch.get_num_threads()
    name = f"cpu ({platform.processor() or platform.machine()}, {threads} threads)"
    flops, memory = 5e10 * threads, psutil.virtual_memory().total
    return GPU(name, CPU, threads, memory, 0, 2e10, flops, 0, flops, flops, 0)


def _op(case: Case) -> Op:
    work = measure(case.func, case.args, case.keywords, case())  # type: ignore[arg-type]
    return Op(str(case.func), work.flops, work.nbytes, work.dtype, "", "", 0, work.kernels, shape=work.shape)


def _timed(make: Make, nbytes: int) -> float:
    """Seconds of one call, the least of several: others may use the machine."""
    case, count = make(), min(max(_COPIES // max(nbytes, 1), 1), 32)
    turns = cycle([tree_map_only(Tensor, Tensor.clone, case.args) for _ in range(count)])
    return min(timer(lambda: case.func(*next(turns), **case.keywords)).times)


def timer(call: Callable[[], object], seconds: float = 0.01) -> Measurement:
    """Times `call` for at least so many seconds: in CPU time on one thread of a CPU, which others may use."""
    alone = not torch.cuda.is_available() and torch.get_num_threads() == 1
    clock = time.process_time if alone else default_timer
    return Timer("call()", globals={"call": call}, timer=clock).blocked_autorange(min_run_time=seconds)


def _curves(card: GPU, device: torch.device, say: Callable[[str], object]) -> tuple[tuple[str, Curve], ...]:
    """The curves of every kind and dtype; operators of one kind that are predicted to take as long share a point."""
    dtypes = [torch.float32, torch.bfloat16] if card.bf16 else [torch.float32]
    dtypes += [torch.float16] if device.type == "cuda" else []
    least: dict[tuple[torch.dtype, int], tuple[str, float, float]] = {}  # kind, predicted and measured seconds
    for turn in ("", " again"):  # the least of two: others may use the machine
        for dtype in dtypes:
            say(f"timing operators in {str(dtype)[6:]}{turn}")
            for number, make in enumerate(_Cases(device, dtype)):
                op = _op(make())
                kind, turns = f"{kind_of(op.name, op.shape)} {op.dtype}", in_turn(op.name, op.shape, card)
                seconds = _timed(make, op.nbytes) / turns
                if (dtype, number) in least:
                    seconds = min(seconds, least[dtype, number][2])
                least[dtype, number] = kind, device_seconds(op, card) / turns, seconds
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, predicted, measured in least.values():
        found.setdefault(kind, []).append((predicted, measured / predicted))
    return tuple((name, _merged(points)) for name, points in found.items())


def _merged(points: list[tuple[float, float]]) -> Curve:
    """The points by predicted seconds; those within a tenth of a decade become their geometric mean."""
    groups = groupby(sorted(points), lambda point: round(10 * log(point[0], 10)))
    columns = (zip(*group, strict=True) for _, group in groups)
    return tuple((geometric_mean(seconds), geometric_mean(shares)) for seconds, shares in columns)


def _copies(device: torch.device) -> dict[str, float]:
    """Bytes per second between host and card, and between two cards; nothing for a CPU."""
    if device.type == "cpu":
        return {}
    there = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    here = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    rates = {"host_bandwidth": there.nbytes / min(timer(lambda: there.copy_(here, non_blocking=True), 0.2).times)}
    if torch.cuda.device_count() > 1:
        beside = torch.empty_like(there, device=torch.device("cuda", 1 - torch.cuda.current_device() % 2))
        rates["link"] = there.nbytes / min(timer(lambda: beside.copy_(there), 0.2).times)
    return rates


def host_memory(elements: int = 2**24) -> float:
    """Bytes per second of fused AdamW on the host: it reads four fp32 tensors and writes three."""
    weight = nn.Parameter(torch.zeros(elements))
    weight.grad = torch.zeros(elements)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 7 * weight.nbytes / min(timer(optimizer.step, 0.5).times)


def _per_launch(device: torch.device) -> float:
    """Seconds from the start of one short kernel to that of the next."""
    x = torch.zeros(1, device=device)
    return min(timer(lambda: [x.add_(1) for _ in range(100)], 0.2).times) / 100


def _per_op(card: GPU, device: torch.device, per_launch: float) -> float:
    """Seconds of dispatch, autograd and Python for each op, views included: of a Llama of 8 blocks, 32 wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=2,
        vocab_size=64,
        use_cache=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).to(device)
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    trace = trace_step(model, step, make_optimizer=adamw, device="cpu" if card.is_cpu else card)
    optimizer = adamw(model)
    measured = min(timer(lambda: step(model, optimizer), 1.0).times)
    ops = [op for op in trace.ops if op.at >= trace.start and not op.name.startswith("prim.")]
    known = step_seconds(ops, card, Host(0.0, per_launch)).total
    return max(measured - known, 0.0) / len(ops)
