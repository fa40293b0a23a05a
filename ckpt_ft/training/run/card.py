"""The model card: Trainer's own, with what training needed in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_ft.files import write

if TYPE_CHECKING:
    from transformers import Trainer

    from ckpt_ft.memory.measure.report import MemoryReport


def write_model_card(trainer: Trainer, report: MemoryReport | None, *, dataset: str | None = None) -> None:
    """Write `README.md` into the output directory, on the main process; with `push_to_hub`, upload everything first.

    `dataset` is named in the card unless it is a local path.
    """
    args = trainer.args
    named = {"dataset": dataset} if dataset and not Path(dataset).exists() else {}
    if args.push_to_hub:
        trainer.push_to_hub(**named)  # writes and uploads its own card, so ours follows
    else:
        trainer.create_model_card(**named)
    if report is None or not trainer.is_world_process_zero():
        return
    card = Path(args.output_dir) / "README.md"
    write(card, f"{card.read_text(encoding='utf-8').rstrip()}\n\n{_section(report)}\n")
    if args.push_to_hub:
        from huggingface_hub import upload_file

        upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=trainer.hub_model_id, token=args.hub_token)


def _section(report: MemoryReport) -> str:
    """The report as a part of the card: its headings one level down."""
    lines = report.to_markdown().strip().splitlines()
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in lines)
