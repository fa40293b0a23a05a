"""Fits a run to memory: plans what `--ac_policy auto`, `--find_max_batch_size` and `--find_max_length` leave open.

`ACCallback.attach` calls `fit` with the workload of its trainer (workloads/from_trainer.py), the diffusion recipes
call it with the workload of their loop (diffusion/workload.py). `launch_of` describes the distributed launch as a
`Launch` that a trace can model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.compat.libraries import parallel_plans
from ckpt_ft.errors import UserError
from ckpt_ft.memory.measure.report import MaxBatch
from ckpt_ft.planning.batch_size import MaxBatchSize, find_max_batch_size, keep_effective, predict_max_batch_size
from ckpt_ft.planning.max_length import LADDER, find_max_length, predict_max_length
from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.results import Plan
from ckpt_ft.policy import Policy
from ckpt_ft.spec.launch import Launch, ZeroOptions
from ckpt_ft.spec.settings import read_settings
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.from_trainer import check_trainer, planned_step
from ckpt_ft.workloads.workload import Workload

from .arguments import ACArguments, TextACArguments
from .checkpoints import print_on_main
from .flags import changed

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)
_MAX_BATCH_SIZE = 1024  # samples of a micro-batch
_LOOP_SHARE = 0.05  # share of a CPU's budget for the loop outside of the step (prefetched batches, logging)


def launch_of(accelerator: Accelerator, prepared: bool = True, model: Any = None) -> Launch | None:
    """The launch of `accelerator` and this process's rank in it; None for one process.

    Args:
        prepared: whether the model is prepared; DeepSpeed's engine changes it then.
        model: the model, which transformers may have divided by its DistributedConfig.

    Raises:
        UserError: the launch is not modelled.
    """
    if accelerator.num_processes == 1:
        return None
    deepspeed, fsdp = (getattr(accelerator.state, f"{name}_plugin", None) for name in ("deepspeed", "fsdp"))
    handler = accelerator.ddp_handler
    sharing: dict[str, Any] = {}
    if deepspeed is not None:
        if prepared:
            raise UserError("what DeepSpeed's engine has made of model and optimizer is not traced")
        config = deepspeed.deepspeed_config
        reduce = config.get("seq_parallel_communication_data_type")
        read_settings(config["zero_optimization"], ["deepspeed.zero_optimization"], "launch")
        options = ZeroOptions.read(config["zero_optimization"], "launch", reduce)
        sharing = {"strategy": f"zero{deepspeed.zero_stage}", "zero": options}
    elif fsdp is not None:
        sharing = _fsdp2(fsdp)
    elif handler is not None:
        sharing = {name: getattr(handler, name) for name in ("gradient_as_bucket_view", "find_unused_parameters")}
    precision = accelerator.mixed_precision
    if (divided := getattr(getattr(model, "config", None), "distributed_config", None)) is not None:
        sharing = _divided(divided, precision)
    else:
        sharing |= _sizes(accelerator.parallelism_config, sharing)
    state = PartialState()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
    return Launch(
        **sharing, mixed_precision=precision, processes=state.num_processes,
        machines=max(state.num_processes // here, 1), rank=state.process_index,
    )  # fmt: skip


def _divided(config: DistributedConfig, mixed_precision: str) -> dict[str, Any]:
    """How transformers divides weights and experts: fields of a launch in this precision."""
    if parallel_plans is None:
        raise UserError("DistributedConfig: what transformers divides is predicted from transformers 5.23 on")
    names = ("tp_size", "fsdp_size", "dp_replicate_size", "ep_size")
    sizes = {name: getattr(config, name) for name in names}
    other = replace(config, tp_plan=None if config.tp_plan == "auto" else config.tp_plan, ep_implementation="auto")
    expected = DistributedConfig(**sizes, fsdp_mixed_precision=config.dp_size > 1 and mixed_precision == "bf16")
    if other != expected or config.ep_implementation not in ("auto", "all_to_all"):
        raise UserError(
            f"DistributedConfig: {', '.join(names)} are predicted, fsdp_mixed_precision under bf16, and no others"
        )
    fields = {name.removesuffix("_size"): sizes[name] for name in ("tp_size", "dp_replicate_size", "ep_size")}
    return {**fields, "strategy": "fsdp2" if config.dp_size > 1 else "ddp"}


def parallelism_of(args: TrainingArguments) -> ParallelismConfig:
    """How a Trainer with `args` shares sequences and weights, by default as `accelerate launch` says."""
    return args.parallelism_config or ParallelismConfig()  # which reads the environment


def _sizes(config: ParallelismConfig | None, sharing: Mapping[str, Any]) -> dict[str, Any]:
    """How sequences and weights are shared besides `sharing`: fields of a launch."""
    if config is None or config.total_size == 1:
        return {}
    sizes = {name: getattr(config, f"{name}_size") for name in ("tp", "cp", "sp")}
    if sharing.get("strategy") == "fsdp2":
        sizes["dp_replicate"] = config.dp_replicate_size
    rotation = {"rotation": config.cp_handler.cp_comm_strategy} if config.cp_handler else {}
    return {**sizes, **rotation}


def _fsdp2(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    if plugin.fsdp_version != 2:
        raise UserError("FSDP of version 1 is not modelled; set fsdp_version: 2")
    wraps: Any = plugin.auto_wrap_policy
    wraps = wraps.func if isinstance(wraps, partial) else wraps  # a partial after set_auto_wrap_policy
    if wraps not in (None, transformer_auto_wrap_policy):
        raise UserError(
            "FSDP2 that wraps modules by their size is not modelled; set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        )
    return {
        "strategy": "fsdp2",
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "wrap": None if wraps is None else tuple(plugin.transformer_cls_names_to_wrap or ()),
    }


def found_by_main(find: Callable[[], Answer]) -> Answer:
    """Runs `find` on the main process; every process must call this, and gets its answer or its UserError."""
    state = PartialState()
    found: list[Any] = [None]
    if state.is_main_process:
        try:
            found = [find()]
        except UserError as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], UserError):
        raise found[0]
    return found[0]


@dataclass(frozen=True)
class Fitted:
    """The settings of a training run after everything that the flags leave open is chosen.

    Attributes:
        workload: the workload, with the accumulation of `args`; it holds the model.
        args: the Trainer's or the loop's, with the micro-batch and the accumulation that were found.
        settings: the flags as given.
        plan: set under `--ac_policy auto` or a plan file.
        largest: set under `--find_max_batch_size`.
    """

    workload: Workload
    args: Any  # TrainingArguments or LoopArguments
    settings: ACArguments
    plan: Plan | None = None
    largest: MaxBatchSize | None = None

    @property
    def policy(self) -> Policy | None:
        """The plan's pick, otherwise the given policy; None leaves the model unchanged."""
        return self.settings.policy if self.plan is None else Policy.parse(self.plan.best.policy)

    @property
    def max_batch(self) -> MaxBatch | None:
        if self.largest is None:
            return None
        device = self.plan.device if self.plan else str(next(self.workload.model.parameters()).device)
        return MaxBatch(device, self.largest.predicted, self.largest.batch)


