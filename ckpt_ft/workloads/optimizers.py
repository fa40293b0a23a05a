"""Creates the optimizer of a spec by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpt_ft.checkpointing.offload import CopyStream
from ckpt_ft.compat.tensors import FakeTensor
from ckpt_ft.standins.optimizers import LAYOUTS, MINIMUM, RANK, Tabulated
from ckpt_ft.validation import require_package

_OF_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "adamw": torch.optim.AdamW,
}  # fmt: skip
_EMA_DECAY = 0.9999  # default of EMAModel


def optimizer_maker(
    name: str, ema: bool = False, model: nn.Module | None = None, device: str = "", targets: str = "", rank: int = RANK
) -> Callable[[nn.Module], Any] | None:
    """Returns a function that creates the optimizer `name` for a model's trainable parameters; None for "none".

    Args:
        ema: whether a moving average of the weights is updated after each step.
        model: the model with its weights, for Prodigy, which keeps no copy of parameters that are initially zero.
        targets: names or patterns of the linear layers whose gradients GaLore and APOLLO project, with commas; "" for
            all.
        rank: the rank that they project to.

    Raises:
        UserError: its package is not installed.
    """
    if name == "none":
        return None
    make: Callable[[nn.Module], Any] = partial(
        make_optimizer, name=name, on_cpu=device == "cpu", targets=targets, rank=rank
    )
    if name == "prodigy":
        require_package("prodigyopt", "the optimizer prodigy")
        make = partial(_prodigy, zeros=frozenset() if model is None else _zeros(model))
    return (lambda model: Averaged(make(model))) if ema else make


def make_optimizer(model: nn.Module, name: str, on_cpu: bool = False, targets: str = "", rank: int = RANK) -> Any:
    """Creates the optimizer `name` for the trainable parameters of `model`; options as in `optimizer_maker`."""
    if name in LAYOUTS:
        return Tabulated(model, LAYOUTS[name], on_cpu, targets.split(",") if targets else None, rank)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name.startswith("ao_adamw_offload") and not on_cpu:
        return HostAdamW(trainable, frees=name.endswith("gradients"))
    if name in _OF_TORCH:
        return _OF_TORCH[name](trainable, lr=1e-4)
    if name == "muon":
        return Muon(model)
    if name == "adafactor":
        from transformers import Adafactor

        return Adafactor(_decayed_first(model), scale_parameter=False, relative_step=False, lr=1e-4)
    return torch.optim.AdamW(trainable, lr=1e-4, fused=True)


def notes_on(name: str, targets: str = "", rank: int = RANK) -> tuple[str, ...]:
    """Assumptions about an optimizer that users may not expect, one sentence each."""
    if name.startswith(("galore", "apollo")):
        of = f"the linear layers {targets}" if targets else "all linear layers"
        return (f"{name}: the gradients of {of} are projected, to rank {rank}, in a step that renews the projections",)
    if name.startswith("paged_"):
        left = "allocated and reserved leave them out; what the card has no room for moves to it and back in a step"
        return (f"{name}: states of large parameters are in managed memory: {left}",)
    if name.startswith("ao_adamw_offload"):
        return (f"{name}: AdamW runs on the host, and gradients are not clipped",)
    return (f"{name}: its states wait in host memory between steps",) if name == "grokadamw" else ()


class OffloadedAdamW(torch.optim.Optimizer):
    """Makes torchao's CPUOffloadOptimizer over AdamW, its stand-in in a trace, or without a GPU fused AdamW.

    It is a class, because a Trainer treats a function in another way.
    """

    def __new__(  # type: ignore[misc]
        cls, params: list[dict[str, Any]], *, offload_gradients: bool, **options: Any
    ) -> torch.optim.Optimizer:
        options["fused"] = True
        if not torch.cuda.is_available():
            return torch.optim.AdamW(params, **options)
        parameters = [p for group in params for p in group["params"] if p.requires_grad]
        if isinstance(parameters[0], FakeTensor):
            return HostAdamW(parameters, offload_gradients)
        from torchao.optim import CPUOffloadOptimizer

        made: torch.optim.Optimizer = CPUOffloadOptimizer(
            params, torch.optim.AdamW, offload_gradients=offload_gradients, **options
        )
        return made


class HostAdamW(torch.optim.Optimizer):
    """The ops of torchao's CPUOffloadOptimizer over AdamW (torchao 0.18, optim/cpu_offload.py).

    Each gradient is copied to pinned memory as soon as it is computed, and each parameter has an AdamW on the host,
    which begins when the copy has ended. Copies run on one stream of their own.

    frees: whether a gradient leaves the card with its copy (`offload_gradients`).
    """

    def __init__(self, parameters: list[nn.Parameter], frees: bool) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.frees = frees
        self.copies = CopyStream(parameters[0])
        self.sent: dict[torch.Tensor, Any] = {}  # events at the end of the gradients' copies, in order
        self.on_host: dict[nn.Parameter, torch.optim.AdamW] = {}
        for p in (p for p in parameters if p.numel() >= MINIMUM):
            host = nn.Parameter(torch.empty_like(p, pin_memory=True).copy_(p.detach()))
            host.grad = torch.empty_like(host, pin_memory=True)
            self.on_host[p] = torch.optim.AdamW([host], lr=1e-4, fused=True)
            p.register_post_accumulate_grad_hook(self._send)
        small = [p for p in parameters if p not in self.on_host]
        self.on_card = torch.optim.AdamW(small, lr=1e-4, fused=True) if small else None

    @torch.no_grad()
    def _send(self, p: Any) -> None:
        self.sent.pop(p, None)
        self.sent[p] = self.copies.start((self._host(p).grad, p.grad))
        if self.frees:
            p.grad = None

    def _host(self, p: Any) -> Any:
        return self.on_host[p].param_groups[0]["params"][0]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The step of the small parameters, then of one after another on the host, each copied back."""
        if self.on_card is not None:
            self.on_card.step()
        for p, sent in self.sent.items():
            sent.synchronize()
            self.on_host[p].step()  # type: ignore[index]
            self.copies.start((p, self._host(p)))
        self.copies.side.synchronize()
        self.sent.clear()


