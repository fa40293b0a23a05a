"""What changes from step to step in a diffusion recipe: the model, its optimizer, schedule and moving average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.training.peft_flag import kind_of
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.loop_checkpoints import hold_state, load_checkpoint, save_checkpoint

from .arguments import LoopArguments, PipelineArguments
from .joint import with_text_rate
from .trained import Trained, save_only_what_is_trained

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers.training_utils import EMAModel


class TrainingState:
    """All that a checkpoint holds but for random states, which accelerate adds.

    Args:
        model: what of it is trained needs a gradient.
        rows: images of an epoch, over all ranks.

    Attributes:
        model: as accelerate has prepared it.
        ema: the moving average of `parameters`; None where none is kept.
        step: optimizer steps made, of `total_steps`.
        samples_seen: images that these took, over all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        part: Trained,
        model_args: PipelineArguments,
        args: LoopArguments,
        accelerator: Accelerator,
    ) -> None:
        from diffusers.optimization import get_scheduler
        from diffusers.training_utils import EMAModel

        self.accelerator = accelerator
        self.parameters = parameters = [p for p in model.parameters() if p.requires_grad]
        self.per_step = args.train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
        self.total_steps = args.max_train_steps or args.num_train_epochs * -(-rows // self.per_step)
        self.step = self.samples_seen = 0
        scale = self.per_step if args.scale_lr else 1
        text_rate = model_args.text_rate
        groups = with_text_rate(model, parameters, None if text_rate is None else text_rate * scale)
        optimizer = make_optimizer(groups, args, args.learning_rate * scale)
        self.lr_scheduler = get_scheduler(
            args.lr_scheduler,
            optimizer,
            num_warmup_steps=args.lr_warmup_steps,
            num_training_steps=self.total_steps,
        )
        self.ema = EMAModel(parameters) if args.use_ema else None
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        save_only_what_is_trained(accelerator, part, lora=model_args.adapts)
        hold_state(accelerator, lr_scheduler=self.lr_scheduler, **({} if self.ema is None else {"ema": self.ema}))
        self._identity = {
            "rank": model_args.rank, "peft": kind_of(model_args.peft_config), "use_ema": args.use_ema,
            "optimizer": None if args.optimizer == "adamw" else args.optimizer,
            "processes": accelerator.num_processes,
            "train_text_encoder": text_rate is not None or None,  # older checkpoints do not say
        }  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self.total_steps

    @property
    def trained(self) -> nn.Module:
        """The model without what accelerate has put around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def learning_rate(self) -> float:
        """Of the step that is next."""
        rate: float = self.lr_scheduler.get_last_lr()[0]
        return rate

    def advance(self) -> None:
        """Count the step that was made; the schedule and the moving average follow."""
        self.step, self.samples_seen = self.step + 1, self.samples_seen + self.per_step
        self.lr_scheduler.step()
        if self.ema is not None:
            self.ema.step(self.parameters)

    def save(self, directory: RunDirectory, total_limit: int | None) -> None:
        """Write a checkpoint; called on every rank (see `save_checkpoint`)."""
        save_checkpoint(self.accelerator, directory, self.step, self.samples_seen, self._identity, total_limit)

    def load(self, checkpoint: str) -> None:
        """Go on from `checkpoint`: random states as they were then, too (see `load_checkpoint`)."""
        self.step, self.samples_seen = load_checkpoint(self.accelerator, checkpoint, self._identity)
        if self.ema is not None:
            self.ema.to(self.accelerator.device)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, what is trained is its moving average, if one is kept."""
        return averaged(self.ema, self.parameters)

    def unwrap(self) -> None:
        """Let go of what accelerate has prepared.

        DDP's wrapper goes before the process group. Were it to hold the group's last reference, torch would join
        gloo's thread with the GIL held, and that thread may be waiting for the GIL to free its last tensors: neither
        ends.
        """
        self.model = self.trained
        self.accelerator.free_memory()


def make_optimizer(
    parameters: list[dict[str, Any]], args: LoopArguments, learning_rate: float
) -> torch.optim.Optimizer:
    """AdamW, fused: one kernel and no temporaries (torch's default on CUDA makes some as large as the weights).

    With `use_8bit_adam` that of bitsandbytes. Adafactor is transformers', at the rate that is given; Prodigy is its
    authors', as diffusers' scripts set it up.
    """
    settings: dict[str, Any] = {"lr": learning_rate, "weight_decay": args.adam_weight_decay}
    if args.optimizer == "adafactor":
        from transformers import Adafactor

        return Adafactor(parameters, **settings, scale_parameter=False, relative_step=False)
    settings |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optimizer == "prodigy":
        from prodigyopt import Prodigy

        prodigy: torch.optim.Optimizer = Prodigy(
            parameters, **settings, use_bias_correction=True, safeguard_warmup=True
        )
        return prodigy
    if args.use_8bit_adam:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)


@contextmanager
def averaged(ema: EMAModel | None, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, `parameters` are their moving average, if one is kept."""
    if ema is None:
        yield
        return
    ema.store(parameters)
    ema.copy_to(parameters)
    try:
        yield
    finally:
        ema.restore(parameters)
