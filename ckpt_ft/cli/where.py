"""`ckpt-ft where`: which cards a model trains on, with which method, how fast, and for how many dollars."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import current_gpu, find_gpu
from ckpt_ft.planning.methods import named_method
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.tables import DASH, Table, print_table
from ckpt_ft.units import format_at_least, format_bytes, format_number, whole_number

from .console import progress, stdout
from .params import AsJson, Html, takes_spec

if TYPE_CHECKING:
    from ckpt_ft.planning.card_table import Fit
    from ckpt_ft.planning.where import Place, Places


_MOST_GPUS = 8


@takes_spec(
    "policy", "batch_size", "launch", "processes", "machines", "link", "budget",
)  # fmt: skip
def where(
    spec: TrainingSpec,
    device: Annotated[
        str,
        typer.Option("--device", "--gpu", "--card", "--vram", help="cards, e.g. rtx-4090,h100 [default: common ones]"),
    ] = "",
    seq_length: Annotated[
        str, typer.Option("--seq-length", help="tokens of a sequence, e.g. 1024,8192 [default: 1024]")
    ] = "",
    method: Annotated[str, typer.Option("--method", help="one or more of full, LoRA and QLoRA")] = "full,LoRA,QLoRA",
    policy: Annotated[str, typer.Option("--policy", help="e.g. full; auto for the fastest of several")] = "auto",
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=64, help="the largest number of one card")] = _MOST_GPUS,
    price: Annotated[
        list[str] | None, typer.Option("--price", help="dollars an hour, e.g. rtx-4090=0.4,h100=2.5")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=0, max=256, help="processes that trace; 0 for one per core")] = 0,
    html: Html = "",
    as_json: AsJson = False,
) -> None:
    """Predict which cards a model trains on, with which method, how fast, and for how many dollars.

    Without a MODEL: what a card trains, `ckpt-ft where --device rtx-3060`, from a table of well-known models.

    A row of one card is the answer of `estimate` for its method, policy and batch; those of several cards are extended
    from models with fewer blocks. Nothing needs a GPU or weights.
    """
    methods = [name.strip() for name in method.split(",") if name.strip()]
    if not spec.model.name:
        if spec != TrainingSpec.of("") or seq_length or price or policy != "auto" or gpus != _MOST_GPUS:
            said = "without a model only --device and --method count; name a model for the others"
            print(f"note: {said}", file=sys.stderr)
        _of_cards(device, [*dict.fromkeys(map(named_method, methods))], html, as_json)
        return
    from ckpt_ft.planning.where import CARDS, POLICIES, best_of
    from ckpt_ft.planning.where import where as find_places
    from ckpt_ft.workloads.load import with_task

    prices = read_prices(price or [])
    named = [name.strip() for name in device.split(",") if name.strip()] or [*CARDS]
    cards = list({card.name: card for card in map(find_gpu, named)}.values())
    with progress(f"building {spec.model.name} from its config") as say:
        found = find_places(
            spec, cards, methods=methods, lengths=_lengths(seq_length),
            policies=POLICIES if policy == "auto" else (policy,), most_gpus=gpus, prices=prices, jobs=jobs, report=say,
        )  # fmt: skip
    spec = with_task(spec)
    tables = _tables_of(spec, found)
    if html:
        from ckpt_ft.export.page import Page, Section

        subtitle = f"weights in {spec.precision.dtype}, all figures predicted"
        best = best_of(found.rows)
        answer = "it fits on none of these cards" if best is None else f"{best[0].method} is {best[1]}"
        page = Page(f"Where {spec.title} trains", subtitle, [Section("tables", "Cards", tables)], answer=answer)
    if as_json:
        rows = [{**asdict(place), f"dollars_per_million_{found.unit}": place.dollars_per_million}
                for place in found.rows]  # fmt: skip
        print(
            json.dumps({"model": spec.title, "unit": found.unit, "places": rows, "refused": found.refused}, indent=2)
        )
    else:
        _print_places(tables, found)
    if html:
        page.write(html)


def _of_cards(device: str, methods: Sequence[str], html: str, as_json: bool) -> None:
    """Print the longest sequence of each well-known model on each card, from the stored table."""
    from ckpt_ft.planning.card_table import LENGTHS, POLICY, SPEED_AT, command_of, fits, largest

    cards = [*map(find_gpu, device.split(","))] if device else [one for one in (current_gpu(),) if one]
    if not cards:
        raise UserError("where: name a card, as in --device rtx-3060, or a model, to see which cards train it")
    found = {card.name: fits(card, methods) for card in cards}
    tables, said = [], []
    for card in cards:
        rows: dict[str, list[str]] = {one.model.rpartition("/")[2]: [] for one in found[card.name]}
        for one in found[card.name]:
            rows[one.model.rpartition("/")[2]].append(_cell(one))
        title = f"Longest sequence on {card.name}, tokens, predicted"
        words = tuple(range(len(methods) + 1))
        tables.append(Table(title, ("model", *methods), [(model, *cells) for model, cells in rows.items()], words))
        best = largest(found[card.name])
        said.append(f"{card.name}: " + ("no model of the table trains" if best is None else _said(best)))
    if html:
        from ckpt_ft.export.page import Page, Section

        name = ", ".join(found)
        sections = [Section("tables", "Models", tables)]
        Page(f"What trains on {name}", "all figures predicted", sections, answer="; ".join(said)).write(html)
    if as_json:
        print(json.dumps({card: [asdict(one) for one in rows] for card, rows in found.items()}, indent=2))
        return
    console = stdout()
    for card, line, table in zip(cards, said, tables, strict=True):
        console.print(f"{line}\n", markup=False, soft_wrap=True)
        print_table(table, console)
        if (best := largest(found[card.name])) is not None:
            console.print(f"train it on {card.name}: {command_of(best, card)}\n", markup=False, soft_wrap=True)
    console.print(
        f"one sequence, policy {POLICY}; tried: {', '.join(map(str, LENGTHS))}; in brackets tokens a second at "
        f"{SPEED_AT:,} tokens, or at the longest; swap: frozen weights wait in host memory (2 bytes "
        "a parameter, QLoRA 0.6). The exact length: ckpt-ft max-length MODEL", markup=False,
    )  # fmt: skip


def _cell(one: Fit) -> str:
    if not one.length:
        return f"needs {format_at_least(one.needed)}"
    speed = f" ({format_number(one.speed)}/s)" if one.speed else ""
    return f"{one.length:,}{'' if one.more else '+'}{speed}{' swap' if one.swap else ''}"


def _said(one: Fit) -> str:
    """The largest model as a sentence."""
    speed = f", {format_number(one.speed)} tokens/s" if one.speed else ""
    swap = f" and swap:{one.swap}" if one.swap else ""
    return f"the largest that trains is {one.model}, {one.method}{swap}: {one.length:,} tokens{speed}"


def _print_places(tables: Sequence[Table], found: Places) -> None:
    """Print the tables, what is refused, and the command of each method's best place."""
    from ckpt_ft.planning.where import best_of

    console = stdout()
    for table in tables:
        print_table(table, console)
    for name, reason in found.refused.items():
        console.print(f"not possible: {name}: {reason}", markup=False)
    if any(place.extended for place in found.rows):
        console.print(
            "note: figures on several GPUs are extended from models with fewer blocks; with all weights trained, "
            "their seconds may be a sixth too low. `ckpt-ft estimate --launch` traces the whole model.",
            markup=False,
        )
    for method in dict.fromkeys(place.method for place in found.rows):
        if best := best_of(place for place in found.rows if place.method == method):
            console.print(f"{method}, {best[1]}: {best[0].command}", markup=False, soft_wrap=True)


