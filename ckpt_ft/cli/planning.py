"""`ckpt-ft plan` and `ckpt-ft max-batch`: from a memory budget to the policy and batch size that fit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_ft.errors import NothingFits, UserError, WorkFailed
from ckpt_ft.export.holders import holders_table
from ckpt_ft.files import write
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.planning.methods import offloaded
from ckpt_ft.spec.command import can_train, recipe_of, training_command
from ckpt_ft.spec.training_spec import MOST, TrainingSpec
from ckpt_ft.tables import print_table
from ckpt_ft.units import format_at_least, format_bytes, whole_number

from .answer_cache import AnswerCache, question_of
from .console import progress, stdout
from .params import ONE_LAUNCH, AsJson, Html, takes_spec, writable

if TYPE_CHECKING:
    from ckpt_ft.planning.results import Plan, PlanRequest
    from ckpt_ft.workloads.sample_sizes import Lengths

Margin = Annotated[
    str, typer.Option("--margin", help="memory kept free beside the CUDA context; default: 2 % of the budget")
]
MaxBatchSize = Annotated[
    int, typer.Option("--max-batch-size", min=1, help="the largest micro-batch that is considered")
]


@takes_spec("policy")
def plan(
    spec: TrainingSpec,
    batch_size: Annotated[
        str | None, typer.Option("--batch-size", help="a number, or auto for all of them [default: auto]")
    ] = None,
    target: Annotated[str, typer.Option("--target", help="throughput, memory or effective_batch")] = "throughput",
    dataset: Annotated[
        str, typer.Option("--dataset", help="Hub id or local file whose rows decide the lengths, up to --seq-length")
    ] = "",
    margin: Margin = "",
    max_batch_size: MaxBatchSize = 256,
    jobs: Annotated[int, typer.Option("--jobs", min=0, max=256, help="processes that trace; 0 for one per core")] = 0,
    output: Annotated[
        str, typer.Option("--output", callback=writable, help="write the plan to this file, for --ac_policy plan.json")
    ] = "",
    html: Html = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="plan again instead of reading the answer from the cache")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the policy and batch size that are fastest within a memory budget, and what holds the peak."""
    from ckpt_ft.planning.results import Plan, PlanRequest

    batch = None if batch_size in (None, "auto") else whole_number(str(batch_size)) or 0
    if batch == 0:
        raise UserError(f"--batch-size {batch_size}: give a whole number of at least 1, or auto")
    asked = PlanRequest(
        spec.host.budget, batch, max_batch_size, target, margin or None,
        host_memory=spec.host.host_memory,
    )  # fmt: skip
    lengths = _lengths(dataset, spec) if dataset else None
    question = {
        **question_of(spec),
        "gpu": gpu_of(spec.host.device),
        "asked": vars(asked),
        "lengths": vars(lengths) if lengths else None,
    }
    cache = AnswerCache("plan", question, Plan.from_json)
    found = None if fresh or html else cache.get()
    away = offloaded(spec)
    kept = f"nothing fits with the optimizer on the card: this is with {' '.join(away.words(spec))}" if away else ""
    if found is None:
        try:
            found = _make(spec, asked, jobs, lengths, html)
        except NothingFits:
            if away is None:
                raise
            found = _make(away.of(spec), asked, jobs, lengths, html)
            found = replace(found, notes=[kept, *found.notes])
        cache.put(found.to_json())
    if as_json:
        print(found.to_json())
    else:
        print_plan(found)
        if command := _command(found, away.of(spec) if away and kept in found.notes else spec, dataset):
            print(f"train it: {command}")
    if output:
        write(output, found.to_json())


