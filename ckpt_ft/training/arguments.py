"""ACArguments: the flags of activation checkpointing, for `HfArgumentParser` together with `TrainingArguments`.

Every field is a string or a boolean. A policy stays the string that was typed, because transformers writes arguments
as JSON and as a pickle, which a callable breaks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ckpt_ft.checkpointing.verify import Schedule
from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.memory.measure import REPORT_KINDS
from ckpt_ft.planning.results import Plan
from ckpt_ft.policy import Policy
from ckpt_ft.units import is_bare, parse_budget

from .flags import flag

logger = logging.getLogger(__name__)
SEARCHES = ("find_max_batch_size", "find_max_length")


@dataclass
class ACArguments:
    """The activation checkpointing policy, its memory budget, and the memory reports.

    Attributes:
        plan: the plan that `ac_policy` names, read once; None if it names none. Not a flag.

    Raises:
        UserError: a value is invalid, two values contradict each other, or the plan file cannot be used.
    """

    _argument_group_name = "memory"
    ac_policy: str | None = flag(
        None,
        "What to keep for backward and what to recompute, e.g. full, every:2, save:attention+matmul, modules:mlp; "
        "none switches checkpointing off; without this flag the model is unchanged; plan.json applies the best policy "
        "of a plan that `ckpt-ft plan --output` wrote.",
    )
    ac_budget: str | None = flag(
        None,
        "Memory that --ac_policy auto or --find_max_batch_size may use, with its unit, e.g. 24GiB. On a CPU a step "
        "that exceeds it runs out of memory, as on a card of that size.",
    )
    find_max_batch_size: bool = flag(
        False,
        "Use the largest micro-batch that fits, found by prediction and then by a real step; gradient accumulation "
        "keeps the effective batch.",
    )
    ac_report: str = flag(
        "json,md,html,png",
        "Memory reports to write to output_dir: any of json,md,html,png, or none, which measures nothing.",
    )
    ac_check: bool = flag(
        False, "Before training, prove that the policy changes no loss, gradient, buffer or random state."
    )
    ac_verify: str = flag(
        "first",
        "Steps in which backward proves, bit for bit, that it computes with what forward saved: first (the first two "
        "and every 1000th), always, never, or a number N for every N-th.",
    )

    def __post_init__(self) -> None:
        if self.ac_verify != "first":
            self.ac_verify = str(self.ac_verify)
            Schedule.parse(self.ac_verify)
        self.plan = self._read_plan()
        if self.ac_policy is not None and self.plan is None:
            try:
                self.ac_policy = str(Policy.parse(self.ac_policy))
            except UserError as error:
                raise UserError(f"--ac_policy: {error}") from None
        if self.ac_budget is not None:
            parse_budget(self.ac_budget)
            if is_bare(self.ac_budget):
                logger.warning("--ac_budget %s is taken as %s GiB", self.ac_budget, self.ac_budget)
                self.ac_budget = f"{self.ac_budget}GiB"
            if self.ac_policy != "auto" and self.plan is None and not any(getattr(self, name, 0) for name in SEARCHES):
                given = "without a policy" if self.ac_policy is None else f"with --ac_policy {self.ac_policy}"
                raise UserError(
                    f"--ac_budget {self.ac_budget} {given}: the budget is for --ac_policy auto or "
                    "--find_max_batch_size; add one, or drop it"
                )
        if self.ac_check and self.ac_policy is None:
            raise UserError("--ac_check compares a policy with plain training; give one, as in --ac_policy full")
        self.reports  # noqa: B018  validated before anything is done

    @property
    def policy(self) -> Policy | None:
        """The parsed policy, or the one that the plan picked; None if the model is left unchanged."""
        chosen = self.ac_policy if self.plan is None else self.plan.best.policy
        return None if chosen is None else Policy.parse(chosen)

    @property
    def limit(self) -> int | None:
        """The budget in bytes."""
        return None if self.ac_budget is None else parse_budget(self.ac_budget)

    @property
    def measures(self) -> bool:
        """Whether steps are measured, for a report or for a budget on a CPU."""
        return bool(self.reports) or self.limit is not None

    @property
    def reports(self) -> tuple[str, ...]:
        """The kinds of report to write; () for none."""
        kinds = tuple(kind.strip() for kind in self.ac_report.split(","))
        if kinds == ("none",):
            return ()
        for kind in kinds:
            if kind not in REPORT_KINDS:
                known = f"{did_you_mean(kind, REPORT_KINDS)} ({', '.join(REPORT_KINDS)}, or none)"
                raise UserError(f"--ac_report {self.ac_report}: no report '{kind}'{known}")
        return kinds

    def _read_plan(self) -> Plan | None:
        """Reads the plan file that `ac_policy` names; raises UserError if it is missing or of other versions."""
        if self.ac_policy is None or not self.ac_policy.endswith(".json"):
            return None
        path = Path(self.ac_policy)
        if not path.is_file():
            raise UserError(f"--ac_policy {path}: no such file; `ckpt-ft plan MODEL --output {path}` writes one")
        return Plan.from_json(path.read_bytes(), f"--ac_policy {path}")


@dataclass
class TextACArguments(ACArguments):
    """`ACArguments` of a recipe that cuts text into sequences of any length."""

    find_max_length: bool = flag(
        False,
        "Use the longest sequences that fit, of --max_length tokens at most, found by prediction and then by a real "
        "step.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.find_max_length and self.find_max_batch_size:
            raise UserError("--find_max_length is for a given batch, and --find_max_batch_size changes it; drop one")