def fit(
    workload: Workload,
    args: Any,
    settings: ACArguments,
    device: torch.device,
    launch: Callable[[], Launch | None],
    batch_name: str = "per_device_train_batch_size",
) -> Fitted:
    """Chooses what `auto`, a plan file and `--find_max_batch_size` leave open; given values do not change.

    With several processes, the main one plans for all, for their distributed launch.

    Args:
        workload: the model on any device; to confirm a batch size it is moved to `device`, where it is trained.
        args: TrainingArguments or LoopArguments.
        launch: returns the distributed launch; if it raises UserError, the step is planned for one process.
        batch_name: the name of the micro-batch in `args`.

    Raises:
        UserError: nothing fits, the plan is for another model, there is no budget on a CPU, or the request needs a
            single process.
    """
    fitted = Fitted(workload, args, settings)
    if settings.plan is not None:
        settings.plan.check_model(workload.model, f"--ac_policy {settings.ac_policy}")
        fitted = replace(fitted, plan=settings.plan)
    automatic = settings.ac_policy == "auto"
    if not automatic and not settings.find_max_batch_size:
        return fitted
    shared = _under_launch(workload, launch, "--ac_policy auto" if automatic else "--find_max_batch_size")
    fitted = replace(fitted, workload=shared)
    if automatic:
        batch_size = None if settings.find_max_batch_size else getattr(args, batch_name)
        more: dict[str, Any] = {"margin": _cpu_margin(shared), "batch_size": batch_size, "report": logger.info}
        made = found_by_main(lambda: plan(shared, settings.ac_budget, **more))
        fitted = replace(fitted, plan=made)
        print_on_main(f"--ac_policy auto: {made.why}\n{made.table()}")
    return _with_largest_batch(fitted, device, batch_name) if settings.find_max_batch_size else fitted


def _under_launch(workload: Workload, launch: Callable[[], Launch | None], flag: str) -> Workload:
    """Returns `workload` under its launch, or for one process where the launch is not modelled and the model whole."""
    try:
        return replace(workload, launch=launch())
    except UserError as error:
        if any(parameter.is_meta for parameter in workload.model.parameters()):
            raise UserError(f"{flag}: {error}") from error
        logger.warning("%s: what follows is planned for one process", error)
        return replace(workload, launch=None)