@takes_spec(*ONE_LAUNCH, "batch_size")
def max_batch(
    spec: TrainingSpec, margin: Margin = "", max_batch_size: MaxBatchSize = 256, as_json: AsJson = False
) -> None:
    """Predict the largest batch that fits under a policy, without a GPU and without weights.

    Exit code 1 if not even one sample fits. --find_max_batch_size of a recipe proves the batch by real steps.
    """
    from ckpt_ft.planning.batch_size import predict_max_batch_size
    from ckpt_ft.planning.estimate import command_of
    from ckpt_ft.workloads.load import load

    gpu = gpu_of(spec.host.device)
    with progress(f"building {spec.model.name} from its config") as say:
        workload = load(spec, gpu or "cpu")
        name = workload.name
        found = predict_max_batch_size(
            workload,
            spec.policy,
            spec.host.budget,
            max_batch_size=max_batch_size,
            margin=margin or None,
            report=say,
            host_memory=spec.host.host_memory,
        )
    device = gpu.name if gpu else "cpu"
    if as_json:
        answer = {"model": name, "policy": spec.policy, "device": device, "batch": found.batch, "needed": found.needed}
        print(json.dumps({**answer, "last": found.last, **vars(found.room)}))
    elif found.batch:
        print(f"{name} under '{spec.policy}' on {device}: {found}")
        if command := command_of(spec.edit(batch_size=found.batch), workload):
            print(f"train it: {command}")
    if not found.batch:
        beyond = f"; {found.beyond}" if found.last else ""
        host = found.room.host
        beside = "" if host is None else f" with {format_bytes(host)} of host memory"
        raise WorkFailed(
            f"{name} under '{spec.policy}' on {device}: not one sample fits in {format_bytes(found.room.budget)}"
            f"{beside}; the smallest budget that would do is {format_at_least(found.needed)}{beyond}; `ckpt-ft plan` "
            "looks for a policy that needs less"
        )


def _command(plan: Plan, spec: TrainingSpec, dataset: str) -> str:
    """The command that trains as the plan's pick says; with a recipe if one trains the model on the dataset's rows.

    "" in one process without a recipe, unless the user's own script has to patch the model.
    """
    from ckpt_ft.workloads.model_config import read_config

    best = plan.best
    changes = {"batch_size": best.batch, "accumulation": best.accumulation, "launch": best.launch}
    picked = spec.edit(policy=best.policy, **changes)
    if plan.tokens not in (0, picked.data.tokens):
        picked = picked.edit(seq_length=plan.tokens)
    recipe = recipe_of(picked, plan.kind)
    config = read_config(spec.model.name) if recipe == "llm" else {}
    if dataset and "vision_config" in config:
        recipe = ""  # recipes/llm.py reads no images
    if picked.data.tokens > config.get("text_config", config).get("max_position_embeddings", MOST):
        from transformers import AutoConfig  # which takes seconds, and most sequences do not need it

        from ckpt_ft.workloads.model_config import with_rope_scaling

        picked = with_rope_scaling(picked, AutoConfig.for_model(**config), picked.data.tokens)
    if not (best.launch or picked.kernels.cut_cross_entropy or (recipe and can_train(recipe, picked))):
        return ""
    return training_command(picked, recipe, dataset)


def _lengths(dataset: str, spec: TrainingSpec) -> Lengths:
    from ckpt_ft.training.text import dataset_lengths

    with progress(f"reading {dataset}"):
        return dataset_lengths(dataset, spec.model.name, spec.data.tokens)


def _make(spec: TrainingSpec, asked: PlanRequest, jobs: int, lengths: Lengths | None, html: str) -> Plan:
    from ckpt_ft.export.plan_page import plan_page
    from ckpt_ft.planning.budget import memory_budget
    from ckpt_ft.planning.launches import with_experts
    from ckpt_ft.planning.plan import traced_plan
    from ckpt_ft.workloads.load import load

    gpu, launches = gpu_of(spec.host.device), spec.launch.launches
    launch = launches[0] if launches else spec.launch.launch
    memory_budget(asked.budget, gpu, asked.margin, launch)  # a bad budget is reported before anything is built
    with progress(f"building {spec.model.name} from its config") as say:
        workload = load(spec, gpu or "cpu", lengths)
        if launches and not {"--launch", "--tp", "--cp", "--sp", "--ep", "--dp-replicate"} & set(spec.launch.asked):
            launches = tuple(with_experts(launches, workload.model))
        found, best = traced_plan(workload, replace(asked, launches=launches), jobs, say)
    if html:
        plan_page(found, best).write(html)
    return found


def print_plan(plan: Plan) -> None:
    """Prints the candidates, the pick and the reason for it, what holds its peak, and what else would lower it."""
    console = stdout()
    console.print(f"pick: {plan.why}\n", markup=False)
    print_table(plan.candidates_table, console)
    if plan.data:
        console.print(plan.data, markup=False)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    print_table(holders_table(plan.holders, plan.best.peak), console)
    for fix in plan.fixes:
        cost = f"{abs(fix.slower):.1%} {'slower' if fix.slower > 0 else 'faster'} a sample"
        saves = f"save {format_bytes(fix.saves)}, " if fix.saves > 0 else "be "
        console.print(f"would {saves}{cost}: {fix.change}", markup=False)
