"""ZeRO-3 by the rules of DeepSpeed's source, on fake tensors: parts of parameters, gradients and states.

Rules, with their places in deepspeed/runtime/zero (0.19.8):

- Every parameter is cut into as many equal parts as there are ranks, the last one padded (partition_parameters.py:
  _partition_param). Parts of what is trained lie in one buffer; groups of them, of `sub_group_size` elements, have an
  fp32 copy, which is a copy in fp32 too (stage3.py: _create_fp16_partitions_with_defragmentation,
  _create_fp32_partitions, which compares a device with a name).
- A bucket of `reduce_bucket_size` elements and a buffer for the gradients of all parts live from beginning to end
  (_setup_for_real_optimizer). Gradients are copied to the bucket; a full one is reduce-scattered, from a copy in the
  ranks' order, and added to the parts' (__add_grad_to_ipg_bucket, __avg_scatter_grads, partition_grads).
- Which parameters are gathered when is told in fetching.py.
- A linear layer saves its parameter, not what was gathered of it (linear.py: LinearFunctionForZeroStage3).
- The step updates one group of parts at a time, by an fp32 copy of its gradients, and gathers what is never let go of
  (step).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from ckpt_ft.spec.launch import Launch, ZeroOptions

from .fetching import Fetcher
from .shards import Shard
from .streams import Streams
from .zero import Label, ZeroOptimizer


class _Group:
    """Parts that are updated together: views of the buffer of all parts, and their fp32 copy."""

    def __init__(self, options: dict[str, Any], shards: list[Shard]) -> None:
        self.options, self.shards = options, shards
        self.weights = torch.empty(0)
        self.master = torch.empty(0)


class Zero3(ZeroOptimizer):
    """The model's optimizer under ZeRO-3; hooks on its parameters take the gradients as they come."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        launch: Launch,
        group: dist.ProcessGroup,
        streams: Streams,
        label: Label,
    ) -> None:
        self.optimizer, self.group, self._streams = optimizer, group, streams
        self.synchronises = True  # gradients are reduced in each micro-batch, whatever is said here
        self._stream = streams.Stream() if launch.zero.overlap_comm else streams.current_stream()
        self._of = _shards(model, group.size(), launch.zero)
        self._groups = [g for options in optimizer.param_groups for g in self._split(options, launch.zero)]
        trained = [shard for group in self._groups for shard in group.shards]
        sizes = [shard.part.numel() for shard in trained]
        self._lay_out(sizes)
        dtype = trained[0].part.dtype
        self._bucket = torch.empty(launch.zero.reduce_bucket_size or 0, dtype=dtype)
        self._filled: list[Shard] = []
        self._elements = 0
        self._gradients = torch.zeros(sum(sizes), dtype=dtype)
        self._gradient_of = dict(zip(trained, self._gradients.split(sizes), strict=True))
        self._adds = False
        for shard in trained:
            shard.parameter.register_post_accumulate_grad_hook(self._ready)
        self.fetcher = Fetcher(model, self._of, launch.zero, group, streams)
        label((shard.part for shard in self._of.values()), "parameters")
        label((group.master for group in self._groups), "optimizer")
        label([self._bucket], "communication")
        label([self._gradients], "gradients")

    def _split(self, options: dict[str, Any], zero: ZeroOptions) -> Iterator[_Group]:
        together: list[Shard] = []
        for parameter in [p for p in options["params"] if p.requires_grad]:
            together.append(self._of[id(parameter)])
            if sum(shard.part.numel() for shard in together) >= zero.sub_group_size:
                yield _Group(options, together)
                together = []
        if together:
            yield _Group(options, together)

    def _lay_out(self, sizes: list[int]) -> None:
        """Trained parts in one buffer, and fp32 copies of the groups."""
        trained = [shard for group in self._groups for shard in group.shards]
        buffer = torch.cat([shard.part for shard in trained])
        for shard, view in zip(trained, buffer.split(sizes), strict=True):
            shard.part = view
        lengths = [sum(shard.part.numel() for shard in group.shards) for group in self._groups]
        for group, view in zip(self._groups, buffer.split(lengths), strict=True):
            group.weights = view
            group.master = view.to(torch.float32, copy=True).requires_grad_()

    # -- backward ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _ready(self, parameter: Any) -> None:
        self._wait_for_the_end()
        shard, size = self._of[id(parameter)], parameter.grad.numel()
        if self._filled and self._elements + size > self._bucket.numel():
            self._reduce()
        self._stream.wait_stream(self._streams.current_stream())
        if self._elements + size <= self._bucket.numel():
            with self._streams.stream(self._stream):
                place = self._bucket.narrow(0, self._elements, size).view_as(parameter.grad)
                place.copy_(parameter.grad)
                parameter.grad.data = place
        self._filled.append(shard)
        self._elements += size

    def _reduce(self) -> None:
        """Reduce-scatter what the bucket holds, and add it to the gradients of the parts."""
        shards = sorted(self._filled, key=lambda shard: shard.number)
        ranks = self.group.size()
        with self._streams.stream(self._stream):
            gradients = [shard.parameter.grad.view(-1) for shard in shards]  # type: ignore[union-attr]
            sizes = [shard.part.numel() for shard in shards]
            flat = gradients[0]
            if len(shards) > 1 or flat.numel() % ranks:
                padding = sum(sizes) * ranks - sum(gradient.numel() for gradient in gradients)
                flat = torch.cat([*gradients, torch.empty(padding, dtype=flat.dtype)])
            flat.div_(ranks)
            own = flat.narrow(0, sum(sizes) * self.group.rank(), sum(sizes))
            self.group._reduce_scatter_base(own, flat, dist.ReduceScatterOptions())
            for shard, reduced in zip(shards, own.split(sizes), strict=True):
                total = self._gradient_of[shard]
                total.add_(reduced) if self._adds else total.copy_(reduced)
                shard.parameter.grad = None
        self._filled.clear()
        self._elements = 0

    @torch.no_grad()
    def _finish(self) -> None:
        """When backward has ended (independent_gradient_partition_epilogue, backward_epilogue)."""
        self._waiting = False
        if self._filled:
            self._reduce()
        self._streams.current_stream().wait_stream(self._stream)
        self._adds = True
        self.fetcher.end_backward()

    # -- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's parts."""
        self.fetcher.release_all()
        self._adds = False
        norm = self._norm()
        for options in self.optimizer.param_groups:
            options["params"] = []
        for group in self._groups:
            gradients = [self._gradient_of[shard] for shard in group.shards]
            group.master.grad = _flatten_dense_tensors(gradients).to(torch.float32).mul_(norm)
            group.options["params"] = [group.master]
            self.optimizer.step()
            group.options["params"] = []
            group.weights.copy_(group.master)
            group.master.grad = None
        self.fetcher.gather_persistent()

    def _norm(self) -> Tensor:
        if self._gradients.dtype == torch.float16:
            torch.isinf(self._gradients).any(), torch.isnan(self._gradients).any()
        norms = [gradient.to(torch.float64).norm() for gradient in self._gradient_of.values()]
        norm = torch.stack(norms).pow(2).sum()
        dist.all_reduce(norm, group=self.group)
        return norm.float()


