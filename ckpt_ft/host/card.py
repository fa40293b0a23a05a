"""What a script sees of a card that is not there: `torch.cuda` and `torch.accelerator` answer as the card would.

Fakes on the card say that they are on "cuda:0" (for PyTorch's own code they are CPU tensors, whose kernels exist
everywhere). Nothing is restored: the process that shows a card to a script ends with it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from ckpt_ft.compat.distributed import local_tensor
from ckpt_ft.compat.modules import APPLY
from ckpt_ft.compat.patches import init_gpu, record_history
from ckpt_ft.compat.tensors import FakeTensor, no_dispatch, no_modes, storage_pointer, tree_map_only
from ckpt_ft.memory.distributed.streams import Streams
from ckpt_ft.memory.gpus import GPU

from .ops import ScriptTracker, on_card, swap

_CARD, _HOST = torch.device("cuda", 0), torch.device("cpu")
_CLASSES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "zeros")
_MOVES = "_ckpt_ft_moves"  # of a tensor without a shape: what is to be done when it has one
_UNKNOWN = "values that the script reads from tensors are taken as 1"


def show_tensors(tracker: ScriptTracker) -> None:
    """Make fakes readable: printing, formatting, numpy and copies, with 1 where a value is not known."""
    ops = tracker.dispatcher
    form, deep = Tensor.__format__, Tensor.__deepcopy__

    def numbers(tensor: FakeTensor) -> Any:
        known = ops.values.of(tensor)
        if known is None:
            tracker.recorder.note(_UNKNOWN)
            with no_dispatch():
                known = torch.ones(tensor.shape, dtype=tensor.dtype)
        with no_modes():
            array = known.float().numpy() if known.dtype is torch.bfloat16 else known.numpy()
        finalize(array, id, tensor)  # an array keeps the memory of its tensor
        return array

    def formatted(tensor: Tensor, spec: str) -> str:
        plain = type(tensor) is FakeTensor and tensor.dim() == 0
        return format(tensor.item(), spec) if plain else form(tensor, spec)

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if type(tensor) is not FakeTensor:
            return deep(tensor, memo)
        if id(tensor) not in memo:
            with torch.no_grad():
                new = tensor.clone()
            made = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def described(tensor: Tensor, **options: Any) -> str:
        return f"tensor(..., size={tuple(tensor.shape)})"

    def applied(module: Any, move: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves a module whose tensors may have no shapes yet: those move when they get them."""
        waiting = [one for one in (*module.parameters(False), *module.buffers(False)) if is_lazy(one)]
        for tensor in waiting:
            vars(tensor).setdefault(_MOVES, []).append(move)
        return module if waiting else getattr(nn.Module, APPLY)(module, move, recurse)

    def materialized(tensor: Any, *args: Any, **kwargs: Any) -> None:
        materialize(tensor, *args, **kwargs)
        for move in vars(tensor).pop(_MOVES, ()):
            tensor.data = move(tensor.data)

    materialize = UninitializedParameter.materialize
    _replace(LazyModuleMixin, **{APPLY: applied})
    for without_shape in (UninitializedParameter, UninitializedBuffer):
        _replace(without_shape, materialize=materialized)

    data: Any = Tensor.data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        """A fake gets the data of a fake: the other one of the two becomes a fake."""
        if (type(tensor) is FakeTensor) != (type(value) is FakeTensor):
            ops.put(value if type(tensor) is FakeTensor else tensor)
        data.__set__(tensor, value)

    _replace(Tensor, __format__=formatted, __deepcopy__=copied, data=property(data.__get__, set_data))
    _replace(
        FakeTensor,
        numpy=lambda tensor, **options: numbers(tensor),
        __array__=lambda tensor, dtype=None, copy=None: numpy.asarray(numbers(tensor), dtype),
        __repr__=described,
        __str__=described,
        data_ptr=lambda tensor: storage_pointer(tensor.untyped_storage()),  # tells tensors apart
    )
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters keep their identity on the way to a card
    torch.utils.swap_tensors = swap


