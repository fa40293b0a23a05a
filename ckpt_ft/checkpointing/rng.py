"""Saves and restores the random generators that a region can use: PyTorch's, Python's `random` and `numpy.random`.

A `torch.Generator` in an attribute or argument of a region is passed in and restored, too. Other generators
(`numpy.random.default_rng()`, `random.Random()`) are not: a verified step raises if a region draws from one.
"""

from __future__ import annotations

import ctypes
import random
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

_Generator = type(torch.default_generator)  # a dry run replaces `torch.Generator` by a class of its own
_RATES = ("p", "dropout", "dropout_p", "attention_dropout", "activation_dropout", "drop_prob")


class Snapshot:
    """Generator states at one moment; two snapshots are equal if nothing was drawn in between."""

    __slots__ = ("states",)

    def __init__(self, states: dict[Hashable, Any]) -> None:
        self.states = states

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and not self.moved(other).states

    def moved(self, later: Snapshot) -> Snapshot:
        """Return a snapshot of only those generators that differ in `later`."""
        return Snapshot({x: state for x, state in self.states.items() if not _same(state, later.states[x])})

    def now(self) -> Snapshot:
        return Snapshot({one: _state(one) for one in self.states})

    def restore(self) -> None:
        for generator, state in self.states.items():
            if generator == "random":
                random.setstate(state.full)
            elif generator == "numpy":
                sys.modules["numpy.random"].set_state(state.full)
            elif isinstance(generator, _Generator):
                generator.set_state(state)
            else:
                torch.get_device_module(generator).set_rng_state(state, generator)


def snapshot(*devices: torch.device, host: bool = False, own: Iterable[torch.Generator] = ()) -> Snapshot:
    """Return the states of the CPU generator (5 KiB) and of each device's (16 B on the host, so no synchronization).

    Args:
        host: include the generators of Python and numpy.
        own: generators that the region holds.
    """
    names = [name for name in HOST if name != "numpy" or "numpy.random" in sys.modules] if host else []
    others = [device for device in devices if device.type not in ("cpu", "meta")]
    return Snapshot({one: _state(one) for one in (torch.default_generator, *own, *others, *names)})


def start_from(seed: int) -> None:
    """Seed all generators, including those of Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


def has_dropout(model: nn.Module) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of diffusers, for names of its config
        rates = [getattr(module, name, None) for module in model.modules() for name in _RATES]
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _state(generator: Any) -> Any:
    """The state of a generator, of a device's default one, or of the one that has this name in `HOST`."""
    if isinstance(generator, _Generator):
        return generator.get_state()
    return HOST[generator]() if generator in HOST else torch.get_device_module(generator).get_rng_state(generator)


class _HostState:
    """The state of a host generator, and its raw memory, which makes comparisons fast."""

    __slots__ = ("full", "memory")

    def __init__(self, memory: bytes, full: Any) -> None:
        self.memory, self.full = memory, full


def _python_state() -> _HostState:
    generator: Any = random.random.__self__  # type: ignore[attr-defined]
    return _read("random", _memory(generator) + repr(generator.gauss_next).encode(), random.getstate)


def _numpy_state() -> _HostState:
    numpy = sys.modules["numpy.random"]
    generator, bits = numpy.random.__self__, numpy.get_bit_generator()
    if type(bits).__name__ == "MT19937":  # 624 words and the position
        memory = ctypes.string_at(bits.ctypes.state_address, 2500)
    else:  # replaced by np.random.set_bit_generator
        memory = repr(bits.state).encode()
    return _read("numpy", memory + _memory(generator), partial(generator.get_state, legacy=False))


def _read(name: str, memory: bytes, full: Callable[[], Any]) -> _HostState:
    if _last[name].memory != memory:
        _last[name] = _HostState(memory, full())
    return _last[name]


def _memory(generator: Any) -> bytes:
    """Read a generator's memory after the reference-counted header: 0.5 us instead of 20 to 60 for its state."""
    header = object.__basicsize__
    return ctypes.string_at(id(generator) + header, type(generator).__basicsize__ - header)


HOST = {"random": _python_state, "numpy": _numpy_state}
_last = {of: _HostState(b"", None) for of in HOST}  # the last state read, valid until the next draw


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, _HostState):
        return state.memory == other.memory
    # torch.equal is an operator: dispatch modes would see it, and FakeTensorMode would return a fake result
    return ctypes.string_at(state.data_ptr(), state.numel()) == ctypes.string_at(other.data_ptr(), other.numel())
