"""The model card: Trainer's own card plus sample answers and the memory report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpt_ft.errors import WorkFailed, one_line
from ckpt_ft.files import write
from ckpt_ft.redact import redacted_text
from ckpt_ft.tables import code_block
from ckpt_ft.training.session import never_fatal

if TYPE_CHECKING:
    from transformers import Trainer

    from ckpt_ft.memory.measure.report import MemoryReport


class Answer(NamedTuple):
    """A prompt and the trained model's answer."""

    prompt: str
    text: str


def write_model_card(
    trainer: Trainer, report: MemoryReport | None, *, dataset: str | None = None, answers: Sequence[Answer] = ()
) -> None:
    """Write `README.md` into the output directory, on the main process; with `push_to_hub`, upload everything first.

    The card names `dataset` unless it is a local path, and shows `answers` unchanged. If the card cannot be written, a
    warning is logged.

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
            written = redacted_text(card.read_text(encoding="utf-8").rstrip())
            write(card, "\n\n".join([written, *sections]) + "\n")
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
    except Exception as error:  # network, Hub or repository errors
        out, why = trainer.args.output_dir, redacted_text(one_line(f"{type(error).__name__}: {error}", 300))
        raise WorkFailed(
            f"--push_to_hub: the upload failed ({why}); all that was "
            f"trained is in {out}: `hf upload {trainer.hub_model_id} {out}` sends it"
        ) from error


def _sample(answers: Sequence[Answer]) -> str:
    """Returns prompts and answers as a section of the card."""
    blocks = [code_block(f"{answer.prompt.strip()}\n--> {answer.text.strip()}") for answer in answers]
    return "## A sample\n\nGreedy answers, behind the arrows, to prompts of the data.\n\n" + "\n\n".join(blocks)


def _section(report: MemoryReport) -> str:
    """Returns the report as a section of the card: headings one level down, secrets removed from its command."""
    lines = redacted_text(report.to_markdown()).strip().splitlines()
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in lines)
