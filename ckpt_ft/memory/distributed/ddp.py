"""DDP's gradient buckets by the rules of the Reducer's source; the Reducer itself is C++ and rejects fake tensors.

Parameters are assigned to buckets in reverse order, the first of 1 MiB and the others of 25 MiB (torch/nn/parallel/
distributed.py). A bucket is one flat tensor of its parameters' dtype that lives as long as the model. A gradient that
is ready is scaled and copied into its bucket. A bucket whose gradients are all ready is all-reduced while backward
goes on. When backward ends, the results are copied back, unless gradients are views of the buckets (reducer.cpp:
mark_variable_ready, all_reduce_bucket, finalize_backward).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt_ft.compat.autograd import engine
from ckpt_ft.compat.tensors import storage_pointer, tree_map

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20


def outputs_copied(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `forward` as DDP runs it with `find_unused_parameters`: it copies each output that needs a gradient.

    So the logits exist twice at the end of the forward (torch/nn/parallel/distributed.py: _DDPSink).
    """

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and value.grad_fn is not None else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return tree_map(copied, forward(*args, **kwargs))

    return call


class Buckets:
    """The buckets of a model's trainable parameters, of `cap` bytes but for the first; hooks fill them in backward."""

    def __init__(
        self, trained: Sequence[nn.Parameter], group: dist.ProcessGroup, as_view: bool, cap: int = BUCKET
    ) -> None:
        self.group, self.as_view = group, as_view
        self.buckets: list[_Bucket] = []
        self.synchronises = True  # False within no_sync
        self._waiting = False
        for parameters in _assigned(trained, cap):
            bucket = _Bucket(parameters)
            self.buckets.append(bucket)
            for index, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda p, bucket=bucket, index=index: self._ready(bucket, index, p)
                )

    def _ready(self, bucket: _Bucket, index: int, parameter: torch.Tensor) -> None:
        if not self.synchronises:
            return
        if not self._waiting:
            self._waiting = True
            engine.queue_callback(self._finish)
        assert parameter.grad is not None
        view = bucket.views[index]
        with torch.no_grad():
            if storage_pointer(parameter.grad.untyped_storage()) != storage_pointer(view.untyped_storage()):
                torch.mul(parameter.grad, 1.0 / self.group.size(), out=view)
                if self.as_view:
                    parameter.grad = view
            else:
                view.mul_(1.0 / self.group.size())
            bucket.missing -= 1
            if not bucket.missing:
                bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def _finish(self) -> None:
        """Called once when backward ends."""
        self._waiting = False
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.missing = len(bucket.parameters)
                if bucket.work is not None:
                    bucket.work.wait()
                    bucket.work = None
                if not self.as_view:
                    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                        if parameter.grad is not None:
                            parameter.grad.copy_(view)


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.missing = parameters, len(parameters)
        self.work: Any = None
        sizes = [p.numel() for p in parameters]
        self.flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = [part.view(p.shape) for part, p in zip(self.flat.split(sizes), parameters, strict=True)]


def _assigned(trained: Sequence[nn.Parameter], cap: int) -> list[list[nn.Parameter]]:
    """Assign trainable parameters to buckets in the order of backward (compute_bucket_assignment)."""
    buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    limit: dict[torch.dtype, int] = {}
    for parameter in reversed(trained):
        bucket = buckets.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= limit.get(parameter.dtype, min(FIRST_BUCKET, cap)):
            full.append(buckets.pop(parameter.dtype))
            limit[parameter.dtype] = cap
    return full + list(buckets.values())
