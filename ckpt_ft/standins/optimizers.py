"""Optimizers of other libraries in their memory layout, so that a trace needs neither these libraries nor CUDA.

`LAYOUTS` has one row for each: the tensors that it keeps for a parameter, and those that its update makes, in order.
A tensor is named by its kind:

    p       like the parameter                          f       the same shape in float32
    c       float32 for half-precision parameters, otherwise none (a cast that is no copy)
    q, 2q   8-bit blocks of 256 with float32 scales; float32 if the parameter has fewer than 4096 elements; two in one
    t8, t4, tf8   torchao's 8-bit, 4-bit (in blocks of 256; t4s: of 128) and float8 blocks, each with its own levels
    row, col      float32 means along the last axis and the one before; for a vector `row` is whole and `col` none
    res     like `row`, and none for a vector
    rows    one element for each row, in the parameter's dtype
    all     like all parameters of a group together
    low, lowf   a projected gradient of rank `RANK`, in the parameter's dtype or float32
    side, other, diag   float32 factors of a singular value decomposition, and a diagonal matrix
    basis, random, randomf   the projection: one of the factors, or random, also in float32

An update is a line of assignments: "a=p" makes a tensor and frees the one that had that name, as a variable in the
library's loop does, and "-a" frees it; "-grad" frees a half-precision gradient. The tensors have no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BLOCK, MINIMUM = 256, 4096
PAGED = 100_000  # bitsandbytes, optim/optimizer.py: get_state_buffer
RANK = 128  # of GaLore and APOLLO in transformers' Trainer
_HALF = (torch.float16, torch.bfloat16)
_BITS = {"t8": (8, 256, 256), "t4": (4, 256, 16), "t4s": (4, 128, 16), "tf8": (8, 256, 0)}  # bits, block, levels


@dataclass(frozen=True)
class Layout:
    """What an optimizer keeps and makes.

    Attributes:
        source: where its library says so.
        states: kinds of the tensors that it keeps for each parameter.
        update: what its update makes for each parameter, or each group where a kind is "all".
        cpu_states, cpu_update: the same on a CPU, where the library does it another way.
        low_states, low_update: the same for the weights of linear layers, whose gradients it projects.
        release: each gradient is used and freed as soon as the backward pass has made it ("own"), or when the next
            one is made ("next").
        paged: states of parameters with at least `PAGED` elements are in managed memory, which CUDA moves between the
            card and the host; PyTorch's allocator does not know it.
        whole_embeddings: embeddings keep float32 states (transformers/trainer.py, create_optimizer).
    """

    source: str
    states: str
    update: str = ""
    cpu_states: str | None = None
    cpu_update: str | None = None
    low_states: str = ""
    low_update: str = ""
    release: str = ""
    whole_embeddings: bool = False
    paged: bool = False


_BNB = "bitsandbytes, optim/optimizer.py: init_state; the update is one kernel"
_SVD = "u=side v=other d=diag a=lowf -d -a -u -v"  # every 200 steps, and in the first
_ADAM = "grad= denom=p norm=p"
_FACTORED = "grad= grad=c w=c s=f update=f -s update=f n=f -n"
_GALORE = Layout(
    "galore_torch, adamw.py: step; galore_projector.py", "p p", _ADAM,
    low_states="basis low low",
    low_update=f"grad= m=c {_SVD} -m grad=low denom=low norm=low full=p norm=p -full",
)  # fmt: skip
_GALORE_8BIT = Layout(
    "galore_torch, adamw8bit.py: step", "q q", "",
    low_states="basis q q", low_update=f"m=c {_SVD} -m grad=low data=low full=p back=p -full -back",
    whole_embeddings=True,
)  # fmt: skip
_GALORE_ADAFACTOR = Layout(
    "galore_torch, adafactor.py: step", "row col", _FACTORED,
    low_states="other row col",
    low_update=f"grad= grad=c {_SVD} grad=lowf w=c s=lowf update=lowf -s update=lowf full=f update=f -full n=f -n",
)  # fmt: skip
_APOLLO = Layout(
    "apollo_torch, apollo.py: step; random_projector.py", "p p", _ADAM,
    low_states="random low low",
    low_update="grad= m=c a=randomf b=randomf -a -b -m grad=low denom=low norm=low scaled=p scaled=p norm=",
)  # fmt: skip
_OPTIMI = "torch-optimi: _init_state; on a GPU its update is one Triton kernel"


def _layerwise(layout: Layout) -> Layout:
    return replace(layout, release="own")


LAYOUTS: dict[str, Layout] = {
    "adamw_8bit": Layout(_BNB, "q q", whole_embeddings=True),
    "adamw_32bit": Layout(_BNB, "f f"),
    "ademamix": Layout("bitsandbytes, optim/ademamix.py: init_state", "f f f"),
    "ademamix_8bit": Layout("bitsandbytes, optim/ademamix.py: init_state", "2q q", whole_embeddings=True),
    "lion_32bit": Layout(_BNB, "f"),
    "lion_8bit": Layout(_BNB, "q", whole_embeddings=True),
    "rmsprop_32bit": Layout(_BNB, "f"),
    "rmsprop_8bit": Layout(_BNB, "q", whole_embeddings=True),
    # Their updates are compiled.
    "adamw_torch_8bit": Layout("torchao, optim/adam.py: _new_buffer; subclass_8bit.py", "t8 t8"),
    "adamw_torch_4bit": Layout("torchao, optim/adam.py: _new_buffer; subclass_4bit.py", "t4 t4"),
    "ao_adamw_8bit": Layout("torchao, optim/adam.py: _new_buffer; subclass_8bit.py", "t8 t8"),
    "ao_adamw_4bit": Layout("torchao, optim/adam.py: AdamW4bit, block_size 128", "t4s t4s"),
    "ao_adamw_fp8": Layout("torchao, optim/adam.py: AdamWFp8; subclass_fp8.py", "tf8 tf8"),
    "galore_adamw": _GALORE,
    "galore_adamw_8bit": _GALORE_8BIT,
    "galore_adafactor": _GALORE_ADAFACTOR,
    "galore_adamw_layerwise": _layerwise(_GALORE),
    "galore_adamw_8bit_layerwise": _layerwise(_GALORE_8BIT),
    "galore_adafactor_layerwise": _layerwise(_GALORE_ADAFACTOR),
    "apollo_adamw": _APOLLO,
    "apollo_adamw_layerwise": _layerwise(_APOLLO),
    "lomo": Layout("lomo_optim, lomo.py: fuse_update", "", "g=c -grad w=c -g -w", release="next"),
    "adalomo": Layout(
        "lomo_optim, adalomo.py: fuse_update", "row col", "g=c -grad s=f update=f -s update=f w=c -g -w -update",
        release="next",
    ),
    "grokadamw": Layout(
        "grokadamw, grokadamw.py: _update_group; states are in host memory between the steps", "",
        "m=p v=p e=p s=p grok=p -s d=p -d", cpu_states="p p p", cpu_update="s=p grok=p -s d=p -d",
    ),
    "schedule_free_adamw": Layout("schedulefree, adamw_schedulefree.py: step", "p p", "denom=all"),
    "schedule_free_radam": Layout("schedulefree, radam_schedulefree.py: step", "p p", "denom=all"),
    "schedule_free_sgd": Layout("schedulefree, sgd_schedulefree.py: step", "p"),
    "stable_adamw": Layout(f"{_OPTIMI}; stableadamw.py", "p p kahan", cpu_update="a=p b=p -b m=c -m -a"),
    "optimi_adamw": Layout(f"{_OPTIMI}; adamw.py", "p p kahan", cpu_update="a=p -a"),
    "adamw_anyprecision": Layout("torchdistx, optimizers/anyprecision_optimizer.py: step", "f f", "d=f e=f -d"),
    "came": Layout(
        "came_pytorch, CAME.py: step", "f row col res col",
        "g=c s=f update=f -s update=f a=f b=f -a res=f -b approx=f update= n=f -n",
    ),
    "adam_mini": Layout("adam_mini, adam_mini.py: step", "p rows", "s=p -s update=p n=p -n"),
    "adamw_in_backward": Layout("torch's fused AdamW in hooks of gradients, as in torchtune", "p p", release="own"),
}  # fmt: skip
LAYOUTS |= {
    f"paged_{name}{'_32bit' * (name == 'ademamix')}": replace(LAYOUTS[name], paged=True)
    for name in ("adamw_8bit", "adamw_32bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit")
}


def _own(p: Tensor) -> Tensor:
    """This rank's shard of a parameter that FSDP2 divides."""
    return p.to_local() if isinstance(p, DTensor) else p


