"""ZeRO-1 and ZeRO-2 by the rules of DeepSpeed's source, on fake tensors: what a rank holds, reduces and updates.

The rules, with their places in deepspeed/runtime/zero/stage_1_and_2.py (0.19.8):

- The trainable parameters of a group lie in one flat buffer, padded to a multiple of twice the number of ranks. Every
  rank owns an equal part of it, and has an fp32 copy of the part: the master weights, which its optimizer updates
  (__init__).
- From the first gradient of a backward to its end there is a bucket of `reduce_bucket_size` elements, or two if
  reductions overlap (setup_buckets). Gradients are copied into it. A full bucket is reduced as a whole, in a copy if
  it has pieces of several ranks (reduce_independent_p_g_buckets_and_remove_grads, allreduce_and_scatter). A gradient
  that is larger than the bucket is reduced in its own storage.
- Reduced gradients of the rank's own part are copied to a buffer of their own (copy_grads_in_partition). ZeRO-2 drops
  all others in each micro-batch; ZeRO-1 keeps them until they are reduced after the last backward (reduce_gradients).
- The step computes the norm in fp64, gradient by gradient (get_grad_norm_direct), flattens the part's gradients,
  converts them to fp32, updates the master weights, copies them to the part and gathers the parts (step).
- If the optimizer is offloaded, master weights, their gradient and a copy of the part are in host memory (__init__,
  initialize_optimizer_states). A reduced gradient of the own part is copied there and dropped; if micro-batches
  accumulate, it is added on the device, in a buffer as large as the largest parameter, to what was copied before
  (async_accumulate_grad_in_cpu_via_gpu, async_inplace_copy_grad_to_fp32_buffer_from_gpu). accelerate replaces the
  optimizer by DeepSpeed's Adam or Adagrad for the host (map_pytorch_optim_to_deepspeed).

All parts have the same size, but different peaks. The last rank is traced: backward computes its gradients first, so
they coexist with the most activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckpt_ft.compat.autograd import engine
from ckpt_ft.errors import UserError
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.spec.launch import Launch

from .group import all_gather
from .streams import Streams


def host_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate and DeepSpeed run on the host in place of `optimizer`.

    Raises:
        UserError: it is Lion, whose version for the host is not modelled.
    """
    name = type(optimizer).__name__.lower()
    if "lion" in name:
        raise UserError("launch: offload_optimizer with Lion is not modelled; take AdamW, or leave out the offloading")
    groups = [{"params": [p for p in group["params"] if p.requires_grad]} for group in optimizer.param_groups]
    kind = torch.optim.Adagrad if "adagrad" in name else torch.optim.AdamW
    return kind([group for group in groups if group["params"]], fused=True)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all `tensors` in one; those of a single one are not copied."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def _divided(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` with the shapes of `like`, one behind the other."""
    ends = accumulate(tensor.numel() for tensor in like)
    return [flat.narrow(0, end - t.numel(), t.numel()).view_as(t) for t, end in zip(like, ends, strict=True)]


