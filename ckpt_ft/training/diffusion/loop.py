"""The diffusion recipes' Accelerate loop, from the first step to the saved result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Adafactor

from ckpt_ft.errors import never_fatal
from ckpt_ft.files import write
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.checkpoints import (
    RunDirectory,
    Stop,
    last_complete_checkpoint,
    load_checkpoint,
    save_checkpoint,
    stopped,
    write_on_ranks,
)
from ckpt_ft.training.fit import fit, launch_of
from ckpt_ft.training.images import ImageArguments
from ckpt_ft.training.models import kind_of
from ckpt_ft.training.session import Session, advise_on_oom
from ckpt_ft.validation import FirstStep, library_reads
from ckpt_ft.workloads.optimizers import OffloadedAdamW
from ckpt_ft.workloads.workload import Batch, Forward, Loss, Workload, optimizer_step

from .arguments import LoopArguments
from .data import endless_batches
from .denoiser import parameter_groups, register_checkpoint_hooks, save_result
from .families import Family
from .sampling import Validation
from .workload import Data, NoisyBatches

LOSSES = "losses.jsonl"


class Run:
    """A run of a diffusion recipe, from loading the model to the saved result.

    Attributes:
        args: the loop's arguments, with the batch size once it is found.
        settings: the `--ac_*` flags.
        accelerator, directory: set by `start`.
        fitted, memory: the chosen settings and the session, set by `fit`.
        step: optimizer steps made, of `total_steps`.
        samples_seen: images of these steps, over all ranks.
        ema: the moving average of the trained `parameters`, or None.
    """

    def __init__(self, model_args: Any, image_args: ImageArguments, args: Any, settings: ACArguments) -> None:
        self.model_args, self.image_args, self.args, self.settings = model_args, image_args, args, settings
        self.step = self.samples_seen = 0

    def start(self, built_in: Callable[[], str]) -> Accelerator:
        """Returns Accelerate with its trackers; opens the output directory, sets the seed, and makes the `built_in`
        pipeline if none is given."""
        args = self.args
        self.directory = RunDirectory(args.output_dir, args.resume_from_checkpoint, args.overwrite_output_dir)
        with library_reads("Accelerate cannot start with these flags"):
            self.accelerator = Accelerator(
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                mixed_precision=args.mixed_precision,
                log_with=None if args.report_to == "none" else args.report_to.split(","),
                project_config=ProjectConfiguration(args.output_dir, str(Path(args.output_dir, args.logging_dir))),
            )
        self.directory.open()
        torch.backends.cuda.matmul.allow_tf32 = args.allow_tf32
        set_seed(args.seed)
        if self.model_args.pretrained_model_name_or_path is None:
            with self.accelerator.main_process_first():
                self.model_args = replace(self.model_args, pretrained_model_name_or_path=built_in())
        return self.accelerator

    def fit(self, workload: Workload) -> None:
        """Chooses the policy and the batch size that the flags leave open, and applies the policy."""
        accelerator = self.accelerator
        self.fitted = fit(
            workload, self.args, self.settings, accelerator.device, lambda: launch_of(accelerator),
            "train_batch_size",
        )  # fmt: skip
        self.args = self.fitted.args
        accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.memory = Session(self.fitted, accelerator)
        self.memory.apply(workload.model)
        workload.model.to(accelerator.device)  # after `swap`, whose weights stay behind

    def train(self, data: Data) -> None:
        """Makes the optimizer, continues from the checkpoint, makes all steps, and saves the result.

        Raises:
            Interrupted: a signal stopped the run before its end.
        """
        self._prepare(len(data.samples), data.family)
        self._resume()
        signal = self._make_steps(data)
        self._save_results(data)
        if not self.done:
            raise stopped(signal, last_complete_checkpoint(self.directory.path))

    @property
    def done(self) -> bool:
        return self.step >= self.total_steps

    @property
    def trained(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def _prepare(self, rows: int, family: Family) -> None:
        """Makes optimizer, schedule and moving average, and prepares the model; rows: images of an epoch."""
        model_args, args, accelerator = self.model_args, self.args, self.accelerator
        model = self.fitted.workload.model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.per_step = args.train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
        self.total_steps = args.max_train_steps or args.num_train_epochs * -(-rows // self.per_step)
        scale = self.per_step if args.scale_lr else 1
        text_rate = getattr(model_args, "text_rate", None)
        groups = parameter_groups(model, None if text_rate is None else text_rate * scale)
        optimizer = make_optimizer(groups, args, args.learning_rate * scale)
        self.lr_scheduler = get_scheduler(
            args.lr_scheduler, optimizer, num_warmup_steps=args.lr_warmup_steps, num_training_steps=self.total_steps
        )
        self.ema = EMAModel(self.parameters) if args.use_ema else None
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        register_checkpoint_hooks(accelerator, family, lora=model_args.adapts)
        self._identity = {
            "rank": model_args.rank, "peft": kind_of(model_args.peft_config), "use_ema": args.use_ema,
            "optimizer": None if args.optimizer == "adamw" else args.optimizer,
            "processes": accelerator.num_processes,
            "train_text_encoder": text_rate is not None or None,  # older checkpoints do not say
        }  # fmt: skip

    def _resume(self) -> None:
        args, accelerator = self.args, self.accelerator
        set_seed(args.seed, device_specific=True)  # each rank draws noise of its own
        if self.directory.checkpoint is not None:
            state = load_checkpoint(accelerator, self.directory.checkpoint, self._identity)
            self.step, self.samples_seen = state["step"], state["samples_seen"]
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
            for weight, copy in getattr(self.optimizer.optimizer, "param_d2h_map", {}).items():
                copy.data.copy_(weight.data)  # torchao's, made before the weights were loaded
            if self.ema is not None:
                self.ema.load_state_dict(state["ema"])
                self.ema.to(accelerator.device)
        if args.report_to != "none":
            flags = (self.model_args, self.image_args, args, self.settings)
            values = {f.name: str(getattr(given, f.name)) for given in flags for f in fields(given)}
            accelerator.init_trackers(args.tracker_project_name, {**values, "policy": str(self.memory.policy)})
        self.directory.clear()

    def _make_steps(self, data: Data) -> int | None:
        """Makes all remaining steps, or those until Ctrl-C or a scheduler's SIGTERM; returns the signal's number."""
        args, accelerator, memory = self.args, self.accelerator, self.memory
        batches = endless_batches(
            data.samples, args, self.image_args.dataloader_num_workers, accelerator, self.samples_seen
        )
        if self.step == 0:
            self._validate(data.validation)
        losses = LossLog(accelerator, args.output_dir, self.step)
        compute_loss = losses.recording(self.fitted.workload.compute_loss)
        progress = tqdm(
            total=self.total_steps, initial=self.step, disable=not accelerator.is_main_process, desc="steps"
        )
        stopping = False
        with (
            progress,
            Stop() as stop,
            FirstStep("training cannot begin with these flags") as first,
            advise_on_oom(memory, "train_batch_size"),
            memory.measure(self.model, self.optimizer, self.total_steps - self.step),
        ):
            while not (self.done or stopping):
                first.begins()
                optimizer_step(
                    self.model, self.optimizer, self._micro_batches(batches, data.noisy), compute_loss,
                    max_grad_norm=args.max_grad_norm, parameters=self.parameters, engine=accelerator,
                )  # fmt: skip
                memory.step()
                first.made()
                self.step, self.samples_seen = self.step + 1, self.samples_seen + self.per_step
                progress.update()
                progress.set_postfix(loss=f"{losses.step(self.step, self.lr_scheduler.get_last_lr()[0]):.4f}")
                self.lr_scheduler.step()
                if self.ema is not None:
                    self.ema.step(self.parameters)
                stopping = stop.agreed() and not self.done
                if self.step % args.checkpointing_steps == 0 or stopping:
                    self._save_checkpoint()
                if self.step % args.validation_steps == 0 and not self.done:
                    self._validate(data.validation)
                if not self.done:
                    memory.begin_step()  # checkpoints and validation are not part of a step
        return stop.signal

    def _micro_batches(self, batches: Iterator[Any], noisy: NoisyBatches) -> Iterator[Batch]:
        """Those of one step; the first step's are checked with and without the policy (--ac_check)."""
        for batch in map(noisy, islice(batches, self.args.gradient_accumulation_steps)):  # lazily
            if self.memory.profiler is not None and self.memory.profiler.measuring:
                noisy.largest = max(noisy.largest, noisy.size, key=math.prod)
            if self.step == 0:
                self.memory.check(batch["inputs"])
            yield batch

    def _save_checkpoint(self) -> None:
        state = {
            "step": self.step, "samples_seen": self.samples_seen, "identity": self._identity,
            "lr_scheduler": self.lr_scheduler.state_dict(), "ema": None if self.ema is None else self.ema.state_dict(),
        }  # fmt: skip
        save_checkpoint(self.accelerator, self.directory, self.step, state, self.args.checkpoints_total_limit)

    def _validate(self, validation: Validation) -> None:
        """Draws the validation prompts on the main process, with the averaged weights if there are any."""
        if not validation.prompts:
            return
        if self.accelerator.is_main_process:
            with never_fatal("validation"), averaged(self.ema, self.parameters):
                validation.run(self.trained, self.accelerator, self.step)
        self.accelerator.wait_for_everyone()

    def _save_results(self, data: Data) -> None:
        """Writes adapters or a pipeline, the sheet of samples, and the memory report."""
        model_args, args, accelerator, validation = self.model_args, self.args, self.accelerator, data.validation
        if self.done:
            with averaged(self.ema, self.parameters):
                write_on_ranks(
                    accelerator, self.directory, "the result",
                    lambda: save_result(self.trained, data.family, validation.vae, model_args, args.output_dir),
                    main_only=True,
                )  # fmt: skip
            self._validate(validation)
            if validation.prompts and accelerator.is_main_process:
                with never_fatal("drawing samples.png"):
                    validation.write_sheet(Path(args.output_dir, "samples.png"))
        # DDP's wrapper must go before the process group. If it held the group's last reference, torch would join
        # gloo's thread with the GIL held, while that thread may wait for the GIL to free its last tensors: a deadlock.
        self.model = self.trained
        accelerator.free_memory()
        workload, size = self.fitted.workload, math.prod(data.noisy.largest)
        step = replace(workload, lengths=None, make_batch=lambda *_: workload.make_batch(args.train_batch_size, size))
        self.memory.write_report(
            args.output_dir, workload=lambda: step,
            model=model_args.pretrained_model_name_or_path, train_batch_size=args.train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps, resolution=validation.size,
            rank=model_args.rank, peft=kind_of(model_args.peft_config),
        )  # fmt: skip
        accelerator.end_training()


