"""`swap:N`: the frozen weights of N blocks are kept in host memory; two of these blocks at a time are on the device.

The N blocks are spread evenly over the model. When one of them runs, the weights of the next one are copied to the
device on a side stream, and those of all others are freed; nothing is copied back, because the weights are frozen. In
backward a hook on the outputs of a block does the same in the other direction, before a kernel of the block or its
second run begins. (cf. block swap in kohya's sd-scripts, group offloading in diffusers)

A swapped weight keeps its parameter and its shape, but its storage has no bytes. Views that autograd has saved see
the weight again once the storage is filled, as with FSDP2's gathered parameters. Norms, biases, the constants of
quantised weights and everything that is trained stay on the device. On a CPU the copies are synchronous, so that tests
can follow them without a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ckpt_ft.compat.autograd import graph_task
from ckpt_ft.compat.compiler import uncompiled
from ckpt_ft.compat.distributed import IGNORED_BY_DDP
from ckpt_ft.compat.modules import APPLY, parameters_of
from ckpt_ft.compat.tensors import (
    FakeTensor,
    is_traceable_wrapper_subclass,
    no_subclasses,
    storage_pointer,
    tree_leaves,
    write_count,
)
from ckpt_ft.errors import UserError
from ckpt_ft.policy import IN_HOST_MEMORY, LEAST_SWAPPED, SWAPPED
from ckpt_ft.units import GIB, format_bytes

from .arguments import leaves
from .offload import CopyStream, host_tensor
from .standin import Installed, StandIn, Treated
from .tensor_identity import is_dtensor
from .verify import TensorComparison, Verification

_ALIGNED = 16  # bytes


class Arena:
    """Host memory for `left` bytes of weights, in buffers of up to 1 GiB; a weight gets the first with enough room.

    PyTorch rounds each pinned allocation up to a power of two (CachingHostAllocator): 18 MiB would take 32.

    nbytes: the bytes of all buffers allocated so far.
    """

    def __init__(self, left: int, device: torch.device) -> None:
        self.left, self.device, self.nbytes = left, device, 0
        self.rooms: list[torch.Tensor] = []  # the unused end of each buffer

    def copy(self, weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A copy of `weight` in host memory, with the shape, strides and dtype of `like`."""
        number = next((number for number, room in enumerate(self.rooms) if room.nbytes >= like.nbytes), None)
        if number is None:
            pinned = self.device.type != "cpu"
            size = max(like.nbytes, min(GIB, 1 << (self.left.bit_length() - 1) if pinned else self.left))
            self.nbytes += 1 << (size - 1).bit_length() if pinned else size
            number = len(self.rooms)
            self.rooms.append(host_tensor(torch.empty(size, dtype=torch.uint8, device="meta"), self.device))
        room, self.left = self.rooms[number], self.left - like.nbytes
        self.rooms[number] = room[-(-like.nbytes // _ALIGNED) * _ALIGNED :]
        return room[: like.nbytes].view(like.dtype).as_strided(like.size(), like.stride()).copy_(weight)


class Waiting(nn.Parameter):
    """The class of a weight and its aliases while the storage is empty; any operator on it raises an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_subclasses():
            empty = any(type(x) is cls and not x.untyped_storage().nbytes() for x in tree_leaves((args, kwargs)))
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")  # a getter or setter
            if func is torch.Tensor.__repr__:
                return f"{cls.__name__}(shape={tuple(args[0].shape)})"
            if empty and not attribute and func.__name__ not in _OF_THE_SHAPE:
                raise cls._absent(func.__name__)
            out = func(*args, **(kwargs or {}))
            if empty and type(out) is torch.Tensor and (attribute == "data" or func.__name__ == "detach"):
                out.__class__ = cls
        return out

    @staticmethod
    def _absent(read: str) -> UserError:
        return UserError(
            f"policy 'swap': {read} of a frozen weight that waits in host memory, outside of its block's forward; "
            "remove() the policy for this, or read model.state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._absent("a pickle")


_OF_THE_SHAPE = frozenset({
    "__hash__", "data_ptr", "detach", "dim", "element_size", "get_device", "is_complex",
    "is_contiguous", "is_floating_point", "is_inference", "nelement", "ndimension", "numel", "register_hook",
    "requires_grad_", "size", "storage_offset", "stride", "type", "untyped_storage",
})  # fmt: skip


def _fill(parameter: nn.Parameter, nbytes: int) -> None:
    if type(parameter) is Waiting:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.untyped_storage().resize_(nbytes)


def _empty(parameter: nn.Parameter) -> None:
    parameter.untyped_storage().resize_(0)
    if type(parameter) is nn.Parameter:  # not a class of a library or of a trace
        parameter.__class__ = Waiting


class Swapper:
    """The swapped blocks of one model, in order.

    Args:
        model: its attribute `IN_HOST_MEMORY` is set to the weights in host memory by name, for a trace.
        blocks: for each swapped block, its module and the names in `model` of its swapped weights.

        A weight is found through its layer, whose name may change (an adapter around it). If another tensor has
        replaced the weight in the layer, that tensor stays on the device.
    """

    def __init__(self, model: nn.Module, blocks: list[tuple[nn.Module, list[str]]]) -> None:
        self.model, self.blocks = model, [block for block, _ in blocks]
        self.places = [{name: _place(model, name) for name in names} for _, names in blocks]
        self.proved = 0  # the last step that was verified
        self.last = 0  # number of the block that was used last
        self.present: set[int] = set()
        self.running: set[int] = set()  # blocks whose forward is running in this thread
        self.thread = 0
        self.copies: CopyStream | None = None
        self.copied: dict[int, tuple[CopyStream, Any]] = {}  # a block's copy stream, and its last event

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copies": None, "copied": {}}  # streams and events cannot be copied

    @property
    def waiting(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.model.__dict__[IN_HOST_MEMORY]
        return found

    def begin(self) -> None:
        """Move the weights to host memory, except those of the first block, which is the last one in a backward."""
        found = [layer.get_parameter(key) for places in self.places for layer, key in places.values()]
        self.arena = Arena(sum(p.nbytes for p in found), found[0].device)
        self.model.__dict__[IN_HOST_MEMORY] = {}
        self.present, self.last = set(range(len(self.blocks))), 0
        for number in self.present:
            self.adopt(number)
        for number in range(1, len(self.blocks)):
            self.drop(number)

    def adopt(self, number: int) -> None:
        """Copy the weights of a block that have no copy in host memory yet, and mark them."""
        for name, (layer, key) in self.places[number].items():
            parameter = parameters_of(layer).get(key)
            if not isinstance(parameter, nn.Parameter) or hasattr(parameter, SWAPPED) or not _can_wait(parameter):
                continue
            self.waiting[name] = self.arena.copy(parameter.detach(), parameter)
            if not (parameter.is_meta or isinstance(parameter, FakeTensor)):
                # a new storage: the old one may be mapped from a file, or a state dict may share it
                parameter.data = self.waiting[name].to(parameter.device, copy=True)
            _note_copied(parameter)

    def end(self) -> None:
        for number in range(len(self.blocks)):
            self.fetch(number)
            self.wait(number)
            for name, parameter in list(self.weights(number)):
                self._forget(name, parameter)
        del self.model.__dict__[IN_HOST_MEMORY], self.arena

    def use(self, number: int, step: int = 1) -> None:
        """Bring a block's weights to the device, start copying those of the next block, and free all others.

        step: 1 in the order of a forward, -1 in that of a backward.
        """
        following = number + step
        for other in self.present - {number, following}:
            self.drop(other)
        self.fetch(number)
        self.wait(number)
        if 0 <= following < len(self.blocks):
            self.fetch(following)
        self.last = number

    def fetch(self, number: int) -> None:
        """Start the copies of a block's weights to the device."""
        missing = [(name, p) for name, p in self.weights(number) if not p.untyped_storage().nbytes()]
        self.present.add(number)
        for name, parameter in missing:  # on the current stream, which also frees them
            _fill(parameter, self.waiting[name].nbytes)
        if not missing:
            return
        if self.copies is None or self.copies.streams is not CopyStream.of(missing[0][1]):
            self.copies = CopyStream(missing[0][1])
        # `.data` has a separate version counter, so the weight's own does not change
        ended = self.copies.start(*((parameter.data, self.waiting[name]) for name, parameter in missing))
        self.copied[number] = self.copies, ended

    def wait(self, number: int) -> None:
        """Make the current stream wait for the copies of a block."""
        copies, ended = self.copied.pop(number, (None, None))
        if copies is not None:
            copies.wait(ended)

    def stay(self, number: int, layer: nn.Module, args: Any = None) -> None:
        """Pre-hook of a layer that has swapped weights: outside of its block's forward, they stay on the device.

        Diffusers' DiT computes with an embedding of its first block behind the last one.
        """
        if number in self.running or graph_task() >= 0:
            return
        own = {id(parameter) for parameter in parameters_of(layer).values()}
        for name, parameter in list(self.weights(number)):
            if id(parameter) in own:
                self.wait(number)
                if not parameter.untyped_storage().nbytes():
                    _fill(parameter, self.waiting[name].nbytes)
                    parameter.data.copy_(self.waiting[name])
                self._forget(name, parameter)

    def _forget(self, name: str, parameter: nn.Parameter) -> None:
        """Note that a weight stays on the device from now on."""
        del self.waiting[name]
        vars(parameter).pop(SWAPPED, None)

    def drop(self, number: int) -> None:
        self.wait(number)
        self.present.discard(number)
        for name, parameter in self.weights(number):
            if parameter.requires_grad:
                raise UserError("policy 'swap': a weight that waits in host memory is to be trained; freeze it again")
            self._keep_written(name, parameter)
            _empty(parameter)

    def _keep_written(self, name: str, parameter: nn.Parameter) -> None:
        """Copy to the host what was written into a weight on the device, or what was assigned to its `.data`."""
        if not parameter.untyped_storage().nbytes() or vars(parameter).get(SWAPPED) in (None, _written(parameter)):
            return
        host = self.waiting[name]
        if (host.dtype, host.shape, host.stride()) == (parameter.dtype, parameter.shape, parameter.stride()):
            host.copy_(parameter.detach())
        else:
            self.waiting[name] = self.arena.copy(parameter.detach(), parameter)
        _note_copied(parameter)

    def prove(self, verification: Verification) -> None:
        """Compare the weights that are on the device with their copies in host memory, once in a verified step."""
        if self.proved == verification.steps:
            return
        self.proved = verification.steps
        comparison = TensorComparison(verification, "", type(self.model).__name__)
        for number in sorted(self.present):
            self.wait(number)
            for name, parameter in self.weights(number):
                self._keep_written(name, parameter)
                what = f"the frozen weight '{name}', written through .data since it came from host memory"
                comparison.restored(comparison.saved(self.waiting[name], what), parameter)

    def move(self, number: int, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """`nn.Module._apply` of a block, for `.to()` and `.half()`: weights in host memory are converted there."""
        block, weights = self.blocks[number], list(self.weights(number))
        there = {id(parameter) for _, parameter in weights}
        own = [
            (inner, key, p) for inner in block.modules() for key, p in parameters_of(inner).items() if id(p) in there
        ]
        try:
            for inner, key, _ in own:
                parameters_of(inner)[key] = None
            getattr(type(block), APPLY)(block, fn, recurse)
        finally:
            for inner, key, parameter in own:
                parameters_of(inner)[key] = parameter
        for name, parameter in weights:
            self._keep_written(name, parameter)
            host = self.waiting[name]
            made = fn(torch.empty(0, dtype=host.dtype, device=parameter.device))
            if (made.device, made.dtype) != (parameter.device, host.dtype):
                _fill(parameter, 0)
                size, stride = parameter.size(), parameter.stride()
                parameter.data = torch.empty_strided(size, stride, dtype=made.dtype, device=made.device)
                _note_copied(parameter)
                self.drop(number)
                if self.arena.device != made.device:
                    self.arena = Arena(sum(one.nbytes for one in self.waiting.values()), made.device)
                self.waiting[name] = self.arena.copy(host, parameter)
        return block

    def as_saved(self, number: int, block: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """State-dict hook of a block: replaces weights without memory by their copies in host memory."""
        paths = {layer: f"{prefix}{path}." if path else prefix for path, layer in block.named_modules()}
        for name, parameter in self.weights(number):
            self._keep_written(name, parameter)
            layer, key = self.places[number][name]
            if (path := f"{paths.get(layer, '')}{key}") in state:
                state[path] = self.waiting[name]

    def before_load(self, number: int, block: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        """Pre-hook of `load_state_dict`: moves the weights to the device."""
        if any(key.startswith(prefix) for key in state):
            self.fetch(number)
            self.wait(number)

    def after_load(self, number: int, *_: Any) -> None:
        """Post-hook of `load_state_dict`: copies the new weights to host memory (`assign=True`)."""
        if number in self.present:
            for name, parameter in self.weights(number):
                self._keep_written(name, parameter)
            self.adopt(number)

    def weights(self, number: int) -> Iterator[tuple[str, nn.Parameter]]:
        """The current swapped weights of a block, by name; in a trace they are fake tensors."""
        waiting = self.waiting
        for name, (layer, key) in self.places[number].items():
            parameter = parameters_of(layer).get(key)
            if name in waiting and (isinstance(parameter, FakeTensor) or hasattr(parameter, SWAPPED)):
                yield name, parameter


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _written(parameter: nn.Parameter) -> tuple[int, int]:
    """A value that changes with a write into a weight (except through `.data`) and with an assignment to `.data`."""
    return write_count(parameter), storage_pointer(parameter.untyped_storage())


def _note_copied(parameter: nn.Parameter) -> None:
    """Mark a weight as swapped, with the values of its copy in host memory."""
    vars(parameter)[SWAPPED] = _written(parameter)


@uncompiled  # dynamo of torch 2.11 fails where it traces a raise
def _refuse_compiled() -> None:
    raise UserError("policy 'swap' and torch.compile: compiled code cannot wait for weights; drop one of them")


class SwappedBlock(StandIn):
    def __init__(self, module: nn.Module, swapper: Swapper, number: int) -> None:
        self.swapper, self.number = swapper, number
        self.handles: list[Any] = []
        super().__init__(module)

    def _put_on(self) -> None:
        super()._put_on()
        swapper, number, module = self.swapper, self.number, self.module
        module.__dict__[SWAPPED] = self  # found there by code that runs the block again
        vars(module)[APPLY] = partial(swapper.move, number)
        self.handles = [
            module.register_state_dict_post_hook(partial(swapper.as_saved, number)),
            module.register_load_state_dict_pre_hook(partial(swapper.before_load, number)),
            module.register_load_state_dict_post_hook(partial(swapper.after_load, number)),
            *(inner.register_forward_pre_hook(partial(swapper.stay, number)) for inner in module.modules()
              if any(hasattr(p, SWAPPED) for p in parameters_of(inner).values())),
        ]  # fmt: skip

    def remove(self) -> None:
        del self.module.__dict__[SWAPPED], self.module.__dict__[APPLY]
        for handle in self.handles:
            handle.remove()
        super().remove()  # last: it changes the class if another library has wrapped this

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse_compiled()
        swapper, number, grad = self.swapper, self.number, torch.is_grad_enabled()
        if swapper.running and swapper.thread != get_ident():
            raise UserError(
                "policy 'swap': two threads run the model at once, and its weights are there for one of them"
            )
        swapper.thread = get_ident()
        if grad and self.verification.active:
            swapper.prove(self.verification)
        in_backward = graph_task() >= 0  # a second run; that of `stages` goes through it forward
        swapper.use(number, -1 if in_backward and swapper.last >= number else 1)
        given = {id(x): x.grad_fn for x in (*leaves(args), *leaves(kwargs)) if isinstance(x, torch.Tensor)}
        swapper.running.add(number)
        try:
            out = self.forward(*args, **kwargs)
        finally:
            swapper.running.discard(number)
        found = [leaf for leaf in leaves(out) if isinstance(leaf, torch.Tensor)] if grad else ()
        if grad and not found:
            raise UserError(
                f"policy 'swap': a {type(self.module).__name__} returns no tensor in a tuple, list, dict or "
                f"dataclass, so that nothing tells when its backward begins: {type(out).__name__}; leave 'swap' out"
            )
        for leaf in found:
            if leaf.requires_grad and given.get(id(leaf), leaf) is not leaf.grad_fn:  # not an input, unchanged
                leaf.register_hook(self.before_backward)
        return out

    def before_backward(self, _: torch.Tensor) -> None:
        if IN_HOST_MEMORY in self.swapper.model.__dict__:  # the policy is still on
            self.swapper.use(self.number, -1)


class _Installed(Installed):
    """The engine: while it is removed, all weights are on the device."""

    swapper: Swapper

    def remove(self) -> None:
        super().remove()
        self.swapper.end()
        self.swapper.model.__dict__.pop(IGNORED_BY_DDP, None)

    def put_back(self) -> None:
        self.swapper.begin()
        setattr(self.swapper.model, IGNORED_BY_DDP, list(self.swapper.waiting))
        super().put_back()


def install(model: nn.Module, blocks: Mapping[str, nn.Module], count: int) -> Installed:
    """Keep the frozen weights of `count` of the `blocks` in host memory.

    Raises:
        UserError: weights are sharded, or fewer than `count` blocks have frozen weights.
    """
    if any(is_dtensor(parameter) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError("policy 'swap': FSDP2, DeepSpeed ZeRO-3 and tensor parallelism place the weights themselves")
    able = swappable(model, blocks)
    if len(able) < count:
        few = f"swap takes {LEAST_SWAPPED} or more, and none that are trained or of torchao: train adapters (LoRA)"
        fix = f"give at most swap:{len(able)}" if len(able) >= LEAST_SWAPPED else few
        raise UserError(
            f"policy 'swap:{count}': {type(model).__name__} has {len(able)} blocks with frozen weight matrices (of "
            f"{len(blocks)}); {fix}"
        )
    listed = list(able.items())
    chosen = [listed[number * len(listed) // count] for number in range(count)]
    swapper = Swapper(model, chosen)
    swapper.begin()
    nbytes = sum(host.nbytes for host in swapper.waiting.values())
    row = Treated(type(chosen[0][0]).__name__, count, f"frozen weights, {format_bytes(nbytes)}", "in host memory")
    stand_ins = [SwappedBlock(block, swapper, number) for number, (block, _) in enumerate(chosen)]
    installed = _Installed("swap", stand_ins, [row])
    installed.swapper = swapper
    setattr(model, IGNORED_BY_DDP, list(swapper.waiting))
    return installed


def swappable(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[nn.Module, list[str]]:
    """The blocks with frozen weight matrices of their own, each with the names of these weights in `model`."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    able: dict[nn.Module, list[str]] = {}
    for prefix, block in blocks.items():
        names = [f"{prefix}.{name}" for name, p in block.named_parameters() if uses[id(p)] == 1 and _can_wait(p)]
        if names:
            able.setdefault(block, names)
    return able


def _can_wait(parameter: nn.Parameter) -> bool:
    """Whether it is a frozen matrix with its own storage. `pointwise` reads the vectors of norms in other blocks."""
    if parameter.requires_grad or parameter.dim() < 2 or is_traceable_wrapper_subclass(parameter):
        return False
    return parameter.layout is torch.strided and parameter.untyped_storage().nbytes() == parameter.nbytes
