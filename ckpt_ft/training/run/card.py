"""The model card: Trainer's own, with what training needed in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpt_ft.files import write

if TYPE_CHECKING:
    from transformers import Trainer

    from ckpt_ft.memory.measure.report import MemoryReport


class Answer(NamedTuple):
    """What the model was given, and what it made of it."""

    prompt: str
    text: str


def write_model_card(
    trainer: Trainer, report: MemoryReport | None, *, dataset: str | None = None, answers: Sequence[Answer] = ()
) -> None:
    """Write `README.md` into the output directory, on the main process; with `push_to_hub`, upload everything first.

    `dataset` is named in the card unless it is a local path; `answers` stand in it as they were made.
    """
    args = trainer.args
    named = {"dataset": dataset} if dataset and not Path(dataset).exists() else {}
    if args.push_to_hub:
        trainer.push_to_hub(**named)  # writes and uploads its own card, so ours follows
    else:
        trainer.create_model_card(**named)
    sections = [*([_sample(answers)] if answers else []), *([_section(report)] if report is not None else [])]
    if not sections or not trainer.is_world_process_zero():
        return
    card = Path(args.output_dir) / "README.md"
    write(card, "\n\n".join([card.read_text(encoding="utf-8").rstrip(), *sections]) + "\n")
    if args.push_to_hub:
        from huggingface_hub import upload_file

        upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=trainer.hub_model_id, token=args.hub_token)


def _sample(answers: Sequence[Answer]) -> str:
    """Prompts and answers as a part of the card, in fences that nothing in them ends."""
    blocks = [f"`````text\n{answer.prompt.strip()}\n--> {answer.text.strip()}\n`````" for answer in answers]
    return "## A sample\n\nGreedy answers, behind the arrows, to prompts of the data.\n\n" + "\n\n".join(blocks)


def _section(report: MemoryReport) -> str:
    """The report as a part of the card: its headings one level down."""
    lines = report.to_markdown().strip().splitlines()
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in lines)
