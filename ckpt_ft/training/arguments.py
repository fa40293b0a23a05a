"""ACArguments: the flags of activation checkpointing, for `HfArgumentParser`, beside `TrainingArguments`.

Only strings and booleans: a policy travels as the string that a person typed, because a callable in a training
argument breaks its JSON and its pickle (transformers writes both).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from ..errors import UserError
from ..policy import Policy
from ..units import parse_bytes

REPORT_KINDS = ("json", "md", "png")


@dataclass
class ACArguments:
    """What is recomputed, under which budget, and what is reported about memory.

    Attributes:
        ac_policy: a policy, as `Policy.parse` takes it; None leaves the model as it is and still reports.
        ac_budget: an amount of memory such as "24GiB", for the policy `auto`.
        ac_report: comma-separated kinds of report written to the output directory, or "none" for no measuring at all.
        ac_check: compare one step's loss, gradients, buffers and RNG with and without the policy before training.

    Raises:
        UserError: a value cannot be understood, or two contradict each other; raised when the object is made.
    """

    ac_policy: str | None = field(
        default=None,
        metadata={
            "help": "What to keep for backward and what to recompute, e.g. full, every:2, save:attention+matmul, "
            "modules:mlp; none switches it off, and without this flag the model is left as it is."
        },
    )
    ac_budget: str | None = field(
        default=None, metadata={"help": "Memory that --ac_policy auto may use, with its unit, e.g. 24GiB."}
    )
    ac_report: str = field(
        default="json,md,png",
        metadata={"help": "Memory reports to write to output_dir: any of json,md,png; none measures nothing."},
    )
    ac_check: bool = field(
        default=False,
        metadata={"help": "Before training, prove that the policy changes no loss, gradient, buffer or RNG state."},
    )

    def __post_init__(self) -> None:
        if self.ac_policy is not None:
            self.ac_policy = str(_parsed(self.ac_policy))
        if self.ac_budget is not None:
            parse_bytes(self.ac_budget)
            if self.ac_policy != "auto":
                given = "without a policy" if self.ac_policy is None else f"with --ac_policy {self.ac_policy}"
                raise UserError(
                    f"--ac_budget {self.ac_budget} {given}: the budget is for --ac_policy auto; add it, or drop it"
                )
        if self.ac_check and self.ac_policy is None:
            raise UserError("--ac_check compares a policy with plain training; give one, as in --ac_policy full")
        self.reports  # noqa: B018  validated while nothing has been done yet

    @property
    def policy(self) -> Policy | None:
        """The parsed policy, None when the model is left as it is."""
        return None if self.ac_policy is None else Policy.parse(self.ac_policy)

    @property
    def reports(self) -> tuple[str, ...]:
        """The kinds of report to write, () for none."""
        kinds = tuple(kind.strip() for kind in self.ac_report.split(","))
        if kinds == ("none",):
            return ()
        for kind in kinds:
            if kind not in REPORT_KINDS:
                close = difflib.get_close_matches(kind, REPORT_KINDS, n=1)
                meant = f"; did you mean '{close[0]}'?" if close else ""
                raise UserError(
                    f"--ac_report {self.ac_report}: no report '{kind}'{meant} ({', '.join(REPORT_KINDS)}, or none)"
                )
        return kinds


def _parsed(text: str) -> Policy:
    try:
        return Policy.parse(text)
    except UserError as error:
        raise UserError(f"--ac_policy: {error}") from None
