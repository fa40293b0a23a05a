"""Blocks composed of habits, under eight policies: each step equals the plain one bit for bit, or raises.

`pytest -m slow tests/checkpointing/test_habits.py` runs 2,000 models under each policy.
"""

from __future__ import annotations

import warnings

import habits
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import offload
from ckpt_ft.errors import UserError, WorkFailed

POLICIES = (
    "full", "every:2", "segments:2", "save:matmul", "save:attention+matmul", "pointwise", "offload", "modules:mlp",
)  # fmt: skip
# of autograd, checkpoints and engines: what was saved has been written to, or a second run does not repeat the first
REFUSALS = ("inplace operation", "in place", "in-place", "recomput", "second run", "checkpoint", "double backward")

Blocks = tuple[tuple[str, ...], ...]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Blocks, frozenset[str]]:
    block = st.lists(st.sampled_from(sorted(habits.HABITS)), min_size=1, max_size=3).map(tuple)
    blocks = draw(st.lists(block, min_size=2, max_size=3).map(tuple))
    return blocks, draw(st.sets(st.sampled_from(habits.AROUND), max_size=2).map(frozenset))


def verdict(blocks: Blocks, around: frozenset[str], policy: str) -> str:
    """ "equal", "raised: ..." or "no step: ..." where the model does not train without a policy either."""
    offload.install.__kwdefaults__["min_bytes"] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = habits.train(habits.build(blocks, around))
        except (RuntimeError, ValueError) as error:
            return f"no step: {error}"
        if not all(torch.isfinite(value).all() for value in plain):
            return "no step: it overflows"
        model = habits.build(blocks, around)
        try:
            apply_policy(model, policy, verify="always")
            ours = habits.train(model)
        except (UserError, WorkFailed) as error:
            return f"raised: {error}"
        except RuntimeError as error:
            if not any(word in str(error) for word in REFUSALS):
                raise
            return f"raised: {error}"
    assert len(ours) == len(plain)
    for number, (mine, wanted) in enumerate(zip(ours, plain, strict=True)):
        if policy == "pointwise":
            scale = wanted.double().abs().max()
            assert (mine.double() - wanted.double()).abs().max() <= 1e-6 * scale, number
        else:
            assert torch.equal(mine, wanted), number
    return "equal"


@pytest.fixture(autouse=True)
def _own_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)


@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from(POLICIES))
def test_a_step_is_equal_or_raises(program: tuple[Blocks, frozenset[str]], policy: str) -> None:
    note(verdict(*program, policy))


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_two_thousand_models_under_each_policy(program: tuple[Blocks, frozenset[str]]) -> None:
    for policy in POLICIES:
        note(f"{policy}: {verdict(*program, policy)}")


@pytest.mark.parametrize("policy", ["save:attention+matmul", "pointwise", "offload"])
def test_most_single_habits_are_equal_and_few_are_refused(policy: str) -> None:
    """A generator that finds nothing equal would prove nothing."""
    verdicts = {name: verdict(((name,), (name,)), frozenset(), policy) for name in sorted(habits.HABITS)}
    equal = [name for name, found in verdicts.items() if found == "equal"]
    assert not [name for name, found in verdicts.items() if found.startswith("no step")]
    assert len(equal) >= 0.85 * len(verdicts), sorted(set(verdicts) - set(equal))
