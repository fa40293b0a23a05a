"""A callback for Lightning: a policy and a memory report.

trainer = Trainer(callbacks=[MemoryCallback("save:attention+matmul")])
"""

from __future__ import annotations

from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.session import Session

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback


class MemoryCallback(Callback):
    """Applies a policy to the module while it is fitted, and writes memory_report.* into the trainer's root directory.

    Args:
        policy: a policy, `ACArguments` for all settings, or None to measure only.
        attribute: the module's attribute that is the model with repeated blocks; "" for the whole module.

    Attributes:
        session: the run's session, with the report.

    Raises:
        UserError: a setting that needs the run's step, such as `ac_check`; (when fitting begins) the policy is "auto"
            or matches nothing.
    """

    def __init__(self, policy: str | ACArguments | None = None, attribute: str = "") -> None:
        if not isinstance(policy, ACArguments):
            policy = ACArguments(ac_policy=None if policy is None else str(Policy.parse(policy)))
        for name in ("ac_check", "find_max_batch_size", "ac_on_oom"):
            if getattr(policy, name):
                raise UserError(f"{name}: a Lightning module has no step to try; leave it out, and use ckpt-ft plan")
        self.session, self.attribute = Session(policy), attribute
        self._step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Applies the policy and starts measuring."""
        model = pl_module.get_submodule(self.attribute) if self.attribute else pl_module
        self.session.apply(model)
        steps = int(trainer.estimated_stepping_batches) - trainer.global_step
        self.session.start(model, trainer.optimizers[0], steps)
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins a step, except for a later micro-batch of one."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.session.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends the step if the optimizer has run, and logs its figures."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            figures = self.session.step()
            if figures:
                pl_module.log_dict(figures)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes the report and removes the policy."""
        self.session.stop()
        self.session.write_report(trainer.default_root_dir)
        self.session.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stops measuring and removes the policy."""
        self.session.stop(failed=True)
        self.session.close()