def _shards(model: nn.Module, ranks: int, options: ZeroOptions) -> dict[int, Shard]:
    """Every parameter in parts, by id; the whole ones are let go of."""
    shards: dict[int, Shard] = {}
    persistent = 0
    for number, parameter in enumerate(model.parameters()):
        size, shape = parameter.numel(), parameter.shape
        small = size <= (options.param_persistence_threshold or 0)
        small = small and size + persistent <= options.model_persistence_threshold
        persistent += size if small else 0
        part = torch.empty(-(-size // ranks), dtype=parameter.dtype)
        shards[id(parameter)] = shard = Shard(parameter, number, part, small, shape)
        parameter.ds_id = number  # type: ignore[attr-defined]  # as DeepSpeed marks what it swaps: policies know it
        shard.free()
    return shards


@contextmanager
def linear_saves_parameters() -> Iterator[None]:
    """torch.nn.functional.linear as DeepSpeed replaces it."""
    with patch.object(torch.nn.functional, "linear", lambda x, weight, bias=None: _Linear.apply(x, weight, bias)):
        yield


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        output = x.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            gradient.matmul(weight) if to_x else None,
            rows.t().matmul(x.reshape(-1, x.shape[-1])) if to_weight else None,
            rows.sum(0) if bias is not None and to_bias else None,
        )
