"""Deferred logits, and the output layer that the policy `head` makes return them while the model computes its loss."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ckpt_ft.compat.distributed import fsdp_group, fsdp_precision, grouped_modules
from ckpt_ft.compat.tensors import tree_map_only, write_count
from ckpt_ft.errors import WorkFailed
from ckpt_ft.units import MIB

from . import rng
from .autocast import AutocastState
from .chunks import InChunks, Weights, hooked
from .libraries import FSDP2, is_a
from .standin import warn_once
from .verify import TensorComparison


class _Local(threading.local):
    deferring = False
    instead: Callable[[torch.Tensor], torch.Tensor] | None = None  # runs instead of the next forward


local = _Local()


class Step:
    """An operation of the model on its logits, applied to some of their rows."""

    def __init__(self, function: Callable[..., torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.versions = [(x, write_count(x)) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        for tensor, version in self.versions:
            unchanged(tensor, version, f"a tensor that the logits are given to ({self.function.__name__}) was")
        return self.function(logits, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Projection:
    """Maps hidden states to logits: the layer, its autocast state, and the model's operations after it."""

    layer: OutputLayer
    autocast: AutocastState
    steps: tuple[Step, ...] = ()
    given: tuple[TensorComparison, int, torch.Tensor, rng.Snapshot] | None = None  # in a verified step: see `proof`

    def rows(
        self, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> torch.Tensor:
        """Compute logits [n, vocabulary] from hidden states [n, hidden], within `Layer.call`.

        parameters: tensors, by name, that the layer uses instead of its own parameters.
        """
        with self.autocast.context():
            logits = self.layer.rows(hidden, parameters)
        for step in self.steps:
            logits = step(logits)
        return logits

    def whole(self, hidden: torch.Tensor, version: int) -> torch.Tensor:
        """Compute all logits at once, with gradients even under `no_grad`."""
        with self.proof(), torch.enable_grad():
            return self.layer.call(self.rows, unchanged(hidden, version))

    @contextmanager
    def proof(self) -> Iterator[None]:
        """In a verified step, check that the layer computes later what it would have computed when it was called.

        Raises:
            WorkFailed: the input's bits have changed, or the layer draws random numbers and others were drawn since.
        """
        if self.given is None:
            yield
            return
        comparison, slot, hidden, drawn = self.given
        comparison.restored(slot, hidden)
        before = rng.snapshot(hidden.device)
        yield
        if before != drawn and rng.snapshot(hidden.device) != before:
            raise comparison.failed(slot, "random state: the model draws between its output layer and its loss")

    def check_rows(self, hidden: torch.Tensor) -> None:
        """Check that the layer computes each position from that position alone; within `Layer.call`.

        Raises:
            WorkFailed: a position's logits depend on other positions of its chunk, or on earlier calls.
        """
        module = self.layer.module
        draws = any(isinstance(inner, nn.Dropout) and inner.p for inner in module.modules())
        if type(module).forward is nn.Linear.forward or draws or len(hidden) < 2:
            return
        with torch.no_grad():
            both, alone = self.rows(torch.stack([hidden[0], hidden[-1]])), self.rows(hidden[:1])
            rounding = torch.finfo(both.dtype).eps ** 0.5  # of other kernels
            differs = (both[:1] - alone).abs().max() > rounding * both.abs().max()
        if differs:
            raise WorkFailed(
                f"policy 'head': {type(module).__name__}, the output layer, computes a position's logits from other "
                "positions or from earlier calls as well, so its loss cannot be computed in chunks; leave 'head' out"
            )


def unchanged(tensor: torch.Tensor, version: int, what: str = "the output layer's input was") -> torch.Tensor:
    """Return `tensor`; raises WorkFailed if it was modified in place after the model used it."""
    if write_count(tensor) != version:
        raise WorkFailed(f"policy 'head': {what} written to before the loss was computed; leave 'head' out")
    return tensor


# Size of one chunk's fp32 logits. About four such tensors are alive at once: logits, cast, log-softmax and gradient.
CHUNK_BYTES = 64 * MIB
# On a long sequence, smaller chunks would cost time on the host and in the sum of the weight's gradient, and save
# little memory beside the activations of a block.
MOST_CHUNKS = 256


def cross_entropy(
    input: Logits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute `F.cross_entropy` of deferred logits [tokens, vocabulary] in chunks, which backward recomputes.

    All chunks run within one call of the output layer, so FSDP gathers its weight once. The hidden states are split,
    not sliced, because a split has one backward node, which writes their gradient once.
    """
    loss = partial(F.cross_entropy, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if size_average is not None or reduce is not None or reduction == "none" or target.ndim != 1:
        legacy = size_average is not None or reduce is not None
        whole = input.whole(f"cross_entropy {'with size_average or reduce' if legacy else 'without a sum'}")
        return loss(whole, target, size_average=size_average, reduce=reduce, reduction=reduction)
    projection, hidden = input.projection, input.positions()
    rows = max(1, CHUNK_BYTES // (4 * input.width), -(-len(hidden) // MOST_CHUNKS))
    layer, comparison = projection.layer, projection.given and projection.given[0]

    def sum_of_chunks(hidden: torch.Tensor) -> torch.Tensor:
        if comparison is not None:
            projection.check_rows(hidden)
        if len(hidden) <= rows:
            return loss(projection.rows(hidden), target, reduction=reduction)
        weights = Weights(layer.module, projection.autocast)

        def chunk(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss(projection.rows(hidden, weights.of_chunk()), target, reduction="sum")

        losses = layer.run_chunks("head", chunk, zip(hidden.split(rows), target.split(rows), strict=True))
        weights.drop_copies()
        return torch.stack(losses).sum()

    with projection.proof():
        total = layer.call(sum_of_chunks, hidden)
    if reduction == "sum" or len(hidden) <= rows:
        return total
    counted = target != ignore_index
    return total / (counted.sum() if weight is None else (weight[target.clamp_min(0)] * counted).sum())


_ELEMENTWISE = {"add", "clamp", "div", "mul", "sub", "tanh", "true_divide"}
_CASTS = {"float", "to", "type"}  # these may return their input unchanged
_OPERATORS = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__add__": "add", "__radd__": "add"}
_OPERATORS |= {"__sub__": "sub", "__imul__": "mul_", "__itruediv__": "div_", "__iadd__": "add_", "__isub__": "sub_"}
_WHOLE = (
    "rsub", "rtruediv", "pow", "neg", "abs", "matmul", "eq", "ne", "lt", "le", "gt", "ge", "iter", "bool", "float",
    "setitem",
)  # fmt: skip
_OPERATORS |= {f"__{name}__": f"__{name}__" for name in _WHOLE}


class Logits:
    """An output layer's result that is not computed yet: it stores the input [..., hidden] of [..., vocabulary].

    It is not a tensor; operators reach it through `__torch_function__`. It has a shape, dtype and device, applies
    views and indexing of leading dimensions to its input, and records elementwise operations that are the same for
    every token. Any other operation, such as one in place, computes the logits whole, with a
    warning. Logits that would share memory with those that were then written raise WorkFailed.

    Attributes:
        tensor: the logits, once they are computed.
        computed: the tensors, with their versions, of all logits that would share memory with this one.
    """

    def __init__(
        self,
        projection: Projection,
        hidden: torch.Tensor,
        width: int,
        computed: list[tuple[torch.Tensor, int]] | None = None,
    ) -> None:
        self.projection, self.hidden, self.width = projection, hidden, width
        self.version = write_count(hidden)
        self.tensor: torch.Tensor | None = None
        self.computed = [] if computed is None else computed

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.width))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits, found by computing zero rows."""
        if self.tensor is not None:
            return self.tensor.dtype
        with torch.no_grad():
            return self.projection.layer.call(self.projection.rows, self.hidden.flatten(0, -2)[:0]).dtype

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.ndim

    def __len__(self) -> int:
        return len(self.hidden)

    def contiguous(self) -> Any:
        return self._derive(torch.Tensor.contiguous, self.hidden)

    def _reshape(self, function: Any, *shape: Any) -> Any:
        """Apply `Tensor.view` with sizes, or `Tensor.reshape`; deferred if the last dimension is unchanged."""
        sizes = shape if all(isinstance(size, int) for size in shape) else tuple(shape[0])
        if sizes[-1] == self.width:
            hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
            return self._derive(lambda logits: function(logits, sizes), hidden)
        return function(self.whole(function.__name__), sizes)

    view = partialmethod(_reshape, torch.Tensor.view)
    reshape = partialmethod(_reshape, torch.Tensor.reshape)

    def __getitem__(self, index: Any) -> Any:
        whole_rows = index[-1:] == (slice(None),) if isinstance(index, tuple) else index is not Ellipsis
        if whole_rows and self.ndim > 1:
            return self._derive(lambda logits: logits[index], self.hidden[index])
        return self.whole("indexing")[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)  # AttributeError if a tensor lacks it, too
        if callable(attribute):
            return lambda *args, **kwargs: self.__torch_function__(attribute, (), (self, *args), kwargs)
        return getattr(self.whole(name), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Logits) and first.tensor is None:
            deferred = first._defer(func, args, kwargs)
            if deferred is not None:
                return deferred
        name = getattr(func, "__name__", str(func))
        plain, named = tree_map_only(Logits, lambda logits: logits.whole(name), (args, kwargs))
        result = func(*plain, **named)
        return first if isinstance(first, Logits) and result is first.tensor else result

    def _defer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func` without computing the logits, or None if that is impossible."""
        if func is F.cross_entropy:
            return cross_entropy(*args, **kwargs) if self.ndim == 2 else None
        if not all(_same_for_all_rows(value) for value in (*args[1:], *kwargs.values())):
            return None
        rest = [value.reshape(value.shape[-1:]) if isinstance(value, torch.Tensor) else value for value in args[1:]]
        name = getattr(func, "__name__", "")
        if name in _ELEMENTWISE:
            return Logits(self._then(func, rest, kwargs), self.positions(), self.width)
        if name in _CASTS:
            return Logits(self._then(func, rest, kwargs), self.positions(), self.width, self.computed)
        return None

    def _then(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Projection:
        return replace(self.projection, steps=(*self.projection.steps, Step(function, args, kwargs)))

    def _derive(self, function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> Any:
        """Apply `function` and return a view or a copy, as `function` would for a tensor."""
        if self.tensor is not None:
            return function(self.tensor)
        self.positions()
        return Logits(self.projection, hidden, self.width, self.computed)

    def positions(self) -> torch.Tensor:
        """Return the layer's input; raise WorkFailed if it, or logits that share memory, were modified in place."""
        for tensor, version in self.computed:
            unchanged(tensor, version, "the logits were")
        return unchanged(self.hidden, self.version)

    def whole(self, reason: str) -> torch.Tensor:
        """Compute all logits as a tensor, for an operation that has no chunked form."""
        if self.tensor is None:
            warnings.warn(
                f"policy 'head': the logits are computed whole, because the model's loss calls {reason}", stacklevel=3
            )
            self.tensor = self.projection.whole(self.positions(), self.version)
            self.computed.append((self.tensor, write_count(self.tensor)))
        return self.tensor


def _same_for_all_rows(value: Any) -> bool:
    """Whether the value is a number, or a tensor over the vocabulary only (a bias)."""
    if isinstance(value, torch.Tensor):
        return value.numel() == value.shape[-1:].numel()
    return not isinstance(value, Logits)


def _operator(name: str) -> Any:
    function = getattr(torch.Tensor, name)
    return lambda self, *args: Logits.__torch_function__(function, (), (self, *args))


for _name, _function in _OPERATORS.items():
    setattr(Logits, _name, _operator(_function))
Logits.__hash__ = object.__hash__  # type: ignore[method-assign]


# -- the output layer -------------------------------------------------------------------------------------------------


class OutputLayer(InChunks):
    """The layer from hidden states to logits; it returns deferred logits while `Deferring` runs."""

    called = False  # whether the current forward pass of the model has called the layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if local.instead is not None:
            function, local.instead = local.instead, None
            return function(*args)
        if not local.deferring or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self.called = True
        given = (*args, *kwargs.values())
        reason = "it is given more than hidden states" if len(given) != 1 else _hooked(self.module)
        if reason:
            warn_once(
                f"policy 'head': the logits of {type(self.module).__name__}, the output layer, are computed whole: "
                f"{reason}"
            )
            return self.forward(*args, **kwargs)
        return self.defer(given[0])

    def defer(self, hidden: torch.Tensor) -> Logits:
        """Return deferred logits of `hidden`, which will be computed in the current autocast state."""
        autocast = AutocastState.now(hidden.device.type)
        comparison = self.verification.region(self.name, self.module) if self.verification.active else None
        given = None
        if comparison is not None:
            given = comparison, comparison.saved(hidden, "its input"), hidden, rng.snapshot(hidden.device)
        return Logits(Projection(self, autocast, _output_cast(self.module), given), hidden, _width(self.module))

    def call(self, function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> Any:
        """Return `function(hidden)`, run as the layer's forward, so that FSDP's hooks gather its weight.

        If FSDP2 groups the layer with others, its weight is still gathered, and `function` runs without hooks.
        """
        if _is_grouped(self.module):
            return function(hidden)
        local.instead = function
        try:
            return self.module(hidden)
        finally:
            local.instead = None

    def rows(self, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the layer's own forward without hooks; use `parameters` (by name) instead of its own if given."""
        return self.unhooked.run(hidden, parameters)


def _width(layer: nn.Module) -> int:
    width = getattr(layer, "out_features", None)
    return width if isinstance(width, int) else len(layer.weight)  # type: ignore[arg-type]


def _hooked(layer: nn.Module) -> str:
    """Return why the logits must be computed whole, or "": hooks on or in `layer` other than FSDP's and DeepSpeed's.

    An FSDP2 group with other modules is a reason, too, unless it stays gathered until backward, as accelerate sets
    it: FSDP2 does not gather the group again if only one of its modules is re-run.
    """
    group = fsdp_group(_fsdp_state(layer)) if _is_grouped(layer) else None
    if group is not None and group.post_forward_mesh_info:
        return "FSDP gathers it together with other modules, and drops it after forward"
    hook = hooked(layer.modules())
    return f"it has a hook ({hook})" if hook else ""


def _is_grouped(layer: nn.Module) -> bool:
    """Whether FSDP2 gathers `layer` together with other modules (`fully_shard([norm, lm_head])`)."""
    return is_a(layer, FSDP2) and len(grouped_modules(_fsdp_state(layer))) > 1


def _fsdp_state(layer: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(layer)  # type: ignore[attr-defined]


def _output_cast(layer: nn.Module) -> tuple[Step, ...]:
    """Return the cast that FSDP2 applies to the output of `layer`, as a step of a `Projection`."""
    dtype = fsdp_precision(_fsdp_state(layer)).output_dtype if is_a(layer, FSDP2) else None
    return () if dtype is None else (Step(torch.Tensor.to, [dtype], {}),)