def fit_length(trainer: Trainer, settings: TextACArguments, most: int) -> tuple[TextACArguments, int]:
    """Finds the longest sequence whose training step fits, for the micro-batch of `trainer`.

    Sequences repeat the longest row of the trainer's data. Like a largest batch, the length is predicted and then
    proved by real steps (but see `_is_only_predicted`).

    Args:
        most: tokens of the longest sequence to consider.

    Returns:
        `settings`, in which the policy of the longest sequence takes the place of `auto`, and tokens.

    Raises:
        UserError: as `fit`.
    """
    flag, args, budget = "--find_max_length", trainer.args, settings.ac_budget
    launch = partial(launch_of, trainer.accelerator, prepared=False, model=trainer.model)
    workload = _under_launch(live_workload(trainer, flag, any_length=True), launch, flag)
    more: dict[str, Any] = {"most": most, "margin": _cpu_margin(workload)}
    more["batch_size"] = args.per_device_train_batch_size
    predicted = _is_only_predicted(workload, settings.policy)
    found = None
    if settings.ac_policy == "auto" or predicted:
        policies = LADDER if settings.ac_policy == "auto" else [str(settings.policy or "none")]
        found = found_by_main(lambda: predict_max_length(workload, policies, budget, **more))
        if found.length and settings.ac_policy == "auto":
            settings = replace(settings, ac_policy=found.ladder[0].policy)
    if not predicted and (found is None or found.length):
        found = _run_under(workload, settings.policy, args.device, lambda: find_max_length(workload, budget, **more))
    assert found is not None
    if not found.length:
        raise UserError(
            f"{flag}: not even {found.granularity} tokens fit in {format_bytes(found.room.budget)} under "
            f"--ac_policy {settings.ac_policy}; choose a policy that keeps less, or a larger budget"
        )
    print_on_main(f"{flag}: {found}, under --ac_policy {settings.ac_policy}")
    return settings, found.length


def live_workload(trainer: Trainer, flag: str, any_length: bool = False) -> Workload:
    """Returns the workload of a trainer's step; warns of a setting that is not modelled."""
    compiled = ""
    try:
        compiled = check_trainer(trainer)
    except UserError as error:  # the run is the user's
        logger.warning("%s: the plan is of a run without %s", flag, error)
    return Workload(**planned_step(trainer, flag, any_length), compile=compiled)


def _with_largest_batch(fitted: Fitted, device: torch.device, batch_name: str) -> Fitted:
    """Returns `fitted` with the largest micro-batch that preserves the effective batch size.

    Gradients persist between micro-batches, so a batch that fits as a whole step may not fit as one of several. The
    search is repeated with the number of micro-batches that follows from its result.
    """
    args, most = fitted.args, _MAX_BATCH_SIZE
    while True:
        found = _largest(fitted, device, most)
        batch, steps, note = keep_effective(getattr(args, batch_name), args.gradient_accumulation_steps, found.batch)
        more = steps > fitted.workload.accumulation
        fitted = replace(fitted, workload=replace(fitted.workload, accumulation=steps))
        if not more:
            break
        most = found.batch
    print_on_main(f"--find_max_batch_size: {found}\n{note}")
    args = changed(args, **{batch_name: batch}, gradient_accumulation_steps=steps)
    return replace(fitted, args=args, largest=found)


def _largest(fitted: Fitted, device: torch.device, most: int) -> MaxBatchSize:
    """Returns the largest micro-batch, confirmed by real steps (but see `_is_only_predicted`)."""
    workload, budget = fitted.workload, fitted.settings.ac_budget
    more: dict[str, Any] = {"margin": _cpu_margin(workload), "max_batch_size": most}
    if _is_only_predicted(workload, fitted.policy):
        policy = str(fitted.policy or "none")
        return found_by_main(lambda: predict_max_batch_size(workload, policy, budget, **more))
    return _run_under(workload, fitted.policy, device, lambda: find_max_batch_size(workload, budget, **more))


def _is_only_predicted(workload: Workload, policy: Policy | None) -> bool:
    """Whether no real step confirms a prediction.

    A step of the whole model says nothing about the shards of a model that will be sharded. Under `swap` the whole
    model may not fit.
    """
    return bool(policy and policy.swap) or (workload.launch is not None and workload.launch.shards)


def _run_under(workload: Workload, policy: Policy | None, device: torch.device, find: Callable[[], Answer]) -> Answer:
    workload.model.to(device)
    with ExitStack() as stack:
        if policy is not None:
            stack.callback(apply_policy(workload.model, policy).remove)
        return find()


def _cpu_margin(workload: Workload) -> float | None:
    """Returns the share of a CPU's budget to keep free; None on a GPU, where the planner has its own margin."""
    return _LOOP_SHARE if workload.device == "cpu" else None