def _decayed_first(model: nn.Module) -> list[dict[str, Any]]:
    """Trainable parameters in the groups of transformers' Trainer: without norms and biases, then those."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # it reads no trainer
    groups: tuple[list[nn.Parameter], ...] = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups[name not in decayed].append(p)
    return [{"params": group} for group in groups if group]


class Muon:
    """PyTorch's Muon for the matrices inside a model, and AdamW for embeddings, head, norms and biases."""

    def __init__(self, model: nn.Module) -> None:
        outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        outside |= {id(p) for p in head.parameters()} if head is not None else set()
        groups: tuple[list[nn.Parameter], ...] = [], []
        for p in model.parameters():
            if p.requires_grad:
                groups[p.ndim == 2 and id(p) not in outside].append(p)
        self.parts = [
            kind(group, lr=1e-3) for kind, group in zip((torch.optim.AdamW, torch.optim.Muon), groups, strict=True)
            if group
        ]  # fmt: skip
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """The steps of both."""
        for part in self.parts:
            part.step()


def _zeros(model: nn.Module) -> frozenset[str]:
    """Names of trainable parameters that are all zeros; on the meta device LoRA's B matrices, which start as zeros."""
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (".lora_B." in name if p.is_meta else not p.any())
    )


def _prodigy(model: nn.Module, zeros: frozenset[str]) -> Any:
    """prodigyopt's optimizer. It checks which parameters are all zeros; in a trace `zeros` names them."""
    from prodigyopt import Prodigy

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    class KnownZeros(Prodigy):
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            fresh = [p for name, p in named.items() if name not in zeros and "p0" not in self.state[p]]
            loss: float | None = super().step(closure)
            for p in fresh:
                if "p0" in self.state[p]:
                    self.state[p]["p0"] = p.detach().flatten().clone()
            return loss

    return KnownZeros(named.values(), lr=1.0, use_bias_correction=True, safeguard_warmup=True)


class Averaged:
    """An optimizer with a moving average of its parameters, updated one after another as in diffusers' EMAModel."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step, then the update of the average, which is kept in the optimizer's state."""
        self.optimizer.step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        average: dict[int, torch.Tensor] = self.optimizer.state["average"]  # type: ignore[index]  # any key is one
        for at, parameter in enumerate(parameters):
            if at not in average:
                average[at] = torch.empty_like(parameter, dtype=torch.float32)
            average[at].sub_((1 - _EMA_DECAY) * (average[at] - parameter))
