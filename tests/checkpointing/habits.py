"""What users' forward methods do, as small modules that tests combine into blocks, and loops that train these models.

Each habit maps [rows, WIDTH] to [rows, WIDTH]. What it does in addition (in-place writes, random draws, state) must be
handled correctly by a policy that runs it twice, drops its saved tensors or moves them to host memory.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

WIDTH, ROWS, VOCABULARY = 4, 3, 5
Given = dict[str, Any]  # what the model passes to its blocks by keyword

HABITS: dict[str, type[Habit]] = {}
outside = {"scale": 1.0}  # a global that blocks read


class Habit(nn.Module):
    reads = "step"  # the key of the value that the model passes to it

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __init_subclass__(cls) -> None:
        HABITS[cls.__name__] = cls

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        raise NotImplementedError


# --- writes in place


class InPlaceActivation(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return F.relu_(self.linear(x)) + x


class WritesItsInput(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        x.mul_(0.9)
        return x + self.linear(x)


class WritesAView(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        y = self.linear(x)
        y[:, :2].mul_(2)
        return y.tanh() + x


class UnsafeChunk(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        a, b = torch.unsafe_chunk(self.linear(x), 2, -1)
        a.sigmoid_()
        return x + torch.cat([a * b.tanh_(), a], -1)


class LSTMCell(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        h, c = self.cell(self.linear(x))
        return x + h * c


class GRUCell(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.cell(self.linear(x), x)


class WritesThroughData(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        x.data.mul_(0.5)
        return x + self.linear(x).sigmoid()


class WritesAParameter(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return x + self.linear(x)


class NormalizesAParameter(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.copy_(F.normalize(self.linear.weight, dim=0))
        return x + self.linear(x)


# --- state in attributes


class KeepsATensor(Habit):
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        y = self.linear(x if self.last is None else x + 0.1 * self.last)
        self.last = y.detach()
        return x + y.tanh()


class KeepsATensorInPlace(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.total += x.detach().mean(0)
        return x + self.linear(x) * self.total


class KeepsATuple(Habit):
    state: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        h, c = self.cell(x, self.state)
        self.state = h.detach(), c.detach()
        return x + self.linear(h)


class Counts(Habit):
    calls = 0

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.calls += 1
        return x + self.linear(x) * self.calls


class KeepsAList(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.seen.append(0.1)
        return x + self.linear(x) * sum(self.seen)


class KeepsADeque(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.deque[torch.Tensor] = collections.deque(maxlen=2)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.seen.append(x.detach().clone())
        return x + self.linear(x) * self.seen[0].mean()


class KeepsADict(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        y = self.linear(x) + self.memory.get("last", 0.0)
        self.memory["last"] = y.detach().mean()
        return x + y.sigmoid()


class KeepsAnArray(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(1)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.array += 0.1
        return x + self.linear(x) * float(self.array[0])


class KeepsArraysInADict(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.arrays = {"calls": np.zeros(1)}

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.arrays["calls"] += 0.1
        return x + self.linear(x) * float(self.arrays["calls"][0])


class StartsToKeepLater(Habit):
    calls_seen = 0

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        if given["step"] > 0:
            self.factor = getattr(self, "factor", 1.0) + 0.5
        return x + self.linear(x) * getattr(self, "factor", 1.0)


class CachesByShape(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[torch.Size, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        mask = self.masks.setdefault(x.shape, torch.ones(x.shape).tril())
        return x + self.linear(x) * mask


class MakesALayer(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH)
        return x + self.late(self.linear(x))


class MakesABuffer(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.randn(WIDTH))
        return x + self.linear(x) * self.made


# --- buffers


class CountsInABuffer(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.count.add_(1)
        return x + self.linear(x) * self.count


class RunningMean(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.linear(x - self.mean)


class BatchNorm(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return F.relu(x + self.norm(self.linear(x)))


class SpectralNorm(Habit):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(x)


# --- random numbers


class Dropout(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.drop(self.linear(self.drop(x)))


class FunctionalDropout(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + F.dropout(self.linear(x), 0.3, self.training)


class Noise(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(x * torch.randn_like(x))


class HostDraws(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(x) * random.random() * float(np.random.rand())


class OwnGenerator(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(x) * torch.rand(x.shape, generator=self.generator)


class OwnNumpyGenerator(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(x) * float(self.rng.random())


class SkipsAtRandom(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + (self.linear(x) if torch.rand(()) < 0.5 else self.linear(x).relu())


# --- norms


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class DropoutRMSNorm(RMSNorm):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().scaled(x), 0.5, self.training)


class RunningRMSNorm(RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9).add_(x.detach().pow(2).mean(), alpha=0.1)
        return x / self.scale


class NoisyLayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * draw(x)


def draw(x: torch.Tensor) -> torch.Tensor:
    return 1 + 0.1 * torch.randn_like(x)


class ScheduledLayerNorm(nn.LayerNorm):
    """Its epsilon is a global that changes between forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * outside["scale"]


