"""Fixed assumptions for ops whose result depends on data that a trace does not have.

If a step asks a fake tensor for a value that is not known (values.py), one of these assumptions answers:
- Indices (topk, argmax, max, sort, one_hot) are spread evenly over their classes: each expert receives
  tokens * top_k / experts tokens.
- Other masks are full if their size decides a shape (nonzero, boolean indexing): the worst case.
- No value is NaN: any(), == and is-NaN are False, all() is True, and a GradScaler finds no infinity. any() of a mask
  that was made from indices is True.
- torch.equal() of tensors of one shape is True.
- A number drawn from 0..1 is 0.5, so that LayerDrop drops no layer. Any other number that is read is 1; an index, or a
  number drawn by randint, is 0.
Each case that was used is named in StepTrace.notes. Constants (`torch.tensor(3)`) keep their values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.compat.tensors import FakeTensor, no_dispatch, no_modes, storage_pointer
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.memory.rules.fake_kernels import coalesced

from .values import Values, attach

aten = torch.ops.aten

_EVENLY = "indices fall evenly on their classes: experts see equal numbers of tokens"
_CLEAN = "a condition on data is taken as in a clean batch: nothing is NaN or left out"
_NEGATIVE = ("aten.any", "aten.isnan", "aten.isinf", "aten.eq", "aten.ne", "aten.logical_not")
_INDEX_MAKERS = {  # the index of the argument that is the dimension, and its default (None: all dimensions)
    aten.topk.default: (2, -1), aten.sort.default: (1, -1), aten.argsort.default: (1, -1), aten.sort.stable: (1, -1),
    aten.argmax.default: (1, None), aten.max.dim: (1, None), aten.min.dim: (1, None),
}  # fmt: skip
_CARRIERS = {
    aten.any.default, aten.any.dim, aten.gt.Scalar, aten.clone.default, aten._to_copy.default, aten.index.Tensor,
    aten.index_select.default, aten.gather.default, aten.cat.default,
}  # fmt: skip


@dataclass
class _Known:
    """Known of a storage: its values are indices below `classes`, or a share `density` of them is not zero."""

    storage: weakref.ref[Any]
    classes: int = 0
    density: float = 1.0
    hit: float = 1.0  # for a mask made by comparing indices with every class: the share of classes that occur
    total: int = 0  # for counts of a mask: their sum


class DataDependentOps:
    """Answers ops whose result depends on data; follows where indices and masks come from."""

    def __init__(self, recorder: Recorder, values: Values) -> None:
        self.recorder, self.values = recorder, values
        self._known: dict[int, _Known] = {}
        guesses: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten.is_nonzero.default: self._item,
            aten.equal.default: self._equal,
            aten.nonzero.default: self._nonzero,
            aten.masked_select.default: self._masked_select,
            aten.index.Tensor: self._index,
            aten.bincount.default: self._bincount,
            aten.repeat_interleave.Tensor: self._repeat_interleave,
            aten._unique2.default: self._unique,
            aten.unique_consecutive.default: self._unique,
            aten._coalesce.default: self._coalesce,
            aten._ctc_loss.Tensor: self._ctc_loss,
            aten._pack_padded_sequence.default: self._pack_padded_sequence,
        }
        self.answers = {func: partial(values.exactly, guess) for func, guess in guesses.items()}
        self.observers: dict[Any, Callable[[tuple[Any, ...], Any], None]] = {
            **dict.fromkeys(_CARRIERS, self._see_carried),
            **{func: partial(self._see_indices, *dim) for func, dim in _INDEX_MAKERS.items()},
            **dict.fromkeys((aten.scatter_.value, aten.scatter.value), self._see_scattered),
            **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), self._see_compared),
            aten.sum.dim_IntList: self._see_counted,
            aten.scatter_add_.default: partial(self._see_tallied, 2),
            aten.histc.default: partial(self._see_tallied, 0),
            torch.ops.c10d.alltoall_base_.default: self._see_exchanged,
            aten.rand.default: self._see_random,
            aten._amp_foreach_non_finite_check_and_unscale_.default: self._see_unscaled,
        }

    # -- observers, called with (args, result): they learn where indices and masks come from ------------------------

    def _see_random(self, args: tuple[Any, ...], out: Any) -> None:
        if out.numel() == 1:
            self.values.set(out, 0.5)
            self.recorder.note("a random number is taken as 0.5: no layer is left out at random")

    def _see_unscaled(self, args: tuple[Any, ...], out: Any) -> None:
        """A GradScaler's (gradients, found_inf, 1 / scale)."""
        self.values.set(args[1], 0.0)
        self.recorder.note(_CLEAN)

    def _see_indices(self, at: int, usual: int | None, args: tuple[Any, ...], out: Any) -> None:
        dim = args[at] if len(args) > at else usual
        indices = out if isinstance(out, Tensor) else out[1]
        self._learn(indices, classes=args[0].size(dim) if args[0].dim() and dim is not None else args[0].numel())
        if indices is not out:
            self._see_carried(args, out[0])  # indices that are sorted are indices

    def _see_scattered(self, args: tuple[Any, ...], out: Any) -> None:
        self._learn(out, density=min(args[2].size(args[1]) / out.size(args[1]), 1.0))

    def _see_compared(self, args: tuple[Any, ...], out: Any) -> None:
        known = next((k for k in map(self._of, args) if k is not None and k.classes), None)
        if known is not None:
            compared = args[1].numel() if isinstance(args[1], Tensor) and args[1].dim() == 1 else known.classes
            self._learn(out, density=1 / known.classes, hit=min(known.classes / compared, 1.0))

    def _see_counted(self, args: tuple[Any, ...], out: Any) -> None:
        known = self._of(args[0])
        if known is not None:
            total = known.total or round(known.density * args[0].numel())
            self._learn(out, density=known.hit, hit=known.hit, total=total)

    def _see_tallied(self, at: int, args: tuple[Any, ...], out: Any) -> None:
        """Counts of indices: a one is added for each, or transformers makes the bounds of experts' tokens of them."""
        known = self._of(args[at])
        if known is not None and known.classes and out.dim() == 1:
            self.recorder.note(_EVENLY)
            total = args[at].numel() * min(out.numel(), known.classes) // known.classes
            with no_modes():
                bounds = torch.arange(out.numel() + 1) * total // out.numel()
                attach(out, bounds.diff().to(out.dtype))

    def _see_exchanged(self, args: tuple[Any, ...], out: Any) -> None:
        """Observe ranks that exchange counts: each receives as many as it sends."""
        sent = self.values.of(args[1])
        if sent is not None and args[0].shape == args[1].shape:
            attach(args[0], sent)

    def _see_carried(self, args: tuple[Any, ...], out: Any) -> None:
        known = self._of(args[0][0] if isinstance(args[0], (list, tuple)) else args[0])
        if known is not None:
            self._learn(out, known.classes, known.density, known.hit)

    def _of(self, tensor: Any) -> _Known | None:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage_pointer(storage))
        return known if known is not None and known.storage() is storage else None

    def _learn(self, tensor: Tensor, classes: int = 0, density: float = 1.0, hit: float = 1.0, total: int = 0) -> None:
        storage = tensor.untyped_storage()
        self._known[storage_pointer(storage)] = _Known(weakref.ref(storage), classes, density, hit, total)

    # -- answers: (op, args, kwargs) -> result ------------------------------------------------------------------------

    def _item(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if type(tensor) is not FakeTensor:
            return func(*args, **kwargs)
        if tensor.constant is not None:  # an optimizer reads a step count for each parameter
            with no_dispatch():
                return tensor.constant.item()
        known = self._of(tensor)
        made_by = self.recorder.made_by(tensor)
        if tensor.dtype == torch.bool:
            self.recorder.note(_CLEAN)
            return not made_by.startswith(_NEGATIVE) or (made_by.startswith("aten.any") and known is not None)
        if known is not None and known.total:
            return self._share(tensor, known.total)
        if (known is not None and known.classes) or made_by.startswith("aten.randint"):
            return 0
        self.recorder.note("a number read from a tensor (.item()) is taken to be 1")
        return 1.0 if tensor.is_floating_point() else 1

    def _share(self, tensor: Tensor, total: int) -> int:
        """One of the counts that add up to a total, each as large as the others or one less."""
        self.recorder.note(_EVENLY)
        counts, at = tensor.untyped_storage().nbytes() // tensor.itemsize, int(tensor.storage_offset())
        return (at + 1) * total // counts - at * total // counts

    def _equal(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if args[0].shape != args[1].shape:
            return False
        self.recorder.note("torch.equal() is taken to find tensors of one shape equal")
        return True

    def _count(self, mask: Tensor) -> int:
        if (exact := self.values.count(mask)) is not None:
            return exact
        known = self._of(mask)
        if known is not None and known.density < 1:
            self.recorder.note(_EVENLY)
            return max(round(mask.numel() * known.density), 1)
        self.recorder.note("a mask whose size decides a shape is taken as full: the worst case")
        return mask.numel()

    def _nonzero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        mask = args[0]
        out = torch.empty(max(mask.dim(), 1), self._count(mask), dtype=torch.int64, device="cpu").t()
        self._learn(out, classes=max(mask.shape, default=1))
        return out

    def _masked_select(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        times = torch.broadcast_shapes(args[0].shape, args[1].shape).numel() // max(args[1].numel(), 1)
        return torch.empty(self._count(args[1]) * times, dtype=args[0].dtype, device="cpu")

    def _index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        values, indices = args
        if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return func(*args, **kwargs)
        plain: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                count = self._count(index)
                plain += [torch.empty(count, dtype=torch.int64, device="cpu") for _ in range(index.dim())]
            else:
                plain.append(index)
        return func(values, plain)

    def _bincount(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        weights = args[1] if len(args) > 1 else kwargs.get("weights")
        known = self._of(args[0])
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        dtype = torch.int64 if weights is None else weights.dtype
        return torch.empty(max(least, known.classes if known else 1), dtype=dtype, device="cpu")

    def _repeat_interleave(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        size = kwargs.get("output_size")
        if size is None:
            self.recorder.note("repeat_interleave with counts in a tensor is taken to repeat each row once")
        return torch.empty(args[0].numel() if size is None else size, dtype=args[0].dtype, device="cpu")

    def _unique(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        self.recorder.note("unique() is taken to find every value different: the worst case")
        values = args[0].flatten()
        indices = torch.empty(values.numel(), dtype=torch.int64, device="cpu")
        return torch.empty_like(values), indices, torch.empty_like(indices)

    def _coalesce(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self.recorder.note("the indices of a sparse tensor are taken to be all different: the worst case")
        return coalesced(args[0])

    def _pack_padded_sequence(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The tokens of all rows, and how many rows each step has: a tensor of the host, which LSTMs read."""
        padded, lengths, batch_first = args
        known = self.values.numbers(lengths) if isinstance(lengths, FakeTensor) else lengths.tolist()
        if known is None:
            self.recorder.note("packed rows whose lengths are not known are taken as long as the longest")
            known = [padded.size(int(batch_first))] * padded.size(int(not batch_first))
        with no_modes():
            rows = torch.tensor([sum(length > step for length in known) for step in range(max(known))])
        return torch.empty(sum(known), *padded.shape[2:], dtype=padded.dtype, device="cpu"), rows

    def _ctc_loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The loss, and what it keeps for every place in the longest target. [aten/src/ATen/native/LossCTC.cpp]"""
        (steps, batch, _), targets, lengths = args[0].shape, args[1], args[3]
        known = self.values.numbers(lengths)
        longest = targets.size(-1) if known is None else max(known)
        empty = partial(torch.empty, dtype=args[0].dtype, device="cpu")
        return empty(batch), empty(batch, steps, 2 * longest + 1)