class Flat:
    """A group's parameters in one buffer, and the last rank's part of it.

    Attributes:
        part: a view of the buffer; `master` is its fp32 copy.
        mine: the parameters that reach into the part, with how many of their elements come before it.
        pieces: for each parameter, by id, (rank, elements) for each rank in whose part it lies.
        gradients: reduced gradients of `mine`, as far as they are in the part.
        half: if the optimizer is offloaded, the copy of the part in host memory.
        places: if it is, for each of `mine`, by id, its place in the gradient of `master`; the elements before it.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: int) -> None:
        elements = sum(p.numel() for p in parameters)
        padding = -elements % (2 * ranks)
        tensors: list[Tensor] = [p.data for p in parameters]
        if padding:
            tensors.append(torch.zeros(padding, dtype=tensors[0].dtype))
        self.buffer = joined(tensors)
        for parameter, view in zip(parameters, _divided(self.buffer, parameters), strict=False):
            parameter.data = view.data
        self.parameters = parameters
        self.size = (elements + padding) // ranks
        first = self.size * (ranks - 1)
        self.part = self.buffer.narrow(0, first, self.size)
        self.master = self.part.clone().to(torch.float32).requires_grad_()
        self.mine: list[tuple[nn.Parameter, int]] = []
        self.pieces: dict[int, list[tuple[int, int]]] = {}
        self.gradients: list[Tensor] = []
        self.half = torch.empty(0)
        self.places: dict[int, tuple[Tensor, int]] = {}
        self._sums: list[Tensor] = []  # whole gradients of `mine`
        at = 0
        for parameter in parameters:
            end = at + parameter.numel()
            cuts = [at, *range((at // self.size + 1) * self.size, end, self.size), end]
            self.pieces[id(parameter)] = [(a // self.size, b - a) for a, b in pairwise(cuts)]
            if end > first:
                self.mine.append((parameter, max(first - at, 0)))
            at = end

    def add_gradients(self) -> None:
        """Add the gradients of `mine` to those of earlier micro-batches."""
        new = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in self.mine]
        if self._sums:
            for total, gradient in zip(self._sums, new, strict=True):
                total.add_(gradient)
        else:
            self._sums = new

    def offload(self, recorder: Recorder) -> None:
        """Put what the optimizer needs into host memory."""
        self.half = torch.zeros_like(self.part)
        self.master.grad = torch.zeros_like(self.master)
        recorder.put_on_host([self.master, self.half], "optimizer")
        recorder.put_on_host([self.master.grad], "gradients")
        at = 0
        for parameter, before in self.mine:
            elements = min(parameter.numel() - before, self.size - at)
            self.places[id(parameter)] = self.master.grad.narrow(0, at, elements), before
            at += elements

    def take_gradients(self) -> None:
        """The step's gradients are complete: keep those in the part."""
        parts = zip(self._sums, self.mine, strict=True)
        self.gradients = [gradient.view(-1)[before:] for gradient, (_, before) in parts]
        self._sums = []
        if missing := self.size - sum(gradient.numel() for gradient in self.gradients):
            self.gradients.append(torch.zeros(missing, dtype=self.part.dtype))


class ZeroOptimizer:
    """Replaces the optimizer under ZeRO: collects the gradients in a bucket, and has its own step.

    Attributes:
        synchronises: False in all micro-batches of a step but the last.
        buckets: the first is being filled, another may be under reduction.
    """

    def __init__(
        self, optimizer: Any, launch: Launch, group: dist.ProcessGroup, streams: Streams, recorder: Recorder
    ) -> None:
        self.optimizer, self.group, self.streams, self.recorder = optimizer, group, streams, recorder
        self.offloads, self.overlaps = launch.zero.offload_optimizer, launch.zero.overlap_comm
        self.synchronises = True
        self.stream = streams.Stream() if self.overlaps else streams.current_stream()
        self.buckets: list[Tensor] = []
        self.filled: list[nn.Parameter] = []
        self.elements = 0
        self._waiting = False  # whether `_finish` is queued for the end of this backward

    @property
    def param_groups(self) -> Any:
        """The optimizer's groups, with master weights as parameters."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are already gone."""

    def _wait_for_the_end(self) -> None:
        """Queue `_finish` for the end of this backward, once."""
        if not self._waiting:
            self._waiting = True
            engine.queue_callback(self._finish)

    def _take(self, parameter: Any, stream: Any) -> None:
        """Put a gradient into the bucket, which is reduced first if it has no room; one that is larger stays."""
        size = parameter.grad.numel()  # under ZeRO-3 the parameter itself may be released
        if self.filled and self.elements + size > self.buckets[0].numel():
            self._reduce()
            self.buckets.reverse()
        stream.wait_stream(self.streams.current_stream())
        if self.elements + size <= self.buckets[0].numel():
            with self.streams.stream(stream):
                _move(parameter.grad, self.buckets[0].narrow(0, self.elements, size))
        self.filled.append(parameter)
        self.elements += size

    def _reduce(self) -> None:
        self._reduce_filled()
        self.filled.clear()
        self.elements = 0

    def _reduce_filled(self) -> None:
        """Reduce the bucket's gradients, and keep this rank's."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Called once when backward ends."""
        raise NotImplementedError


