"""What a person is told when training runs out of memory: what held the peak, and what would need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from ckpt_ft.errors import WorkFailed, is_oom, one_line
from ckpt_ft.policy import Policy

# From what keeps most to what keeps least: each drops something that the one before it keeps.
LADDER = ("none", "pointwise", "save:attention", "full", "full,head", "full,offload,head")


class Measured(Protocol):
    """ACCallback, or a loop's own: knows the policy and what held the peak, and can be closed."""

    policy: Policy | None

    def peak_holders(self) -> list[str]: ...

    def close(self) -> None: ...


def cheaper_policies(policy: Policy | None) -> list[str]:
    """Policies of `LADDER` that keep less than `policy`, mildest first.

    One that is not on the ladder stands before the first rung that keeps no more than it: a partial scope before
    `full`. What it has of `head` and `offload` stays, and `pointwise` outside of blocks that are all re-run.
    """
    text = "none" if policy is None else str(policy)
    if text in LADDER:
        return list(LADDER[LADDER.index(text) + 1 :])
    assert policy is not None
    rung = LADDER.index("full" if policy.checkpoints else "pointwise")
    own = {"head": policy.head, "offload": policy.offload, "pointwise": policy.pointwise and policy.scope == "full"}
    kept: dict[str, Any] = {term: True for term, has in own.items() if has}
    steps = dict.fromkeys(str(replace(Policy.parse(step), **kept)) for step in LADDER[rung:])
    return [step for step in steps if step != text]


@contextmanager
def advise_on_oom(memory: Measured, batch_flag: str = "--per_device_train_batch_size") -> Iterator[None]:
    """Turn running out of memory into a `WorkFailed` that names the holders of the peak and cheaper settings.

    Checkpoints written before are left as they are; `memory` is closed.
    """
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise WorkFailed(_advice(memory, error, batch_flag)) from error
    finally:
        memory.close()


def _advice(memory: Measured, error: Exception, batch_flag: str) -> str:
    lines = [f"out of memory: {one_line(error)}"]
    holders = memory.peak_holders()
    if holders:
        lines += ["What held the peak:", *(f"  {holder}" for holder in holders)]
    lines.append("What needs less memory, mildest first:")
    lines += [f"  --ac_policy {policy}" for policy in cheaper_policies(memory.policy)]
    lines.append(f"  a smaller {batch_flag} with more --gradient_accumulation_steps")
    lines.append("Checkpoints written so far are whole: --resume_from_checkpoint latest goes on from the last one.")
    return "\n".join(lines)
