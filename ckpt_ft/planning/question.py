"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy
from ckpt_ft.spec.launch import Launch

from .candidate import better


@dataclass(frozen=True)
class Question:
    """What is asked of a workload; `plan` says what each is.

    Raises:
        UserError: a target, a policy or a number of samples that is none.
    """

    budget: str | int | None
    batch_size: int | None
    max_batch_size: int
    target: str
    margin: str | float | None
    policies: list[str] | None
    launches: tuple[Launch, ...] = ()

    def __post_init__(self) -> None:
        better(self.target)
        for name, samples in (("batch_size", self.batch_size), ("max_batch_size", self.max_batch_size)):
            if samples is not None and samples < 1:
                raise UserError(f"{name} {samples}: a batch has at least 1 sample")
        self.chosen  # noqa: B018  refused before anything is traced

    @property
    def chosen(self) -> list[str] | None:
        return None if self.policies is None else [str(Policy.parse(policy)) for policy in self.policies]