class _Normed(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(F.silu(self.norm(x)))


def _normed(name: str, make: Callable[[], nn.Module]) -> None:
    def __init__(self: Any) -> None:
        _Normed.__init__(self)
        self.norm = make()

    type(name, (_Normed,), {"__init__": __init__})


_normed("WithRMSNorm", RMSNorm)
_normed("WithDropoutRMSNorm", DropoutRMSNorm)
_normed("WithRunningRMSNorm", RunningRMSNorm)
_normed("WithNoisyLayerNorm", lambda: NoisyLayerNorm(WIDTH))
_normed("WithScheduledLayerNorm", lambda: ScheduledLayerNorm(WIDTH))
_normed("WithGroupNorm", lambda: nn.GroupNorm(2, WIDTH))


# --- operators and structure


class Gated(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.act = (
            nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.down(input=torch.mul(input=self.act(self.gate(x)), other=self.up(x)))


class Attention(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        q = self.linear(x)[None, None]
        return x + F.scaled_dot_product_attention(q, q.tanh(), q)[0, 0]


class InnerCheckpoint(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        y = checkpoint(lambda x: F.dropout(self.linear(x).tanh(), 0.2), x, use_reentrant=False)
        return x + y


class Autocast(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.linear(x).float()


class StopsGradients(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        with torch.no_grad():
            y = self.linear(x)
        return x * y.sigmoid() + self.linear(x.detach())


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 * ctx.saved_tensors[0]


class OwnFunction(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + 0.1 * _Square.apply(self.linear(x).tanh())


class ComplexView(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        y = torch.view_as_complex(self.linear(x).view(-1, 2, 2).contiguous())
        return x + torch.view_as_real(y * y.conj() + y).reshape(x.shape)


class SwitchesMode(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        self.drop.train(not self.drop.training)
        return x + self.drop(self.linear(x))


class Scaled(Habit):
    """A LoRA-like scale that the model sets around its forward."""

    scale = 1.0

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(x).tanh() * self.scale


class ReadsAGlobal(Habit):
    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + (self.linear(x) * outside["scale"]).tanh()


class Hooked(Habit):
    """It has a forward hook that counts, as libraries for per-sample gradients do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.linear.register_forward_hook(lambda module, args, out: (self.calls.append(1), out * len(self.calls))[1])

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        return x + self.linear(x) * 0.1


# --- what the model passes to its blocks


@dataclass
class Record:
    value: torch.Tensor
    history: list[Any] = field(default_factory=list)


def _reads(name: str, key: str, act: Callable[[Any, torch.Tensor], Any]) -> None:
    def forward(self: Habit, x: torch.Tensor, given: Given) -> torch.Tensor:
        y = self.linear(x)
        return x + (y * act(given[key], y)).tanh()

    type(name, (Habit,), {"forward": forward, "reads": key})


def _write(tensor: torch.Tensor, by: float = 0.1) -> torch.Tensor:
    tensor.add_(by)
    return tensor.clone()


def _append(items: Any, y: torch.Tensor) -> torch.Tensor:
    items.append(y.detach())
    return sum(items)


def _set(owner: Any, y: torch.Tensor) -> torch.Tensor:
    owner.value = owner.value + 0.1 * y.detach().mean(0)
    return owner.value


def _array(array: Any, y: torch.Tensor) -> float:
    array += 0.1
    return float(array[0])


_reads("WritesATensorArgument", "tensor", lambda value, y: _write(value))
_reads("WritesInATuple", "tuple", lambda value, y: _write(value[0]))
_reads("WritesInAList", "list_of_tensors", lambda value, y: _write(value[0]))
_reads("WritesInADict", "dict", lambda value, y: _write(value["a"]))
_reads("ReplacesInADict", "dict", lambda value, y: value.update(a=value["a"] + 0.1) or value["a"])
_reads("AppendsToAList", "list", _append)
_reads("SetsInADataclass", "record", _set)
_reads("AppendsInADataclass", "record", lambda value, y: _append(value.history, y))
_reads("SetsInANamespace", "namespace", _set)
_reads("TakesFromAnIterator", "iterator", lambda value, y: next(value))
_reads("WritesAnArray", "array", _array)
_reads("DrawsFromAGenerator", "generator", lambda value, y: torch.rand(y.shape, generator=value))
_reads("ReadsLayerPast", "layer_past", lambda value, y: value)
_reads("CallsAFunction", "function", lambda value, y: value(y))

AROUND = (
    "scale around forward", "global after forward", "temporary hook", "two forwards", "attribute between forwards",
    "eval in backward", "data between blocks", "positional",
)  # fmt: skip


class Block(nn.Module):
    def __init__(self, habits: tuple[str, ...]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp(habits)

    def forward(self, x: torch.Tensor, given: Given | None = None, **named: Any) -> torch.Tensor:
        return x + self.mlp(self.norm(x), named if given is None else given)


class Mlp(nn.Module):
    def __init__(self, habits: tuple[str, ...]) -> None:
        super().__init__()
        self.habits = nn.ModuleList(HABITS[name]() for name in habits)

    def forward(self, x: torch.Tensor, given: Given) -> torch.Tensor:
        for habit in self.habits:
            x = habit(x, given)
        return x


class Model(nn.Module):
    def __init__(self, blocks: tuple[tuple[str, ...], ...], around: frozenset[str]) -> None:
        super().__init__()
        self.blocks, self.around = nn.ModuleList(Block(habits) for habits in blocks), around
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step = 0
        self.reads = {"step", *(module.reads for module in self.modules() if isinstance(module, Habit))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, x = {key: value for key, value in _given(self.step).items() if key in self.reads}, self.first(x)
        for block in self.blocks:
            x = block(x, given) if "positional" in self.around else block(x, **given)
            if "data between blocks" in self.around:
                x.data.mul_(0.9)
        return self.last(x)


# --- what a language model does with its logits before the loss; several may follow each other


def _logits(act: Callable[[HabitsForCausalLM, Any], Any]) -> Callable[[HabitsForCausalLM, Any], Any]:
    LOGITS[act.__name__.strip("_")] = act
    return act


Loss = Callable[..., torch.Tensor]
LOGITS: dict[str, Callable[[HabitsForCausalLM, Any], Any]] = {}


@_logits
def _cast(lm: HabitsForCausalLM, x: Any) -> Any:
    return x.double()


@_logits
def _scaled(lm: HabitsForCausalLM, x: Any) -> Any:
    return x / 0.5


@_logits
def _scaled_in_place(lm: HabitsForCausalLM, x: Any) -> Any:
    x *= 0.5
    return x


@_logits
def _soft_capped(lm: HabitsForCausalLM, x: Any) -> Any:
    return 2 * torch.tanh(x / 2)


@_logits
def _soft_capped_in_place(lm: HabitsForCausalLM, x: Any) -> Any:
    return x.div_(2).tanh_() * 2


@_logits
def _biased(lm: HabitsForCausalLM, x: Any) -> Any:
    return x + lm.bias


@_logits
def _scaled_by_a_parameter(lm: HabitsForCausalLM, x: Any) -> Any:
    return x * lm.scale


@_logits
def _bias_written_afterwards(lm: HabitsForCausalLM, x: Any) -> Any:
    bias = torch.linspace(-1, 1, VOCABULARY)
    y = x + bias
    bias.mul_(3)
    return y


@_logits
def _scaled_by_a_random_number(lm: HabitsForCausalLM, x: Any) -> Any:
    return x * torch.rand(())


@_logits
def _scaled_by_a_global(lm: HabitsForCausalLM, x: Any) -> Any:
    return x * outside["scale"]


@_logits
def _scaled_by_row(lm: HabitsForCausalLM, x: Any) -> Any:
    return x * torch.linspace(0.5, 1, x.shape[1])[:, None]


@_logits
def _dropped_out(lm: HabitsForCausalLM, x: Any) -> Any:
    return F.dropout(x, 0.3, lm.training)


@_logits
def _masked(lm: HabitsForCausalLM, x: Any) -> Any:
    return x.masked_fill(torch.arange(VOCABULARY) == VOCABULARY - 1, -10.0)


@_logits
def _view_written(lm: HabitsForCausalLM, x: Any) -> Any:
    view = x[:, :1]
    view.mul_(2)
    return x


@_logits
def _column_assigned(lm: HabitsForCausalLM, x: Any) -> Any:
    x[..., 0] = 0
    return x


@_logits
def _copy_of_a_part(lm: HabitsForCausalLM, x: Any) -> Any:
    first = x[:, :1].contiguous()
    x.mul_(0.5)
    return torch.cat([first, x[:, 1:]], 1)


@_logits
def _centred(lm: HabitsForCausalLM, x: Any) -> Any:
    return x - x.mean(1, keepdim=True)


@_logits
def _kept(lm: HabitsForCausalLM, x: Any) -> Any:
    lm.last_logits = x.detach()
    return x


@_logits
def _added_to_the_last(lm: HabitsForCausalLM, x: Any) -> Any:
    last, lm.last_scale = lm.last_scale, float(x.detach().abs().max()) / 10
    return x * (1 + last)


LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum") / 10,
    "each": lambda x, t: F.cross_entropy(x, t, reduction="none").square().mean(),
    "ignored": lambda x, t: F.cross_entropy(x, t, ignore_index=1),
    "weighted": lambda x, t: F.cross_entropy(input=x, target=t, weight=torch.linspace(0.5, 2, VOCABULARY)),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "soft targets": lambda x, t: F.cross_entropy(x, F.one_hot(t, VOCABULARY) * 0.5 + 0.1),
    "in two parts": lambda x, t: F.cross_entropy(x[:2], t[:2]) + 0.5 * F.cross_entropy(x[2:], t[2:]),
    "twice": lambda x, t: F.cross_entropy(x, t) + 0.5 * F.cross_entropy(x, t.flip(0)),
    "with a z-loss": lambda x, t: F.cross_entropy(x, t) + 0.01 * x.logsumexp(-1).square().mean(),
    "nll": lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
    "selected": lambda x, t: F.cross_entropy(x[t > 0], t[t > 0]),
}

LAYERS: dict[str, Callable[[], nn.Module]] = {}  # kinds of output layers


def _layer(kind: type[nn.Linear]) -> None:
    LAYERS[kind.__name__] = lambda: kind(WIDTH, VOCABULARY)


@_layer
class Linear(nn.Linear):
    pass


@_layer
class FrozenLinear(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.requires_grad_(False)


@_layer
class LinearOfAGlobal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * outside["scale"]


@_layer
class LinearWithDropout(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.3, self.training))


@_layer
class CountingLinear(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


@_layer
class CentringLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-2, keepdim=True))


@_layer
class HookedLinear(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_forward_hook(lambda module, args, out: 0.5 * out)


@dataclass(frozen=True)
class Readout:
    """The output layer of a language model, the operations on its logits, and its loss."""

    layer: str = "Linear"
    logits: tuple[str, ...] = ()
    loss: str = "mean"


class HabitsForCausalLM(PreTrainedModel):
    """A `Model` with an output layer and a loss of its logits."""

    config_class = PretrainedConfig

    def __init__(self, body: Model, readout: Readout) -> None:
        super().__init__(PretrainedConfig())
        self.body, self.readout, self.body.last = body, readout, nn.Identity()
        self.output = LAYERS[readout.layer]()
        self.bias, self.scale = nn.Parameter(torch.linspace(-1, 1, VOCABULARY)), nn.Parameter(torch.ones(()))
        self.last_scale = 0.0

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
        logits = self.output(self.body(x)[None])
        for name in self.readout.logits:
            logits = LOGITS[name](self, logits)
        return LOSSES[self.readout.loss](logits.view(-1, VOCABULARY), labels), logits


def _given(step: int) -> Given:
    ones = torch.ones(WIDTH)
    return {
        "step": step,
        "tensor": ones.clone(),
        "tuple": (ones.clone(), 1),
        "list_of_tensors": [ones.clone()],
        "dict": {"a": ones.clone()},
        "list": [],
        "record": Record(ones.clone()),
        "namespace": SimpleNamespace(value=ones.clone()),
        "iterator": iter(np.linspace(0.1, 2, 100).tolist()),
        "array": np.ones(1),
        "generator": torch.Generator().manual_seed(step),
        "layer_past": ones * 2,
        "function": torch.sigmoid,
    }


@contextlib.contextmanager
def _surroundings(model: Model) -> Iterator[None]:
    """Context around a forward that has ended when backward runs."""
    scaled = [module for module in model.modules() if isinstance(module, Scaled)]
    handles = []
    if "scale around forward" in model.around:
        for module in scaled:
            module.scale = 0.5
    if "temporary hook" in model.around:
        handles = [block.mlp.register_forward_hook(lambda m, a, out: out * 1.5) for block in model.blocks]
    yield
    for module in scaled:
        module.scale = 1.0
    for handle in handles:
        handle.remove()
    if "global after forward" in model.around:
        outside["scale"] = outside["scale"] + 0.5


def _loss(model: nn.Module) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH)
    if isinstance(model, HabitsForCausalLM):
        loss: torch.Tensor = model(x, labels=torch.arange(ROWS) % VOCABULARY)[0]
        return loss
    return model(x).square().mean()  # type: ignore[no-any-return]


def train(model: Model | HabitsForCausalLM, steps: int = 3) -> list[torch.Tensor]:
    """Returns what each step leaves: loss, gradients, buffers; then the weights and the states of all generators."""
    outside["scale"] = 1.0
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer: torch.optim.Optimizer | None = None
    found: list[torch.Tensor] = []
    body = model.body if isinstance(model, HabitsForCausalLM) else model
    for step in range(steps):
        body.step = step
        forwards = 2 if {"two forwards", "attribute between forwards"} & body.around else 1
        losses = []
        for forward in range(forwards):
            if "attribute between forwards" in body.around:
                for module in model.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.1 + 0.2 * forward
                    if isinstance(module, Scaled):
                        module.scale = 1.0 + forward
            with _surroundings(body):
                losses.append(_loss(model))
        loss = torch.stack(losses).sum()
        if "eval in backward" in body.around:
            model.eval()
        loss.backward()
        model.train()
        found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in model.buffers()]
        if optimizer is None:  # layers that the first forward makes are there now
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    found += [p.detach().clone() for p in model.parameters()]
    state = np.random.get_state()
    host = torch.tensor([*random.getstate()[1], *state[1].tolist(), state[2]], dtype=torch.float64)
    return [*found, torch.get_rng_state(), host]


def build(
    blocks: tuple[tuple[str, ...], ...], around: frozenset[str], readout: Readout | None = None
) -> Model | HabitsForCausalLM:
    torch.manual_seed(0)
    model = Model(blocks, around)
    return model if readout is None else HabitsForCausalLM(model, readout)


HABITS.pop("_Normed")
