"""Models composed of habits (habits.py) under nine policies: each step equals the plain one bit for bit, or raises.

`pytest -m slow tests/checkpointing/test_habits.py` runs 2,000 models under each policy.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import habits
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import deferred_logits, offload
from ckpt_ft.errors import UserError, WorkFailed

POLICIES = (
    "full", "every:2", "segments:2", "save:matmul", "save:attention+matmul", "pointwise", "offload", "modules:mlp",
    "head",
)  # fmt: skip
# errors of autograd, checkpoints and engines: a saved tensor was written, or a second run differs from the first
REFUSALS = ("inplace operation", "in place", "in-place", "recomput", "second run", "checkpoint", "double backward")

Blocks = tuple[tuple[str, ...], ...]
Program = tuple[Blocks, frozenset[str], habits.Readout | None]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    block = st.lists(st.sampled_from(sorted(habits.HABITS)), min_size=1, max_size=3).map(tuple)
    blocks = draw(st.lists(block, min_size=2, max_size=3).map(tuple))
    around = draw(st.sets(st.sampled_from(habits.AROUND), max_size=2).map(frozenset))
    readouts = st.builds(
        habits.Readout,
        st.sampled_from(sorted(habits.LAYERS)),
        st.lists(st.sampled_from(sorted(habits.LOGITS)), max_size=3).map(tuple),
        st.sampled_from(sorted(habits.LOSSES)),
    )
    return blocks, around, draw(st.none() | readouts)


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def verdict(blocks: Blocks, around: frozenset[str], readout: habits.Readout | None, policy: str) -> str:
    """Returns "equal", "raised: ...", or "no step: ..." if the model does not train without a policy either."""
    if policy == "head" and readout is None:
        readout = habits.Readout()
    # A loss in chunks is rounded differently; fp64 keeps the difference small in later operations.
    with warnings.catch_warnings(), computing_in(torch.float64 if policy == "head" else torch.float32):
        warnings.simplefilter("ignore")
        try:
            plain = habits.train(habits.build(blocks, around, readout))
        except (RuntimeError, ValueError) as error:
            return f"no step: {error}"
        if not all(torch.isfinite(value).all() for value in plain):
            return "no step: it overflows"
        model = habits.build(blocks, around, readout)
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
        if policy in ("pointwise", "head"):
            rounding = 1e-12 if policy == "head" else 0.0  # for gradients that are zero after a BatchNorm
            scale = wanted.double().abs().max()
            assert (mine.double() - wanted.double()).abs().max() <= 1e-6 * scale + rounding, number
        else:
            assert torch.equal(mine, wanted), number
    return "equal"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload tensors of any size, and compute the loss of each position separately."""
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", 1)


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from(POLICIES))
def test_step_is_equal_or_raises(program: Program, policy: str) -> None:
    note(verdict(*program, policy))


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_steps_of_two_thousand_models_are_equal_or_raise(program: Program) -> None:
    for policy in POLICIES:
        note(f"{policy}: {verdict(*program, policy)}")


@pytest.mark.parametrize("policy", ["save:attention+matmul", "pointwise", "offload"])
def test_most_single_habits_are_equal_and_few_are_refused(policy: str) -> None:
    """If few habits were equal, the tests above would prove little."""
    verdicts = {name: verdict(((name,), (name,)), frozenset(), None, policy) for name in sorted(habits.HABITS)}
    equal = [name for name, found in verdicts.items() if found == "equal"]
    assert not [name for name, found in verdicts.items() if found.startswith("no step")]
    assert len(equal) >= 0.85 * len(verdicts), sorted(set(verdicts) - set(equal))
