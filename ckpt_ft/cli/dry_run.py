"""`ckpt-ft dry-run`: what a training script costs on a card, without the card and without a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.planning.results import Estimate, Suggestion, Suggestions
from ckpt_ft.policy import Policy
from ckpt_ft.spec.command import launch_words
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import SIZES, Launch
from ckpt_ft.tables import print_table
from ckpt_ft.units import format_bytes

from .console import progress, stdout
from .estimate import estimates_table, print_figures, print_ways
from .params import AsJson, Html, cards_of

if TYPE_CHECKING:
    from ckpt_ft.host.script import Answer, Script

Module = Annotated[str, typer.Option("-m", metavar="MODULE", help="run a module, as python -m does")]


def dry_run(
    words: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT ARGS...", help="as after python")] = None,
    module: Module = "",
    device: Annotated[str, typer.Option(help="a card, or several with commas; 'cpu' for this CPU")] = "",
    policy: Annotated[
        list[str] | None, typer.Option(help="apply this policy first; several are compared (--policy none,full)")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="look at the first N steps; the highest one counts")] = 3,
    rows: Annotated[str, typer.Option(help="'all': batches with the longest rows of the dataset come first")] = "",
    html: Html = "",
    as_json: AsJson = False,
    launch: Annotated[
        str, typer.Option(help="one of several GPUs: ddp, fsdp2, or a configuration of accelerate")
    ] = "",
    processes: Annotated[int | None, typer.Option(min=1, help="number of GPUs of --launch")] = None,
) -> None:
    """Predict peak memory and time of a training script's step, without a GPU and without weights.

    The script runs as it is (Trainer, Accelerate, TRL, diffusers, Lightning or a loop of its own) up to its first
    training step, and sees the card that is asked about. Options of the script come after its name.
    """
    from ckpt_ft.host.script import AS_IT_IS, OTHERWISE, Question, Script, ask

    script = Script.of(words or (), module)
    if rows not in ("", "all"):
        raise UserError(f"--rows {rows}: give 'all', or leave it out for batches as the script makes them")
    script.check()
    launched, launcher = _launch(launch, processes)
    machine = ("--machine_rank", "RANK", "--main_process_ip", "HOST") if launched and launched.machines > 1 else ()
    policies = tuple(several(policy or [])) or (AS_IT_IS,)
    cards = cards_of(device)
    if html and (len(cards) > 1 or len(policies) > 1):
        raise UserError("--html shows one step: give one --device and one --policy")
    found: list[Estimate] = []
    known: list[tuple[GPU | None, list[Answer]]] = []
    with progress() as say:
        for card in cards:
            say(f"running {script.name} up to its first training step, for {card.name if card else 'the CPU'}")
            answers = _of_same_kernels(card, known)
            if not answers:
                only = len(cards) == len(policies) == 1 and card is not None
                otherwise = OTHERWISE if only and policies == (AS_IT_IS,) else ()
                capacity = card.usable if card else None
                answers = ask(
                    Question(script, card, policies, steps, capacity, otherwise, bool(rows), None, launched, launcher)
                )
                known.append((card, answers))
            found += _estimates(script, card, answers)
    several_asked = len(cards) > 1 or len(policies) > 1
    first = found[0] if several_asked else _with_ways(found[0], found[1:], script, (*launcher, *machine))
    if as_json:
        entries = [{**asdict(one), "headroom": one.headroom} for one in (first, *found[1:])]
        print(json.dumps(entries if several_asked else entries[0], indent=2))
    elif several_asked:
        _print_table(found, script, (*launcher, *machine))
    else:
        print_figures(first)
        if first.answer is not None and first.answer.ways:
            print_ways(first.answer, stdout())
        elif first.answer is not None:
            print(
                f"no policy that was tried fits: the leanest needs {format_bytes(first.answer.needed)}; a smaller "
                "batch or shorter rows are options of the script"
            )
    if html:
        from ckpt_ft.export.page import estimate_page

        trace = known[0][1][0].trace
        assert trace is not None
        estimate_page(first, trace).write(html)


def _launch(named: str, processes: int | None) -> tuple[Launch | None, tuple[str, ...]]:
    """The launch that is asked about, and the options of `accelerate launch` for it.

    Raises:
        UserError: there is no such launch, or a dry run does not know it.
    """
    fields = fields_of({"launch": named, "processes": processes})
    if "launches" in fields:
        raise UserError(f"--launch {named}: on how many GPUs? give --processes")
    launch: Launch | None = fields.get("launch")
    if launch is None:
        return None, ()
    unknown = [name for name in (*SIZES, "ep") if getattr(launch, name) > 1]
    unknown += [launch.strategy] if launch.stage else []
    if unknown:
        raise UserError(
            f"--launch {named}: a dry run knows ddp and fsdp2, and this is {unknown[0]}; describe the run to "
            f"`ckpt-ft estimate MODEL --launch {named}`"
        )
    if launch.processes == 1:
        raise UserError(f"--launch {named}: it is of one process; leave it out, or give --processes 2 or more")
    if Path(named).suffix:
        return launch, ("--config_file", named, "--num_processes", str(launch.processes))
    return launch, tuple(launch_words(launch))


def several(given: Sequence[str]) -> Iterator[str]:
    """The policies that `given` names: 'full,head' is one, 'none,full,pointwise' are three.

    A text whose words make one policy is that policy. In another one each word begins a policy, except for those that
    go with any (head, offload, tile, swap).

    Raises:
        UserError: a word is no policy's.
    """
    for text in given:
        with suppress(UserError):
            yield str(Policy.parse(text))
            continue
        terms: list[list[str]] = []
        for term in text.split(","):
            if not terms or not term.strip().startswith(("head", "offload", "tile", "swap")):
                terms.append([])
            terms[-1].append(term)
        yield from (str(Policy.parse(",".join(one))) for one in terms)


def _of_same_kernels(card: GPU | None, known: Sequence[tuple[GPU | None, list[Answer]]]) -> list[Answer]:
    """The answers that are `known` for a card with the same kernels, for this card; none if there is no such."""
    for other, answers in known:  # an import of torch waits until the first script runs
        from ckpt_ft.memory.rules.cuda import same_kernels
        from ckpt_ft.planning.tracing import on_card

        if card and other and same_kernels(card) == same_kernels(other):
            return [replace(one, trace=one.trace and on_card(one.trace, card)) for one in answers]
    return []


def _estimates(script: Script, card: GPU | None, answers: Sequence[Answer]) -> Iterator[Estimate]:
    """The estimate of each answer without an error; raises UserError if the first answer is an error."""
    from ckpt_ft.planning.estimate import of_trace

    for number, answer in enumerate(answers):
        if answer.trace is None:
            if number == 0:
                raise UserError(answer.error)
            continue
        batches = answer.batches or [{}]  # the step is of another model
        largest = max([next(iter(batch.values()), (1,)) for batch in batches], key=lambda size: size[:2])
        given = "; ".join(f"{name} {'x'.join(map(str, size))}" for name, size in batches[0].items())
        looked = f"step {answer.step} of the {answer.steps} looked at is the highest: {given}"
        yield replace(
            of_trace(answer.trace, card, answer.trace.launch, card.memory if card else None),
            model=f"{Path(script.name).name}: {answer.model}",
            policy=answer.policy or "as the script has it",
            batch_size=largest[0] if largest else 1,
            accumulation=len(batches),
            notes=[looked, *answer.trace.notes],
        )


def _with_ways(first: Estimate, others: Sequence[Estimate], script: Script, launcher: Sequence[str]) -> Estimate:
    """`first` with the policies under which the step fits, if it does not fit by itself."""
    from ckpt_ft.host.script import run_command

    if first.headroom is None or first.headroom >= 0:
        return first
    ways = [
        Suggestion(
            f"--policy {one.policy}", one.peak_reserved, (one.seconds or 0) / (first.seconds or 1) - 1,
            command=run_command(script, one.policy, launcher),
        )
        for one in others
        if one.headroom is not None and one.headroom >= 0
    ]  # fmt: skip
    least = min(one.peak_reserved + one.context for one in (first, *others))
    return replace(first, answer=Suggestions(sorted(ways, key=lambda way: way.slower), 0 if ways else least))


def _print_table(found: Sequence[Estimate], script: Script, launcher: Sequence[str]) -> None:
    """One row for each card and policy, and the command under the fastest policy that fits."""
    from ckpt_ft.host.script import run_command

    console = stdout()
    rows = [((one.device, one.policy), one) for one in found]
    each = f", each GPU of {found[0].launch}" if found[0].launch else ""
    print_table(estimates_table(f"{found[0].model}, predicted{each}", ("device", "policy"), rows), console)
    for note in dict.fromkeys(note for one in found for note in one.notes):
        console.print(f"note: {note}", markup=False)
    fitting = [one for one in found if (one.headroom or 0) >= 0 and one.seconds]
    if fitting:
        best = min(fitting, key=lambda one: one.seconds or 0)
        policy = "" if best.policy == "as the script has it" else best.policy
        command = run_command(script, policy, launcher)
        console.print(f"fastest that fits, on {best.device}: {command}", markup=False, soft_wrap=True)
