"""Turns a module's forward, or an operator in it, into a cheap call of `pointwise`.

Stand-ins of these kinds replace `module.forward`; install.py selects the kind for each module:

- `ModuleCall`: runs a norm, an activation or a dropout as one cheap call;
- `GatedProduct`: runs the activation and product of a gated MLP in its most common form as one cheap call, which takes
  less time of the host and keeps less than two;
- `Products`: for a module whose own forward multiplies an activation with its gate (other gated MLPs, GEGLU of
  diffusers) or adds a residual after a BatchNorm (a ResNet block); each of these operators becomes a cheap call;
- `CastInput`: for a linear or convolution layer; drops autocast's half-precision copies of its input and weight;
- `ModelWithHooks` (in install.py): replaces the forward of the whole model and sets the saved-tensor hooks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ckpt_ft.checkpointing.autocast import any_autocast
from ckpt_ft.checkpointing.standin import StandIn
from ckpt_ft.checkpointing.tensor_identity import is_dtensor, version_of
from ckpt_ft.compat.autograd import transform_level
from ckpt_ft.compat.modules import BUFFERS, PARAMETERS, buffers_of, children_of, parameters_of
from ckpt_ft.compat.tensors import write_count

from .engine import CheapCall, Pass, Versioned, claim_on

# Autograd saves the result of these, not the input, so discarding the result saves memory only if the input is free.
_KEEPS_RESULT = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Threshold)
_ZERO3 = "ds_id"  # attribute of every parameter that DeepSpeed ZeRO-3 partitions

# tensors that the output depends on with their versions, the module's attributes, parameters and buffers
State = tuple[list[Versioned], dict[str, Any], dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]


class _Local(threading.local):
    running: Pass | None = None


local = _Local()


def running_pass() -> Pass | None:
    """Return the current pass; None if nothing may be discarded: no gradients, inside a cheap call, or compiled."""
    if torch.compiler.is_compiling():
        return None
    running = local.running
    return None if running is None or running.current is not None or not torch.is_grad_enabled() else running


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class ModuleCall(StandIn, CheapCall):
    """A norm, activation or dropout `module` of the model `root` as a cheap call."""

    def __init__(self, module: nn.Module, root: nn.Module) -> None:
        super().__init__(module)
        self.root, self.kind = root, type(module).__name__
        self.own = type(module).forward.__module__.startswith("torch.nn.modules.")
        self.random = isinstance(module, DROPOUTS)
        self.inplace = bool(getattr(module, "inplace", False))
        self.needs_free_input = self.random or isinstance(module, _KEEPS_RESULT)
        self.attributes: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = running_pass()
        if running is None or (self.needs_free_input and not self._gains(running, *args)):
            return self.forward(*args, **kwargs)
        return running.run(self, args, kwargs)

    def _gains(self, running: Pass, *args: Any) -> bool:
        return (self.module.training or not self.random) and bool(args) and running.is_free(args[0])

    def unread(self) -> Iterable[torch.Tensor | None]:
        """Return the statistics of a BatchNorm in train mode, which its node saves but only uses in eval mode."""
        return buffers_of(self.module).values() if self.own and self.module.training else ()

    def state(self) -> State:
        """Return the module's attributes, parameters and buffers; copy parameters that ZeRO-3 is about to free."""
        module = self.module
        if not self._unchanged():
            self.attributes = dict(module.__dict__)  # a new one, because earlier calls refer to the old
        parameters, buffers = parameters_of(module), dict(buffers_of(module))
        tensors: list[Versioned] = [(p, version_of(p)) for p in parameters.values() if p is not None]
        found = _copies(module) if tensors and hasattr(tensors[0][0], _ZERO3) else dict(parameters)
        if buffers and not (self.own and module.training):  # in training BatchNorm does not read its statistics
            tensors += [(b, version_of(b)) for b in buffers.values() if b is not None]
        return tensors, self.attributes, found, buffers

    def rerun(self, state: State, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Re-run forward with the original attributes and parameters, on buffer copies, so none is updated twice."""
        module, (tensors, attributes, found, buffers) = self.module, state
        now = parameters_of(module)
        stands = len(now) == len(found) and all(map(is_, now.values(), found.values()))
        self._check(tensors, stands)
        if attributes is self.attributes and not buffers and stands and self._unchanged():
            return self.forward(*args, **kwargs)
        there = dict(module.__dict__)
        buffers = {k: v if v is None else v.clone() for k, v in buffers.items()}
        module.__dict__.update({**attributes, PARAMETERS: found, BUFFERS: buffers})
        try:
            return self.forward(*args, **kwargs)
        finally:
            module.__dict__.clear()
            module.__dict__.update(there)

    def _unchanged(self) -> bool:
        now, known = self.module.__dict__, self.attributes
        return len(now) == len(known) and all(map(is_, now.values(), known.values()))

    def _check(self, tensors: list[Versioned], stands: bool) -> None:
        parameters = parameters_of(self.module)
        for tensor, version in tensors:
            if not stands and type(tensor) is nn.Parameter and not any(map(partial(is_, tensor), parameters.values())):
                _gather(self.module, self.root)
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a tensor of {type(self.module).__name__} was modified in place between forward and backward "
                    f"(version {write_count(tensor)}, expected {version}); 'pointwise' cannot recompute its output"
                )


def _copies(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Copy a cheap module's full parameters, which are small: hidden size, no batch dimension.

    ZeRO-3 frees them after forward, and a later module's backward needs the output before this module's own backward
    gathers them again. Gathering here would disturb the order of gathers that DeepSpeed has recorded.
    """
    return {
        name: None if p is None else nn.Parameter(p.detach().clone(), p.requires_grad)
        for name, p in parameters_of(module).items()
    }


def _gather(module: nn.Module, root: nn.Module) -> None:
    """Gather the parameters of `module` that FSDP2 has resharded: a later block's backward needs its output."""
    from torch.distributed.fsdp import FSDPModule

    owners = [m for m in root.modules() if isinstance(m, FSDPModule) and any(module is child for child in m.modules())]
    if owners:
        owners[-1].unshard()  # the innermost module; its own backward reshards them


class CastInput(StandIn):
    """A linear or convolution layer whose half-precision copies of a discarded input and of its weight are discarded.

    Autocast makes these copies. Like autocast, forward makes one per consumer; backward rebuilds one shared copy.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any_autocast() or not args or not isinstance(args[0], torch.Tensor):
            return self.forward(*args, **kwargs)
        value, *rest = args
        running, kind = running_pass(), value.device.type
        if running is None or not torch.is_autocast_enabled(kind):
            return self.forward(*args, **kwargs)
        dtype = torch.get_autocast_dtype(kind)
        claim = claim_on(value) if value.dtype is torch.float32 else None
        if claim is not None:
            value = running.cast(claim, value, dtype)
        parameters = parameters_of(self.module)
        weight = parameters.get("weight")
        if weight is None or weight.dtype is not torch.float32 or is_dtensor(weight):
            return self.forward(value, *rest, **kwargs)
        parameters["weight"] = running.cast_parameter(weight, dtype)
        try:
            return self.forward(value, *rest, **kwargs)
        finally:
            parameters["weight"] = weight


def _product_gains(running: Pass, a: Any, b: Any) -> bool:
    """Whether discarding a product saves memory: each factor is free, or is saved for the other's gradient anyway."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return (b.requires_grad or running.is_free(a)) and (a.requires_grad or running.is_free(b))


def _sum_gains(running: Pass, a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return claim_on(a) is not None and running.is_free(b)


def _activation_gains(running: Pass, a: Any, *_: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.requires_grad  # autograd saves the input


# for each: the call, its number of operands, and a test whether discarding its output saves memory
_OPERATORS: dict[Callable[..., Any], tuple[CheapCall, int, Callable[..., bool]]] = {
    torch.Tensor.mul: (CheapCall(torch.Tensor.mul), 2, _product_gains),
    torch.mul: (CheapCall(torch.mul), 2, _product_gains),
    torch.Tensor.add: (CheapCall(torch.Tensor.add), 2, _sum_gains),
    torch.Tensor.add_: (CheapCall(torch.Tensor.add_, inplace=True), 2, _sum_gains),
    F.gelu: (CheapCall(F.gelu), 1, _activation_gains),
    F.silu: (CheapCall(F.silu), 1, _activation_gains),
}


class GatedProduct(StandIn):
    """A gated MLP with forward `down(activation(gate(x)) * up(x))`; drops the product and keeps gate and up."""

    def __init__(self, module: nn.Module, names: tuple[str, str, str, str]) -> None:
        super().__init__(module)
        self.down, self.activation, self.gate, self.up = names
        (self.argument,) = inspect.signature(module.forward).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = running_pass()
        if running is None or len(args) + len(kwargs) != 1 or not (args or self.argument in kwargs):
            return self.forward(*args, **kwargs)
        value = args[0] if args else kwargs[self.argument]
        layers = children_of(self.module)
        gate, up = layers[self.gate](value), layers[self.up](value)
        return layers[self.down](running.run(_GATE, (layers[self.activation], gate, up), {}))


def _gate(activation: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return activation(gate) * up


_GATE = CheapCall(_gate)


class _Mode(TorchFunctionMode):
    def __init__(self, running: Pass) -> None:
        super().__init__()
        self.running = running

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        entry = _OPERATORS.get(func)
        running = self.running
        if (
            entry is None
            or running.current is not None
            or not torch.is_grad_enabled()
            or transform_level() is not None
        ):
            return func(*args, **kwargs)
        call, operands, gains = entry
        if len(args) < operands or kwargs.get("inplace") or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return running.run(call, args, kwargs) if gains(running, *args) else func(*args, **kwargs)


class Products(StandIn):
    """A module with operators that are cheap calls; a function mode during its forward finds them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = running_pass()
        if running is None:
            return self.forward(*args, **kwargs)
        with _Mode(running):
            return self.forward(*args, **kwargs)


ROTATION = "apply_rotary_pos_emb"
_treated: dict[FunctionType, FunctionType] = {}


def as_written(forward: Any) -> Any:
    """The function of a method without the wrapper by which transformers renames arguments; None for others."""
    function: Any = getattr(forward, "__func__", None)
    renames = getattr(function, "__globals__", {}).get("__name__") == "transformers.utils.deprecation"
    return inspect.unwrap(function) if renames else function


class RotaryAttention(StandIn):
    """An attention module with query and key norms."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = as_written(self.forward)
        if running_pass() is None or (function is not self.forward.__func__ and "past_key_values" in kwargs):  # type: ignore[attr-defined]
            return self.forward(*args, **kwargs)
        if function not in _treated:
            _treated[function] = _with_cheap_call(function)
        return MethodType(_treated[function], self.module)(*args, **kwargs)


def _with_cheap_call(function: FunctionType) -> FunctionType:
    """Return `function` that rotates by a cheap call if queries and keys are rebuilt anyway."""
    rotate = function.__globals__[ROTATION]
    call = CheapCall(rotate)

    def rotated(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        running: Pass | None = local.running
        if running is None or not (running.is_free(query) and running.is_free(key)):
            return rotate(query, key, *args, **kwargs)
        return running.run(call, (query, key, *args), kwargs)

    names = {**function.__globals__, ROTATION: rotated}
    treated = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    treated.__kwdefaults__ = function.__kwdefaults__
    return treated
