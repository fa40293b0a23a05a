"""check_parity accepts correct policies and names the cause of each known error."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from language_models import batch, make, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.apply import applied_policy
from ckpt_ft.checkpointing.parity import Parity, check_parity
from ckpt_ft.errors import UserError


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(torch.relu(self.norm(self.linear(x))))
        return out


class Stack(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**kwargs) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def install(model: nn.Module, run: Any) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = partial(run, block.forward)


def causes(parity: Parity) -> str:
    assert not parity.ok
    return " ".join(parity.causes)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:attention+matmul", "modules:mlp"])
def test_policy_passes_and_the_model_is_unchanged(policy: str) -> None:
    model = make("llama")
    applied = apply_policy(model, "every:2")
    model.lm_head.weight.grad = mark = torch.ones_like(model.lm_head.weight)
    random = torch.get_rng_state()
    parity = check_parity(model, batch(), policy)
    assert parity.ok
    assert not parity.causes
    assert "DIFFERS" not in str(parity)
    assert model.lm_head.weight.grad is mark
    assert torch.equal(torch.get_rng_state(), random)
    assert str(applied_policy(model).policy) == "every:2"
    assert applied.regions  # the caller's object still describes the policy


def test_dropout_and_batchnorm_pass_under_a_policy() -> None:
    assert check_parity(Stack(dropout=0.5, norm=True), X, "full").ok


def test_names_a_frozen_input() -> None:
    reentrant = check_parity(Stack(), X, partial(install, run=_quiet_reentrant))
    assert "gradients are cut off: 6 parameters (blocks.0.linear.weight, ...)" in causes(reentrant)


def _quiet_reentrant(forward: Any, x: torch.Tensor) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns once that no input requires a gradient
        out: torch.Tensor = checkpoint(forward, x, use_reentrant=True)
    return out


def test_names_dropout_without_rng() -> None:
    checkpoint_without_rng = partial(
        install, run=lambda forward, x: checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
    )
    assert "dropout without RNG" in causes(check_parity(Stack(dropout=0.5), X, checkpoint_without_rng))


def test_names_batch_norm_that_runs_twice() -> None:
    plain = partial(install, run=lambda forward, x: checkpoint(forward, x, use_reentrant=False))
    parity = check_parity(Stack(norm=True), X, plain)
    assert "BatchNorm twice" in causes(parity)
    assert [row.what.partition(" ")[0] for row in parity.rows if not row.same] == ["buffers"]


def test_names_no_grad_inside_a_region() -> None:
    def frozen(forward: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = forward(x)
        return out

    assert "no_grad inside a region" in causes(check_parity(Stack(), X, partial(install, run=frozen)))


def test_counts_parameters_that_lost_or_gained_a_gradient() -> None:
    def detached(model: Any) -> None:
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0].detach(),))

    lost = check_parity(Stack(), X, detached)
    weights = "2 parameters (blocks.0.linear.weight, ...) receive a gradient"
    assert f"{weights} without the policy and none with it" in causes(lost)
    assert lost.rows[1].what == "parameters that received a gradient (2 lost theirs, 0 have a new one)"
    assert (lost.rows[1].plain, lost.rows[1].policy, lost.rows[1].same) == ("8", "6", False)

    half_frozen = Stack()
    half_frozen.blocks[0].requires_grad_(False)
    gained = check_parity(half_frozen, X, lambda model: model.requires_grad_(True))
    assert gained.rows[1].what == "parameters that received a gradient (0 lost theirs, 2 have a new one)"
    assert f"{weights} with the policy and none without it" in causes(gained)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_tolerance_for_other_sum_orders(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`head` has this tolerance; 10 times the difference is an error. Gradients that cancel are compared to others."""
    from ckpt_ft.checkpointing import deferred_logits

    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", 4 * 61 * 5)
    model = make("bert").to(dtype)  # the gradients of its key biases are rounding noise
    assert check_parity(model, batch(), "head").ok
    add = deferred_logits.torch.stack
    monkeypatch.setattr(
        deferred_logits.torch, "stack", lambda losses: add([losses[0] * (1 + 100 * bound), *losses[1:]])
    )
    assert not check_parity(model, batch(), "head").ok


def test_names_a_second_run_that_differs() -> None:
    def unsteady(forward: Any, x: torch.Tensor) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = forward(x * (1 if torch._C._current_graph_task_id() < 0 else 2))
            return out

        out: torch.Tensor = checkpoint(region, x, use_reentrant=False)
        return out

    assert "second run differs from its first" in causes(check_parity(Stack(), X, partial(install, run=unsteady)))


def test_notes_parameters_that_never_train() -> None:
    class Idle(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    parity = check_parity(Idle(), X, "full")
    assert parity.ok
    assert "2 trainable parameters (unused.weight, ...) receive no gradient" in parity.notes[0]


def test_custom_loss_and_unsuitable_steps() -> None:
    assert check_parity(Stack(), X, "full", loss=lambda model, x: model(x).logsumexp(0).sum()).ok
    with pytest.raises(UserError, match="needs no gradient"):
        check_parity(Stack().requires_grad_(False), X, "full")
    with pytest.raises(UserError, match="no attention submodule"):
        check_parity(Stack(), X, "modules:attention")


def test_parity_prints_the_loss_of_the_step() -> None:
    model = make("gpt2", "dropout")
    before = numbers(model)
    assert check_parity(model, batch(), "full", seed=2).rows[0].plain == f"{before['loss']:.9g}"


def test_random_and_numpy_draws_are_seeded() -> None:
    """wav2vec2 masks its input with numpy's random numbers, so both steps of a check must draw the same."""

    class Masked(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x * np.random.rand() + random.random())
            return out

    np.random.seed(5)
    random.seed(5)
    parity = check_parity(Masked(), X, "full")
    assert parity.ok
    assert parity.rows[0].plain == parity.rows[0].policy
    drawn = np.random.rand(), random.random()
    np.random.seed(5)
    random.seed(5)
    assert drawn == (np.random.rand(), random.random())  # as without the check


def test_loss_must_be_one_number() -> None:
    assert check_parity(Stack(), X, "full", loss=lambda model, batch: model(batch).sum().view(1)).ok
    with pytest.raises(UserError, match=r"the step's loss has the shape \(2,\); it must be one number"):
        check_parity(Stack(), X, "full", loss=lambda model, batch: model(batch)[0])
    chosen = Stack()
    chosen.register_forward_hook(lambda module, args, output: output.argmax(-1))
    with pytest.raises(UserError, match="the output of Stack has neither a loss nor a tensor of floats"):
        check_parity(chosen, X, "full")


class Scaled(nn.Module):
    """A block that registers a buffer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", 2 * torch.ones(()))
        return torch.tanh(self.scale * self.linear(x))


def test_buffer_registered_in_forward_is_compared_and_removed() -> None:
    model = nn.Sequential(*(Scaled() for _ in range(3)))
    parity = check_parity(model, torch.ones(2, 8), "full")
    assert parity.ok, parity
    (buffers,) = [row for row in parity.rows if row.what == "buffers"]
    assert (buffers.plain, buffers.policy) == ("3 tensors", "3 tensors")
    assert not list(model.named_buffers())