def show_card(gpu: GPU, tracker: ScriptTracker, streams: Streams, count: int = 1) -> None:
    """Make this process see `count` cards such as `gpu`; it works on the first."""
    _show_devices(tracker)
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    properties = SimpleNamespace(
        name=gpu.name, total_memory=gpu.memory, major=gpu.arch[0], minor=gpu.arch[1], multi_processor_count=gpu.sms,
        warp_size=32, gcnArchName="", is_integrated=False, is_multi_gpu_board=False, L2_cache_size=gpu.l2,
        max_threads_per_multi_processor=gpu.threads, shared_memory_per_block=48 << 10,
    )  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": count, "current_device": 0,
        "is_bf16_supported": gpu.arch >= (8, 0),
        "get_device_capability": gpu.arch, "get_device_properties": properties, "get_device_name": gpu.name,
        "mem_get_info": (gpu.memory, gpu.memory), "get_rng_state": state, "get_rng_state_all": [state],
        "initial_seed": 0,
        "get_arch_list": [f"sm_{gpu.capability}"], "can_device_access_peer": False,
        "is_current_stream_capturing": False, "memory_summary": "", "memory_snapshot": [],
        "is_tf32_supported": gpu.arch >= (8, 0), "memory_stats": defaultdict(int),
    }  # fmt: skip
    quiet = (
        "init", "set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_accumulated_memory_stats", "set_per_process_memory_fraction",
    )  # fmt: skip
    counted = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization")
    _replace(torch.cuda, **dict.fromkeys(quiet, nothing))
    _replace(
        torch.cuda, **{name: _always(answer) for name, answer in {**answers, **dict.fromkeys(counted, 0)}.items()}
    )
    _replace(torch.cuda.random, **{name: getattr(torch.cuda, name) for name in torch.cuda.random.__all__})
    _replace(
        torch.cuda,
        Stream=_class_of(streams.Stream),
        Event=_class_of(streams.Event),
        stream=streams.stream,
        current_stream=streams.current_stream,
        default_stream=streams.current_stream,
        device=lambda *args: nullcontext(),
        device_of=lambda *args: nullcontext(),
    )
    nested: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    _replace(torch.cuda, memory_stats_as_nested_dict=_always(nested))
    _replace(torch.cuda.memory, **{record_history.__name__: nothing})
    _replace(sys.modules[FakeTensor.__module__], **{init_gpu.__name__: nothing})
    torch.version.cuda = torch.version.cuda or "13.0"
    accelerator: dict[str, Any] = {
        "is_available": True, "device_count": count, "current_accelerator": torch.device("cuda"),
        "current_device_index": 0, "current_device_idx": 0, "get_device_capability": {},
        "get_memory_info": (gpu.memory, gpu.memory),
        "memory_stats": defaultdict(int),
    }  # fmt: skip
    answers = {**accelerator, **dict.fromkeys(counted, 0)}
    _replace(torch.accelerator, **{name: _always(answer) for name, answer in answers.items()})
    silent = ("set_device_index", "set_device_idx", "synchronize", "empty_cache", "reset_peak_memory_stats")
    _replace(torch.accelerator, **dict.fromkeys(silent, nothing))


def _replace(owner: Any, **parts: Any) -> None:
    """Set attributes of a class or module."""
    for name, part in parts.items():
        setattr(owner, name, part)


