"""The state of the random generators that a region can draw from: PyTorch's, Python's `random` and `numpy.random`.

A generator of one's own (`torch.Generator`, `numpy.random.default_rng()`, `random.Random()`) is drawn from twice, and
so are numbers that were drawn ahead; `own_generators` names those that a model's modules hold.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_DRAWN_AHEAD = "BufferedMontecloraSampler"  # PEFT's MonteCLoRA takes the next one of its samples in each run
_RATES = ("p", "dropout", "dropout_p", "attention_dropout", "activation_dropout", "drop_prob")
_CPU = torch.device("cpu")


class Snapshot:
    """Generator states at one moment; equal when nothing was drawn in between."""

    __slots__ = ("states",)

    def __init__(self, states: dict[Hashable, Any]) -> None:
        self.states = states

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and not self.moved(other).states

    def moved(self, later: Snapshot) -> Snapshot:
        """These states of the generators that have drawn until `later`."""
        return Snapshot({of: state for of, state in self.states.items() if not _same(state, later.states[of])})

    def now(self) -> Snapshot:
        """The present states of the same generators."""
        return Snapshot({of: _HOST[of]() if of in _HOST else _torch_state(of) for of in self.states})

    def restore(self) -> None:
        """Set the generators to these states."""
        for of, state in self.states.items():
            if of == "random":
                random.setstate(state.full)
            elif of == "numpy":
                sys.modules["numpy.random"].set_state(state.full)
            elif of == _CPU:
                torch.set_rng_state(state)
            else:
                torch.get_device_module(of).set_rng_state(state, of)


def snapshot(*devices: torch.device, host: bool = False) -> Snapshot:
    """The states of the CPU's generator (5 KiB) and of the devices' (16 B, on the host: no synchronisation).

    With `host` those of Python and numpy, too.
    """
    states: dict[Hashable, Any] = {_CPU: torch.get_rng_state()}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            states[device] = _torch_state(device)
    if host:
        states |= {of: read() for of, read in _HOST.items() if of != "numpy" or "numpy.random" in sys.modules}
    return Snapshot(states)


def start_from(seed: int) -> None:
    """Set all of them, those of Python and numpy too, to what follows from `seed`."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


def has_dropout(model: nn.Module) -> bool:
    """Whether `model` drops anything out when it trains."""
    rates = (getattr(module, name, 0.0) for module in model.modules() for name in _RATES)
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _torch_state(device: Any) -> torch.Tensor:
    if device == _CPU:
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def own_generators(model: nn.Module) -> list[str]:
    """Names of the random generators that modules of `model` hold as attributes."""
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy else ()))
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, kinds) or type(value).__name__ == _DRAWN_AHEAD
    ]


class _HostState:
    """The state of a generator on the host, and the bytes of its memory by which it is told from others."""

    __slots__ = ("full", "memory")

    def __init__(self, memory: bytes, full: Any) -> None:
        self.memory, self.full = memory, full


def _python_state() -> _HostState:
    generator: Any = random._inst
    memory = _memory(generator) + repr(generator.gauss_next).encode()
    if _last["random"].memory != memory:
        _last["random"] = _HostState(memory, random.getstate())
    return _last["random"]


def _numpy_state() -> _HostState:
    generator = sys.modules["numpy.random"].mtrand._rand
    bits = generator._bit_generator
    if type(bits).__name__ == "MT19937":  # 624 words and the position
        memory = ctypes.string_at(bits.ctypes.state_address, 2500) + _memory(generator)
    else:  # np.random.set_bit_generator put another in its place
        memory = repr(bits.state).encode() + _memory(generator)
    if _last["numpy"].memory != memory:
        _last["numpy"] = _HostState(memory, generator.get_state(legacy=False))
    return _last["numpy"]


def _memory(generator: Any) -> bytes:
    """A generator's own memory, without the header that counts references: 0.5 us where its state takes 20 to 60."""
    header = object.__basicsize__
    return ctypes.string_at(id(generator) + header, type(generator).__basicsize__ - header)


_HOST = {"random": _python_state, "numpy": _numpy_state}
_last = {of: _HostState(b"", None) for of in _HOST}  # read once as long as nobody draws


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, _HostState):
        return state.memory == other.memory
    # not torch.equal: an operator would be seen by dispatch modes and turned into a fake one under FakeTensorMode
    return ctypes.string_at(state.data_ptr(), state.numel()) == ctypes.string_at(other.data_ptr(), other.numel())