def _tensors(
    kind: str, p: Tensor, whole: bool, group: Sequence[Tensor], rank: int = RANK
) -> Iterator[tuple[Sequence[int], torch.dtype]]:
    """Shapes and dtypes of the tensors of `kind` for the parameter `p`; `whole` in place of 8-bit states."""
    shape, n = p.shape, p.numel()
    vector, half = len(shape) < 2, p.dtype in _HALF
    one: dict[str, tuple[Sequence[int], torch.dtype] | None] = {
        "p": (shape, p.dtype),
        "f": (shape, torch.float32),
        "c": (shape, torch.float32) if half else None,
        "kahan": (shape, p.dtype) if half else None,
        "row": (shape if vector else shape[:-1], torch.float32),
        "res": None if vector else (shape[:-1], torch.float32),
        "col": None if vector else ((*shape[:-2], shape[-1]), torch.float32),
        "rows": (() if vector else shape[:1], p.dtype),
    }
    if kind == "all":
        yield from ((each.shape, each.dtype) for each in group)
    elif found := one.get(kind):
        yield found
    elif kind in ("q", "2q"):
        copies = 2 if kind == "2q" else 1
        small = n < MINIMUM or whole
        yield (copies, *shape) if copies > 1 else shape, torch.float32 if small else torch.uint8
        if not small:
            yield (copies * -(-n // BLOCK),), torch.float32
    elif kind in _BITS:
        bits, block, levels = _BITS[kind]
        if n < MINIMUM or n % block:
            yield shape, p.dtype
        else:
            yield (n * bits // 8,), torch.uint8
            yield (n // block,), torch.float32
            if levels:
                yield (levels,), torch.float32
    elif kind in ("low", "lowf", "basis", "random", "randomf", "side", "other", "diag"):
        yield _projected(kind, p, rank)


def _projected(kind: str, p: Tensor, rank: int) -> tuple[Sequence[int], torch.dtype]:
    """As `_tensors`, for a matrix whose gradient is projected along its shorter axis."""
    tall = p.shape[0] >= p.shape[1]
    long, short = max(p.shape), min(p.shape)
    rank = min(rank, short)
    whole = p.dtype not in _HALF  # the basis is a view of the whole factor, which stays; in half precision a copy
    shape = {
        "low": (long, rank) if tall else (rank, long),
        "diag": (rank, rank),
        "random": (rank, short) if tall else (short, rank),
        "basis": (short if whole else rank, short),
        "side": (long, short),
        "other": (short, short),
    }[kind.removesuffix("f")]
    return shape, p.dtype if kind in ("low", "random", "basis") else torch.float32


class Tabulated(torch.optim.Optimizer):
    """Allocates what an optimizer keeps and makes, and writes as many bytes; parameters keep their values.

    Args:
        model: its trainable parameters are updated; a matrix of a linear layer is projected if the layout projects.
        targets: names or patterns of the linear layers whose gradients are projected; None for all.
        rank: the rank that they are projected to.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, on_cpu: bool = False, targets: list[str] | None = None,
        rank: int = RANK,
    ) -> None:  # fmt: skip
        from transformers.trainer_utils import check_target_module_exists

        self.layout, self.on_cpu, self.rank = layout, on_cpu, rank
        linear = {
            id(module.weight) for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and (targets is None or check_target_module_exists(targets, name))
        }  # fmt: skip
        embeddings = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
        self.whole = {id(weight) for weight in embeddings} if layout.whole_embeddings else set()
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.low = {id(p) for p in trainable if id(p) in linear} if layout.low_states else set()
        groups = [[p for p in trainable if (id(p) in self.low) is low] for low in (False, True)]
        super().__init__([{"params": group} for group in groups if group], {"lr": 1e-4})
        self.lr = 1e-4
        self.levels: list[Tensor] = []  # bitsandbytes' maps of 256 levels: of signed values, and of squares
        for p in trainable if layout.release else ():
            if layout.release == "own":
                p.register_post_accumulate_grad_hook(lambda p: self._release([p]))
            else:
                p.register_hook(lambda grad: self._release(trainable))
        if layout.release == "next":
            self.fused_backward = self._fused_backward

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Allocate missing states and write every tensor that the library's update writes."""
        loss = closure() if closure is not None else None
        held: dict[str, Any] = {}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            whole_group = "=all" in self.layout.update
            for p in params:
                self._keep(p)
                self._make(p, "" if whole_group else self._update_of(p), held)
            if whole_group and params:
                self._make(params[0], self.layout.update, held, [_own(p) for p in params])
        return loss

    def _fused_backward(self, loss: Tensor, lr: float) -> None:
        """LOMO's: the last gradient has no next one."""
        loss.backward()
        self._release([p for group in self.param_groups for p in group["params"]])

    @torch.no_grad()
    def _release(self, params: Iterable[Tensor]) -> None:
        for p in params:
            if p.grad is not None:
                self._keep(p)
                self._make(p, self._update_of(p), {})
                p.grad = None

    def _update_of(self, p: Tensor) -> str:
        if id(p) in self.low:
            return self.layout.low_update
        cpu = self.layout.cpu_update if self.on_cpu else None
        return self.layout.update if cpu is None else cpu

    def _keep(self, p: Tensor) -> None:
        """Allocate the missing states of `p`; all are written."""
        low, whole, state, p = id(p) in self.low, id(p) in self.whole, self.state[p], _own(p)
        if not state:
            kept = self.layout.cpu_states if self.on_cpu else None
            kinds = (self.layout.low_states if low else self.layout.states if kept is None else kept).split()
            small = torch.empty(_projected("low", p, self.rank)[0], device="meta") if low else p
            for number, kind in enumerate(kinds):
                like = small if kind in ("q", "2q", "row", "col") else p
                for part, (shape, dtype) in enumerate(_tensors(kind, like, whole, (), self.rank)):
                    state[f"{kind}{number}.{part}"] = made = torch.zeros(shape, dtype=dtype, device=p.device)
                    if self.layout.paged and not part and p.numel() >= PAGED:
                        made.is_paged = True  # type: ignore[attr-defined]  # bitsandbytes' mark, which a trace reads
            if not self.levels and any(value.dtype is torch.uint8 for value in state.values()) and "q" in kinds:
                self.levels += [torch.zeros(256, device=p.device) for _ in kinds[:2]]
        for value in state.values():
            value.view(torch.uint8).mul_(1) if value.dtype is torch.uint8 else value.mul_(1)

    def _make(self, p: Tensor, update: str, held: dict[str, Any], group: Sequence[Tensor] = ()) -> None:
        for token in update.split():
            name, assigns, kind = token.lstrip("-").partition("=")
            if assigns:
                held[name] = [
                    torch.zeros(shape, dtype=dtype, device=p.device)
                    for shape, dtype in _tensors(kind, _own(p), False, group, self.rank)
                ]
            elif name == "grad" and p.dtype in _HALF:
                p.grad = None
            else:
                held.pop(name, None)
        p.mul_(1)