class Zero(ZeroOptimizer):
    """The model's optimizer under ZeRO-1 or ZeRO-2; hooks on the parameters take each gradient when it is computed."""

    def __init__(
        self, optimizer: Any, launch: Launch, group: dist.ProcessGroup, streams: Streams, recorder: Recorder
    ) -> None:
        super().__init__(optimizer, launch, group, streams, recorder)
        self.bucket: int = launch.zero.reduce_bucket_size or 0
        self.ranks, self.drops = group.size(), launch.strategy == "zero2"
        self._reduce_dtype = reduce_dtype(launch, next(p.dtype for o in optimizer.param_groups for p in o["params"]))
        self._kept: Tensor | None = None  # this rank's gradients of this backward
        self._kept_elements = 0
        self.flats = [self._flat(options) for options in optimizer.param_groups]
        self._of = {id(parameter): flat for flat in self.flats for parameter in flat.parameters}
        self._mine = {id(parameter) for flat in self.flats for parameter, _ in flat.mine}
        recorder.add_resident([flat.master for flat in self.flats], "optimizer")
        self._micro_batch = 0  # of the step
        self._sums: dict[int, Tensor] = {}  # if offloaded: gradients of earlier micro-batches, by the parameter's id
        if self.offloads:
            for flat in self.flats:
                flat.offload(recorder)
            largest = max(parameter.numel() for flat in self.flats for parameter in flat.parameters)
            dtype = self.flats[0].part.dtype  # one on the device and one, which is not used, on the host
            self._temporary, self._unused = torch.zeros(largest, dtype=dtype), torch.zeros(largest, dtype=dtype)
            recorder.add_resident([self._temporary], "communication")
            recorder.put_on_host([self._unused], "communication")

    def _flat(self, options: dict[str, Any]) -> Flat:
        flat = Flat([p for p in options["params"] if p.requires_grad and p.numel()], self.ranks)
        options["params"] = [flat.master]
        for parameter in flat.parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)
        return flat

    # -- backward ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _ready(self, parameter: Any) -> None:
        self._wait_for_the_end()
        if not self.buckets:
            self.buckets = [torch.empty(self.bucket, dtype=parameter.dtype) for _ in range(2 if self.overlaps else 1)]
            self.recorder.add_resident(self.buckets, "communication")
        if self.drops or (self.overlaps and self.synchronises):
            self._take(parameter, self.streams.current_stream())
        else:
            self.recorder.add_resident([parameter.grad], "gradients")

    def _reduce(self) -> None:
        with on_stream(self.streams, self.stream) if self.overlaps else nullcontext():
            super()._reduce()

    def _reduce_filled(self) -> None:
        first = self.filled[0].grad
        assert first is not None
        whole = first.view(-1) if self.elements > self.bucket else self.buckets[0].narrow(0, 0, self.elements)
        whole.div_(self.ranks)
        runs = self._runs()
        waiting: list[Tensor] = []
        for number, piece in enumerate(whole.split([elements for _, elements in runs])):
            waiting.append(piece)
            if number == len(runs) - 1 or sum(p.numel() for p in waiting) > self.bucket:
                self._all_reduce(waiting, [rank for rank, _ in runs[number + 1 - len(waiting) : number + 1]])
                waiting = []
        for parameter in self.filled:
            if id(parameter) in self._mine:
                if self.offloads:
                    self._offload(parameter)
                else:
                    self._keep(parameter)
            elif self.drops:
                parameter.grad = None

    def _runs(self) -> list[tuple[int, int]]:
        """(rank, elements) of each run of one rank's elements in the bucket."""
        runs: list[tuple[int, int]] = []
        for parameter in self.filled:
            for rank, elements in self._of[id(parameter)].pieces[id(parameter)]:
                before = runs.pop()[1] if runs and runs[-1][0] == rank else 0
                runs.append((rank, before + elements))
        return runs

    def _all_reduce(self, pieces: list[Tensor], ranks: list[int]) -> None:
        flat = joined(pieces)  # a single piece is not copied
        if len(pieces) > 1:
            self.recorder.add_resident([flat], "communication")
        sent = flat.to(self._reduce_dtype)
        dist.all_reduce(sent, group=self.group)
        if sent is not flat:
            flat.copy_(sent)
        for piece, reduced, rank in zip(pieces, _divided(flat, pieces), ranks, strict=True):
            if rank == self.ranks - 1:
                piece.copy_(reduced)

    def _offload(self, parameter: nn.Parameter) -> None:
        """Copy a gradient to the host, added to those of earlier micro-batches."""
        gradient = parameter.grad
        assert gradient is not None
        if self._micro_batch or not self.synchronises:
            if id(parameter) not in self._sums:
                self._sums[id(parameter)] = torch.zeros(parameter.numel(), dtype=parameter.dtype)
                self.recorder.put_on_host([self._sums[id(parameter)]], "gradients")
            total = self._sums[id(parameter)]
            if self._micro_batch:
                gradient.view(-1).add_(self._temporary.narrow(0, 0, parameter.numel()).copy_(total))
            total.copy_(gradient.view(-1))
        if self.synchronises:
            place, before = self._of[id(parameter)].places[id(parameter)]
            own = gradient.view(-1).narrow(0, before, place.numel())
            torch.linalg.vector_norm(own.to(torch.float64))
            place.copy_(own.to(torch.float32))
            parameter.grad = None

    def _keep(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if self._kept is None:
            elements = sum(parameter.numel() for flat in self.flats for parameter, _ in flat.mine)
            self._kept, self._kept_elements = torch.empty(elements, dtype=parameter.grad.dtype), 0
            self.recorder.add_resident([self._kept], "gradients")
        _move(parameter.grad, self._kept.narrow(0, self._kept_elements, parameter.numel()))
        self._kept_elements += parameter.numel()

    @torch.no_grad()
    def _finish(self) -> None:
        """Called when backward has ended (independent_gradient_partition_epilogue)."""
        self._waiting = False
        if not self.drops and not self.synchronises:
            return  # ZeRO-1 accumulates further
        if not self.drops and not self.overlaps:
            for parameter in [p for flat in self.flats for p in flat.parameters if p.grad is not None]:
                self._take(parameter, self.stream)
        if self.filled:
            self._reduce()
        self._micro_batch += 1
        for flat in self.flats:
            if not self.offloads:
                flat.add_gradients()
                if self.synchronises:
                    flat.take_gradients()
            for parameter in flat.parameters:
                parameter.grad = None
        self.buckets, self._kept = [], None

    # -- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's part of the parameters, and gather the others'."""
        self._micro_batch = 0
        if self.offloads:
            self.recorder.await_device()
        norm: Any = 1.0 if self.offloads else self._norm()
        groups = self.optimizer.param_groups
        for flat, options in zip(self.flats, groups, strict=True):
            if not self.offloads:
                flat.master.grad = joined(flat.gradients).to(torch.float32)
                flat.gradients = []
            assert flat.master.grad is not None
            flat.master.grad.mul_(norm)
            self.optimizer.param_groups = [options]
            self.optimizer.step()
            if self.offloads:
                flat.part.copy_(flat.half.copy_(flat.master))
            else:
                flat.master.grad = None
                flat.part.copy_(flat.master)
        self.optimizer.param_groups = groups
        for flat in self.flats:
            all_gather(flat.buffer, flat.part, self.group, async_op=True)

    def _norm(self) -> Tensor:
        norms = []
        for flat in self.flats:
            for gradient in flat.gradients:
                if gradient.dtype != torch.float32:
                    gradient.amax(), gradient.amin()  # the check for overflow
                norms.append(torch.linalg.vector_norm(gradient.to(torch.float64)))
        norm = torch.stack(norms).pow(2).sum().float()
        dist.all_reduce(norm, group=self.group)
        return norm


def reduce_dtype(launch: Launch, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are reduced (runtime/engine.py: sequence_parallel_size > 1)."""
    return getattr(torch, _DTYPES[launch.zero.seq_parallel_reduce]) if launch.sp > 1 else dtype


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _move(gradient: Tensor, place: Tensor) -> None:
    """Move `gradient` into `place`, a part of a buffer."""
    gradient.data = place.view_as(gradient).copy_(gradient)


@contextmanager
def on_stream(streams: Streams, stream: Any) -> Iterator[None]:
    """Issues kernels to `stream`, after those issued so far."""
    current = streams.current_stream()
    stream.wait_stream(current)
    current.wait_stream(stream)
    with streams.stream(stream):
        yield
