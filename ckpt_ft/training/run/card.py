"""The model card: Trainer's own, with what training needed in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpt_ft.errors import WorkFailed, one_line
from ckpt_ft.files import write
from ckpt_ft.training.session import never_fatal

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

    `dataset` is named in the card unless it is a local path; `answers` stand in it as they were made. A card that
    cannot be written is a warning.

    Raises:
        WorkFailed: the upload failed; the weights are in the output directory.
    """
    args = trainer.args
    named = {"dataset": dataset} if dataset and not Path(dataset).exists() else {}
    if args.push_to_hub:
        with _uploading(trainer):
            trainer.push_to_hub(**named)  # writes and uploads its own card, so ours follows
    sections = [*([_sample(answers)] if answers else []), *([_section(report)] if report is not None else [])]
    ours = bool(sections) and trainer.is_world_process_zero()
    with never_fatal("writing the model card"):
        if not args.push_to_hub:
            trainer.create_model_card(**named)
        if ours:
            card = Path(args.output_dir) / "README.md"
            write(card, "\n\n".join([card.read_text(encoding="utf-8").rstrip(), *sections]) + "\n")
    if args.push_to_hub and ours:
        from huggingface_hub import upload_file

        with _uploading(trainer):
            upload_file(
                path_or_fileobj=Path(args.output_dir) / "README.md", path_in_repo="README.md",
                repo_id=trainer.hub_model_id, token=args.hub_token,
            )  # fmt: skip


@contextmanager
def _uploading(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the network, the Hub, the repository
        out = trainer.args.output_dir
        raise WorkFailed(
            f"--push_to_hub: the upload failed ({one_line(f'{type(error).__name__}: {error}', 300)}); all that was "
            f"trained is in {out}: `hf upload {trainer.hub_model_id} {out}` sends it"
        ) from error


def _sample(answers: Sequence[Answer]) -> str:
    """Prompts and answers as a part of the card, in fences that nothing in them ends."""
    blocks = [f"`````text\n{answer.prompt.strip()}\n--> {answer.text.strip()}\n`````" for answer in answers]
    return "## A sample\n\nGreedy answers, behind the arrows, to prompts of the data.\n\n" + "\n\n".join(blocks)


def _section(report: MemoryReport) -> str:
    """The report as a part of the card: its headings one level down."""
    lines = report.to_markdown().strip().splitlines()
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in lines)