def _class_of(make: Callable[..., Any]) -> type:
    """A class whose objects `make` makes, for annotations such as `torch.cuda.Stream | None`."""
    return type(make.__name__, (), {"__new__": lambda cls, *args, **kwargs: make(*args, **kwargs)})


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _show_devices(tracker: ScriptTracker) -> None:
    """Fakes on the card say so, and `to`, `cuda` and `cpu` move between host and card."""
    ops, recorder, plain = tracker.dispatcher, tracker.recorder, FakeTensor.device
    move, tensor_of, as_tensor, generator = Tensor.to, torch.tensor, torch.as_tensor, torch.Generator
    kind = Tensor.type

    def is_on_card(tensor: Tensor) -> bool:
        tensor = local_tensor(tensor) if type(tensor) is DTensor else tensor
        return type(tensor) is FakeTensor and not recorder.is_on_host(tensor)

    def device(tensor: FakeTensor) -> torch.device:
        if ops.depth or tensor.fake_mode.in_kernel_invocation:
            return plain.fget(tensor)  # type: ignore[attr-defined]
        return _CARD if is_on_card(tensor) else _HOST

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        flags = [value for value in args if isinstance(value, bool)]  # non_blocking, copy
        copy = kwargs.get("copy", len(flags) == 2 and flags[1])
        format = {name: value for name, value in kwargs.items() if name == "memory_format" and value is not None}
        where, dtype = None, None
        for value in (*args, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")):
            if isinstance(value, Tensor):
                where, dtype = value.device, value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif value is not None and not isinstance(value, bool):
                where = _CARD if isinstance(value, int) else torch.device(value)
        if where is None or (on_card(where) == is_on_card(tensor) and where.type != "meta"):
            return move(tensor, dtype or tensor.dtype, copy=copy, **format)
        return torch.ops.aten._to_copy(tensor, dtype=dtype, device=where, **format)

    def made(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None:
                device = data.device if isinstance(data, Tensor) else torch.empty(0).device
            with _HOST:  # and not the device of a context around
                made = make(data, *args, **kwargs)
            needs = made.requires_grad
            return to(made.detach(), device).requires_grad_(needs) if needs else to(made, device)

        return call

    def of_type(tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """`Tensor.type`: the name of a tensor's class as it was before dtypes, or a copy as such a class."""
        if isinstance(dtype, torch.dtype):
            return to(tensor, dtype)
        if dtype is None:
            name: str = kind(tensor)
            return name.replace("torch.", "torch.cuda.") if is_on_card(tensor) else name
        where, _, name = (dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}").rpartition(".")
        return to(tensor, _CARD if where == "torch.cuda" else _HOST, getattr(torch, name).dtype)

    def on_the_card(name: str) -> type:
        """A class such as `torch.cuda.FloatTensor`."""
        make = getattr(torch, name)
        return type(name, (), {"__module__": "torch.cuda", "__new__": lambda cls, *args: to(make(*args), _CARD)})

    def named(value: Any) -> Any:
        """`value`, but the card by its name: a build of torch without CUDA takes no number for a device."""
        return _CARD if type(value) is int else value

    def on_one_card(parallel: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of DataParallel: its batch goes to the card."""
        given = tree_map_only(Tensor, lambda tensor: to(tensor, _CARD), (args, kwargs))
        return parallel.module(*given[0], **given[1])

    def by_number(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            return make(*args, **kwargs) if device is None else make(*args, device=named(device), **kwargs)

        return call

    class Generator(generator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")

    _replace(
        FakeTensor,
        device=property(device),
        is_cuda=property(is_on_card),
        get_device=lambda tensor: 0 if is_on_card(tensor) else -1,
    )
    _replace(DTensor, device=property(lambda part: local_tensor(part).device), is_cuda=property(is_on_card))
    _replace(
        Tensor,
        to=to,
        type=of_type,
        cpu=lambda tensor, **kwargs: to(tensor, _HOST),
        cuda=lambda tensor, *args, **kwargs: to(tensor, _CARD),
        pin_memory=lambda tensor, *args: tensor,
        is_pinned=lambda tensor, *args: False,
        record_stream=lambda tensor, stream: None,
    )
    _replace(torch.cuda, **{f"{name}Tensor": on_the_card(f"{name}Tensor") for name in _CLASSES})
    _replace(nn.DataParallel, forward=on_one_card)
    whole = nn.Module.to
    _replace(
        nn.Module,
        cuda=lambda module, *args: module.to(_CARD),
        to=lambda module, *args, **kwargs: whole(
            module, *map(named, args), **{name: named(value) for name, value in kwargs.items()}
        ),
    )
    _replace(torch, **{name: by_number(getattr(torch, name)) for name in _MAKERS})
    _replace(torch, tensor=made(tensor_of), as_tensor=made(as_tensor), Generator=Generator)
