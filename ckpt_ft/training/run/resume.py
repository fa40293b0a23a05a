"""Where a run writes and what it resumes from. `Trainer` writes `trainer_state.json` last: it marks a whole one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ckpt_ft.errors import UserError

_NAME = re.compile(r"checkpoint-(\d+)")
_ADAPTER = ("adapter_config.json", "pytorch_lora_weights.safetensors")  # by which PEFT and diffusers know one
_WHOLE = ("config.json", "model_index.json")


def check_output_dir(output_dir: str) -> None:
    """Raises UserError when `output_dir`, or what should be a directory above it, is a file."""
    path = Path(output_dir)
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"--output_dir {output_dir}: {place} is a file; give a directory")
            return


def check_same_kind(output_dir: str, lora: bool) -> None:
    """Raises UserError when `output_dir` holds the weights of a full run and this one trains adapters, or the reverse.

    Left side by side, the folder would load as the new weights with the old adapter on them.
    """
    names, theirs, ours = (_WHOLE, "a whole model", "LoRA") if lora else (_ADAPTER, "LoRA adapters", "all weights")
    for place in (Path(output_dir), *Path(output_dir).glob("checkpoint-*")):
        for name in names:
            if (place / name).is_file():
                raise UserError(
                    f"--output_dir {output_dir} holds {theirs} of an earlier run ({place / name}) and this one trains "
                    f"{ours}: the folder would load as a mixture; give another directory, or move that one away"
                )


def last_complete_checkpoint(output_dir: str) -> str | None:
    """The newest `checkpoint-N` that was written to its end; one that a killed run left half is passed over."""
    if not Path(output_dir).is_dir():
        return None
    found = [(int(match[1]), path) for path in Path(output_dir).iterdir() if (match := _NAME.fullmatch(path.name))]
    return next((str(path) for _, path in sorted(found, reverse=True) if _is_complete(path)), None)


def resume_path(resume_from_checkpoint: str | None, output_dir: str) -> str | None:
    """The checkpoint directory meant by `--resume_from_checkpoint`: "latest" (or "true"), or a path; None for a fresh
    run.

    Raises:
        UserError: there is no whole checkpoint there.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint.lower() == "false":
        return None
    if resume_from_checkpoint.lower() in ("latest", "true"):
        latest = last_complete_checkpoint(output_dir)
        if latest is None:
            raise UserError(
                f"--resume_from_checkpoint {resume_from_checkpoint}: no complete checkpoint in {output_dir}"
            )
        return latest
    if not _is_complete(Path(resume_from_checkpoint)):
        inside = last_complete_checkpoint(resume_from_checkpoint)
        hint = f"; did you mean {inside}?" if inside else "; give a checkpoint-N directory, or latest"
        raise UserError(f"--resume_from_checkpoint {resume_from_checkpoint}: no complete checkpoint there{hint}")
    return resume_from_checkpoint


def _is_complete(path: Path) -> bool:
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
