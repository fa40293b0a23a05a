"""ACCallback: a policy and a memory report in any `transformers.Trainer`, TRL's trainers included.

trainer = Trainer(...)                                   # as it was
ACCallback("save:attention+matmul").attach(trainer)
trainer.train()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..checkpointing.apply import AppliedPolicy, apply_policy
from ..errors import UserError, WorkFailed
from ..policy import Policy
from .arguments import ACArguments

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from ..memory.report import MemoryReport


class ACCallback(TrainerCallback):
    """Applies a policy when training begins, measures memory while it runs, and takes the policy off at the end.

    Args:
        policy: a policy, or `ACArguments` for all settings; None only measures.

    Attributes:
        policy: the policy, None when the model is left as it is.
        applied: what stands on the model while it trains.
        report: the MemoryReport, once training has ended.

    Raises:
        UserError: (when training begins) the policy matches nothing, or other checkpointing is on at the same time.
        WorkFailed: (when training begins) `ac_check` found a number that the policy changes.
    """

    def __init__(self, policy: str | dict[str, Any] | Policy | ACArguments | None = None) -> None:
        if not isinstance(policy, ACArguments):
            policy = ACArguments(ac_policy=None if policy is None else str(Policy.parse(policy)))
        self.settings = policy
        self.policy = policy.policy
        self.applied: AppliedPolicy | None = None
        self.report: MemoryReport | None = None

    def attach(self, trainer: Trainer) -> ACCallback:
        """Add this callback to `trainer`, before its trackers' callbacks, so that these get the `memory/...` scalars.

        Given as `Trainer(callbacks=[...])` it would come after them: everything else works the same.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check_conflicts(args, self.policy)
        if self.policy is not None:
            if self.settings.ac_check:
                self._check(kwargs["model"], kwargs["train_dataloader"])
            self.applied = apply_policy(kwargs["model"], self.policy)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.applied is not None:
            self.applied.remove()
            self.applied = None

    def peak_holders(self) -> list[str]:
        return []

    def _check(self, model: Any, dataloader: Any) -> None:
        """Compare a step on the first batch with and without the policy; the data order stays as it is."""
        from ..checkpointing.parity import check_parity

        rows = [dataloader.dataset[i] for i in range(min(len(dataloader.dataset), dataloader.batch_size or 1))]
        batch = {key: value.to(model.device) for key, value in dataloader.collate_fn(rows).items()}
        parity = check_parity(model, batch, self.policy)
        print(parity)
        if not parity.ok:
            raise WorkFailed(f"--ac_check: policy {self.policy} changes the numbers of a step; nothing was trained")


def check_conflicts(args: TrainingArguments, policy: Policy | None) -> None:
    """Raises UserError when `policy` would meet other activation checkpointing: every block would be re-run twice."""
    if policy is None:
        return
    # transformers renamed the argument in 5.23 and keeps the old name, which it sets alike, until v6.
    old, new = "gradient_checkpointing", "activation_checkpointing"
    kwargs = getattr(args, f"{new}_kwargs", None) or getattr(args, f"{old}_kwargs", None) or {}
    if isinstance(kwargs, dict) and kwargs.get("use_reentrant"):
        raise UserError(
            "use_reentrant=True: reentrant checkpointing trains nothing behind inputs without gradients, as in LoRA; "
            f"policy '{policy}' is always non-reentrant: drop {old}_kwargs"
        )
    if getattr(args, new, False) or getattr(args, old, False):
        raise UserError(
            f"policy '{policy}' and {old} are both on: blocks would be re-run twice; "
            f"pass {old}=False (TRL's configs turn it on by default), or drop the policy"
        )
    if _fsdp_checkpoints(args):
        raise UserError(
            f"policy '{policy}' and FSDP's own activation checkpointing are both on: blocks would be re-run twice; "
            "set fsdp_activation_checkpointing to false in the launch configuration, or drop the policy"
        )


def _fsdp_checkpoints(args: TrainingArguments) -> bool:
    """Asked for by `--fsdp_config`, or by `accelerate launch`, which passes its configuration in the environment."""
    given = (
        args.fsdp_config.get("activation_checkpointing") if args.fsdp and isinstance(args.fsdp_config, dict) else None
    )
    launched = (
        os.environ.get("FSDP_ACTIVATION_CHECKPOINTING") if os.environ.get("ACCELERATE_USE_FSDP") == "true" else None
    )
    return str(given or launched).lower() in ("true", "1")
