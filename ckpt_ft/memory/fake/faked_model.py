"""Replaces every tensor that a model holds by a fake one for the duration of a trace.

`Fakes` makes them quickly: the attributes that `FakeTensor`'s constructor sets are copied from one that it made. The
constructor takes 9 µs, mostly for values that are the same for every fake tensor of a mode on one device, and a plan
makes hundreds of thousands of fake tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ckpt_ft.compat.distributed import fsdp_states
from ckpt_ft.compat.modules import buffers_of, parameters_of
from ckpt_ft.compat.tensors import (
    FakeTensor,
    FakeTensorMode,
    accumulated_hooks,
    gradient_hooks,
    is_traceable_wrapper_subclass,
    make_subclass,
    no_dispatch,
    storage_pointer,
)
from ckpt_ft.memory.cost.op_work import plain as parts_of
from ckpt_ft.memory.rules.fake_kernels import sparse_like

from .values import attach, holds_sizes

CPU = torch.device("cpu")
_META = torch.device("meta")


class Fakes:
    """Makes the fake CPU tensors of one mode, without dispatching an op."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        with no_dispatch():
            fake = FakeTensor(mode, torch.empty(0, device=_META), CPU)
        self._attributes, self._of_parameters = dict(vars(fake)), dict(vars(nn.Parameter(fake)))

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        """A fake tensor with a storage of its own."""
        with no_dispatch():
            return self._of(torch.empty_strided(shape, stride, dtype=dtype, device=_META))

    def view(
        self, of: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> FakeTensor:
        """A fake tensor on the storage of another."""
        with no_dispatch():
            meta = torch.empty(0, dtype=dtype, device=_META)
            meta.set_(of.untyped_storage(), offset, shape, stride)
            return self._of(meta)

    def of(self, tensor: Tensor) -> Tensor:
        """A fake tensor in place of a real one, which may be a view."""
        plain = tensor.device == CPU and tensor.layout is torch.strided
        return self.mode.from_tensor(tensor) if plain else self.like(tensor)

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor of the same shape, strides and dtype, or of the same sparse parts."""
        if tensor.layout is torch.strided:
            return self.new(tensor.shape, tensor.stride(), tensor.dtype)
        parts = []
        for part in parts_of(tensor):
            room = self.new((part.untyped_storage().nbytes(),), (1,), torch.uint8)  # a coalesced tensor has more room
            parts.append(self.view(room, part.shape, part.stride(), int(part.storage_offset()), part.dtype))
        if tensor.layout is not torch.sparse_coo:  # PyTorch makes no fake of a view of one
            with no_dispatch():
                meta = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device=_META)
            tensor = self._of(meta)
        with self.mode:
            return sparse_like(tensor, *parts)

    def parameter(self, like: Tensor) -> Tensor:
        fake = self.like(like)
        fake.requires_grad_(like.requires_grad)
        vars(fake).update(self._of_parameters)
        return fake

    def _of(self, meta: Tensor) -> FakeTensor:
        fake = make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        vars(fake).update(self._attributes)
        return fake


def are_fakes(values: Sequence[Any]) -> bool:
    for value in values:  # no generator: once for every op
        if type(value) is not FakeTensor and (
            isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and not are_fakes(value))
        ):
            return False
    return True


_TORCH = frozenset(vars(nn.Module()))  # names of attributes that every module has
_CONTAINERS = (list, dict, OrderedDict, set)  # types of the containers of a module's parameters, buffers and hooks
_CACHE = type(functools.cache(lambda: None))


def fake_wrapped(tensor: Any, fakes: Fakes) -> Tensor:
    """A tensor subclass that wraps fake tensors (a quantised weight's codes and scales); for a DTensor, the whole."""
    if isinstance(tensor, DTensor):
        return fakes.like(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: fakes.like(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores the classes, attributes, hooks and FSDP2 states of the modules of `model` on exit.

    Afterwards no module holds a fake, even if a forward stored one (a cache of positions). Attributes that a failed
    step did not reset are reset, too (diffusers' scales of LoRA layers).
    """
    before = [
        (module, type(module), dict(vars(module)), _contents(module), fsdp_states.get(module))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, kind, attributes, contents, state in before:
            module.__class__ = kind
            for name, value in attributes.items():
                if type(value) is list:
                    value[:] = contents.get(name, ())
                elif type(value) in _CONTAINERS:
                    value.clear()
                    value.update(contents.get(name, ()))
            module.__dict__.clear()
            module.__dict__.update(attributes)
            fsdp_states.pop(module, None)
            if state is not None:
                fsdp_states[module] = state


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the non-empty containers of `module`, which has ten of them."""
    return {name: value.copy() for name, value in vars(module).items() if type(value) in _CONTAINERS and value}


@contextmanager
def faked_model(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """Fakes in place of every tensor that `model` holds: parameters, buffers, attributes, lists and dicts of them.

    Ties are kept. `restored` takes the fakes out again. Afterwards each tensor has the data that it had, even if a
    hook assigned to the `.data` of one that it holds itself.
    """
    made: dict[int, Tensor] = {}
    data: list[tuple[Tensor, Tensor]] = []  # of each tensor that is no subclass
    hooked: list[tuple[Tensor, Tensor]] = []  # each fake, and what it is a fake of

    def fake(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
            items = [fake(item) for item in value]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            is_parameter = isinstance(value, nn.Parameter)
            if is_traceable_wrapper_subclass(value):
                new = fake_wrapped(value, fakes)
                new = nn.Parameter(new, value.requires_grad) if is_parameter else new
            else:
                new = fakes.parameter(value) if is_parameter else fakes.like(value)
                if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
                    with no_dispatch():
                        data.append((value, value.detach()))
            if value.layout is torch.strided and value.numel() and not value.untyped_storage().nbytes():
                new.untyped_storage().resize_(0)  # its data is in host memory (swap)
            if holds_sizes(value):
                attach(new, value)
            made[id(value)] = new
            hooked.append((new, value))
        return made[id(value)]

    try:
        for module in model.modules():
            for table in _tables(module):
                for key, value in _content(table).items():
                    new = fake(value)
                    if new is not value:
                        table[key] = new
        while hooked:
            _hook(*hooked.pop(), made)
        new = value = None
        made.clear()  # only the model's own references may be left: FSDP2 frees whole parameters
        with _fresh_caches(model):
            yield
    finally:
        with no_dispatch():
            for tensor, own in data:
                if storage_pointer(tensor.untyped_storage()) != storage_pointer(own.untyped_storage()):
                    tensor.data = own


def _hook(fake: Tensor, like: Tensor, fakes: Mapping[int, Any]) -> None:
    """Give `fake` the user's gradient hooks of `like`: they may allocate tensors, or step an optimizer in backward.

    Optimizers that a hook finds by their parameter (GaLore's layerwise ones) are found by its fake. DeepSpeed's hooks
    are left out: memory/distributed/ models what they do.
    """
    for hooks, register in (
        (gradient_hooks, fake.register_hook),
        (accumulated_hooks, fake.register_post_accumulate_grad_hook),
    ):
        for hook in (hooks(like) or {}).values():
            if not getattr(getattr(hook, "func", hook), "__module__", "").startswith("deepspeed."):
                register(_of_fakes(hook, fakes))


def _of_fakes(hook: Any, fakes: Mapping[int, Any]) -> Callable[..., Any]:
    """`hook`, or a copy of it that holds optimizers of the fake parameters in place of those of the real ones."""
    held = [cell.cell_contents for cell in hook.__closure__ or ()] if isinstance(hook, FunctionType) else []
    if not any(isinstance(value, dict) and any(map(_is_optimizer, value.values())) for value in held):
        return hook
    cells = tuple(CellType(renew(value, fakes) if isinstance(value, dict) else value) for value in held)
    return FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def renew(value: Any, tensors: Mapping[int, Any]) -> Any:
    """A copy of an optimizer (or of a dict, list or tuple in one) before its first step, for other parameters.

    The copy is not constructed, because an optimizer does not keep its constructor's arguments. What it holds besides
    parameters and state is shared.

    tensors: the other parameters, by the `id` of those of `value`.
    """
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(renew(item, tensors) for item in value)
    if type(value) is dict:
        return {renew(key, tensors): renew(item, tensors) for key, item in value.items()}
    if not _is_optimizer(value):
        return value
    twin = object.__new__(type(value))
    for name, held in vars(value).items():
        if not (callable(held) and hasattr(type(value), name)):  # a scheduler's `step` calls that of `value`
            vars(twin)[name] = _first_state(value, tensors) if name == "state" else renew(held, tensors)
    for group in twin.param_groups:
        group.pop("state", None)  # GrokAdamW's
    return twin


def _first_state(optimizer: torch.optim.Optimizer, tensors: Mapping[int, Any]) -> Any:
    """The state that the constructor of an optimizer makes: none, except for a few (APOLLO's seeds)."""
    probe = nn.Parameter(torch.empty(1))
    try:
        kind: Any = type(optimizer)
        names = kind([probe]).state[probe].keys()
    except Exception:  # a constructor with other arguments
        names = {}.keys()
    state: Any = defaultdict(dict)
    for parameter, held in optimizer.state.items() if names else ():
        for name in names & held.keys():
            value = held[name]
            if isinstance(value, Tensor):  # the real one is not on the trace's device
                value = torch.zeros(value.shape, dtype=value.dtype)
            state[renew(parameter, tensors)][name] = value
    return state


def tensors_held(module: nn.Module) -> dict[tuple[int, Any, int], Tensor]:
    """The tensors that `module` itself holds besides its parameters and buffers, by their place in it."""
    found = {}
    for number, table in enumerate(_tables(module)):
        for key, value in _content(table).items() if number >= 2 else ():
            for place, item in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(item, Tensor):
                    found[number, key, place] = item
    return found


def _tables(module: nn.Module) -> Iterator[dict[Any, Any] | list[Any]]:
    """The dicts and lists in which `module` holds tensors: its own, and those in its attributes (PEFT's indices)."""
    yield from (parameters_of(module), buffers_of(module), module.__dict__)
    for name, value in list(vars(module).items()):
        if type(value) in (list, dict) and name not in _TORCH:
            yield value


def _content(table: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    return dict(table) if isinstance(table, dict) else dict(enumerate(table))


@contextmanager
def _fresh_caches(model: nn.Module) -> Iterator[None]:
    """Gives methods that cache their results (`functools.lru_cache`) an empty cache, and drops the trace's on exit.

    Qwen-Image caches rotary frequencies in this way: earlier real ones are not the step's, and fakes would outlive it.
    """
    with ExitStack() as stack:
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
            for name, method in list(vars(kind).items()):
                if _remembers(method):
                    stack.enter_context(patch.object(kind, name, functools.cache(inspect.unwrap(method))))
        yield


def _remembers(method: Any) -> bool:
    """Whether `method` is a cache, or a function around its own cache, as `lru_cache_unless_export` of diffusers."""
    around = inspect.isfunction(method) and hasattr(method, "__wrapped__")
    held = [method, *(cell.cell_contents for cell in method.__closure__ or ())] if around else [method]
    return any(isinstance(one, _CACHE) and one.__wrapped__ is inspect.unwrap(method) for one in held)