def make_optimizer(
    parameters: list[dict[str, Any]], args: LoopArguments, learning_rate: float
) -> torch.optim.Optimizer:
    """Returns the optimizer of the flags.

    AdamW is fused: it makes no temporaries, while torch's default on CUDA makes some as large as the weights.
    8-bit AdamW is bitsandbytes'. Adafactor is transformers', at the given rate. Prodigy is set up as in diffusers'
    scripts.
    """
    settings: dict[str, Any] = {"lr": learning_rate, "weight_decay": args.adam_weight_decay}
    if args.optimizer == "adafactor":
        return Adafactor(parameters, **settings, scale_parameter=False, relative_step=False)
    settings |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optimizer == "prodigy":
        from prodigyopt import Prodigy

        return Prodigy(parameters, **settings, use_bias_correction=True, safeguard_warmup=True)
    if args.use_8bit_adam:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **settings)
    if args.offload_optimizer:
        return OffloadedAdamW(parameters, offload_gradients=args.offload_optimizer == "gradients", **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)


@contextmanager
def averaged(ema: EMAModel | None, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Replaces `parameters` by their moving average, if there is one, until the context ends."""
    if ema is None:
        yield
        return
    ema.store(parameters)
    ema.copy_to(parameters)
    try:
        yield
    finally:
        ema.restore(parameters)


class LossLog:
    """Writes a line `{"step", "loss", "lr"}` per optimizer step to `losses.jsonl`, and logs it to the trackers.

    The loss is averaged over micro-batches and ranks. On resume, the lines of steps that will be repeated are deleted.

    Args:
        step: the optimizer steps done so far; later lines come from steps after the checkpoint.
    """

    def __init__(self, accelerator: Accelerator, output_dir: str, step: int) -> None:
        self.accelerator = accelerator
        self.path = Path(output_dir) / LOSSES
        self._losses: list[Tensor] = []
        if accelerator.is_main_process:
            kept = [line for line in read_losses(output_dir) if line["step"] <= step]
            write(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def recording(self, compute_loss: Loss) -> Loss:
        """Returns `compute_loss` wrapped to note each value; this does not synchronize the device."""

        def recorded(model: Forward, batch: Batch) -> Tensor:
            loss = compute_loss(model, batch)
            self._losses.append(loss.detach())
            return loss

        return recorded

    def step(self, step: int, learning_rate: float) -> float:
        """Write, track and return the mean loss since the last call, over all ranks. Called on every rank."""
        loss = self.accelerator.gather(torch.stack(self._losses).mean()).mean().item()
        self._losses.clear()
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss, "lr": learning_rate}) + "\n")
        self.accelerator.log({"train_loss": loss, "lr": learning_rate}, step=step)
        return loss


def read_losses(output_dir: str) -> list[dict[str, float]]:
    """Returns the lines of a run's log; a killed run may leave its last line unfinished, which is left out."""
    path = Path(output_dir) / LOSSES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