def read_prices(given: Sequence[str]) -> dict[str, float]:
    """Dollars an hour by the card's name, from words such as "h100=2.5,l4=0.7".

    Raises:
        UserError: an unknown card, or something that is no price.
    """
    found: dict[str, float] = {}
    for pair in (pair for text in given for pair in text.split(",")):
        card, _, dollars = pair.partition("=")
        if not re.fullmatch(r"\d+(\.\d+)?", dollars.strip()):
            raise UserError(f"--price {pair}: give dollars an hour, as in --price rtx-4090=0.4,h100=2.5")
        found[find_gpu(card.strip()).name] = float(dollars)
    return found


def _lengths(text: str) -> list[int | None]:
    lengths = [whole_number(part.strip()) for part in text.split(",")] if text else [None]
    if text and not all(lengths):
        raise UserError(f"--seq-length {text}: give whole numbers of tokens, as in 1024,8192")
    return [*dict.fromkeys(lengths)]


def _tables_of(spec: TrainingSpec, found: Places) -> list[Table]:
    """One table for each method and length; with prices the cheapest row first, else in the order of the cards."""
    priced = any(place.dollars_per_hour is not None for place in found.rows)
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in found.rows:
        groups.setdefault((place.method, place.tokens), []).append(place)
    heads = ["card", "GPUs", "policy", "batch", "reserved", "s/step", f"{found.unit}/s"]
    header = (*heads, *([f"$/M {found.unit}"] if priced else []))
    tables = []
    for (method, tokens), places in groups.items():
        if priced:
            places = sorted(places, key=lambda place: place.dollars_per_million or float("inf"))
        length = f", {tokens:,} tokens" if tokens else ""
        title = f"{spec.title}, {method}, {spec.precision.dtype}{length}"
        tables.append(Table(title, header, [_row(place, priced, found.most_gpus) for place in places], (0, 2)))
    return tables


def _row(place: Place, priced: bool, most_gpus: int) -> tuple[str, ...]:
    if place.gpus:
        figures = format_bytes(place.peak_reserved), format_number(place.seconds), format_number(place.speed)
        beside = f" with {format_bytes(place.host)} on the host" if place.host else ""
        policy = f"{place.policy}{beside}{f', {place.shorter} tokens' if place.shorter else ''}"
        cells = [place.card, str(place.gpus), policy, str(place.batch), *figures]
    else:
        cells = [place.card, f">{most_gpus}", f"one needs {format_at_least(place.needed)}", *[DASH] * 4]
    cost = place.dollars_per_million
    return (*cells, *([DASH if cost is None else f"{cost:.3g}"] if priced else []))
