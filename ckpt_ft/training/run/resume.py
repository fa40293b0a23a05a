"""Selects the checkpoint to resume from: the newest complete one, or the one given. Manifests show completeness."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_ft.errors import UserError, one_line

from .manifest import read_manifest, what_is_wrong

_NAME = re.compile(r"checkpoint-(\d{1,18})")
PIPELINE_LORA = "pytorch_lora_weights.safetensors"  # LoRA weights of a U-Net, transformer or text encoder
ADAPTER = ("adapter_config.json", PIPELINE_LORA)  # files that identify an adapter of PEFT or diffusers
WHOLE = ("config.json", "model_index.json")


def check_output_dir(output_dir: str) -> None:
    """Raises UserError if `output_dir` or a parent of it is a file, or if it is not a valid path."""
    if not output_dir.strip():
        raise UserError("--output_dir is empty; give a directory ('.' for the one that you are in)")
    path = Path(output_dir)
    try:
        first = next((place for place in (path, *path.parents) if place.exists()), None)
    except OSError as error:  # such as a name that is too long
        raise UserError(f"--output_dir {output_dir}: {one_line(error, 100)}; give a directory") from error
    if first is not None and not first.is_dir():
        raise UserError(f"--output_dir {output_dir}: {first} is a file; give a directory")


def check_same_kind(output_dir: str, lora: bool) -> None:
    """Raises UserError when `output_dir` holds the weights of a full run and this one trains adapters, or the reverse.

    With both in one folder, the old adapter would be loaded onto the new weights.
    """
    names, theirs, ours = (WHOLE, "a whole model", "LoRA") if lora else (ADAPTER, "LoRA adapters", "all weights")
    for place in (Path(output_dir), *checkpoints(output_dir)):
        for name in names:
            if (place / name).is_file():
                raise UserError(
                    f"--output_dir {output_dir} holds {theirs} of an earlier run ({place / name}) and this one trains "
                    f"{ours}: the folder would load as a mixture; give another directory, or move that one away"
                )


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Returns the directories `checkpoint-N` in `output_dir`, complete or not, oldest first; no `checkpoint-best`."""
    if not Path(output_dir).is_dir():
        return []
    found = [(int(match[1]), path) for path in Path(output_dir).iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def last_complete_checkpoint(output_dir: str, run: str | None = None) -> str | None:
    """Returns the newest complete checkpoint, of the given `run` if there is one."""
    for path in reversed(checkpoints(output_dir)):
        manifest = read_manifest(path)
        if manifest is not None and run in (None, manifest.run) and what_is_wrong(path) is None:
            return str(path)
    return None


def resume_path(resume_from_checkpoint: str | None, output_dir: str) -> str | None:
    """Returns the checkpoint for `--resume_from_checkpoint`: "latest" (or "true") or a path; None for a new run.

    Raises:
        UserError: there is no complete checkpoint, or it holds weights only.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint.lower() == "false":
        return None
    given = f"--resume_from_checkpoint {resume_from_checkpoint}"
    if resume_from_checkpoint.lower() in ("latest", "true"):
        chosen = last_complete_checkpoint(output_dir)
        if chosen is None:
            torn = [f"{path.name}: {what_is_wrong(path)}" for path in checkpoints(output_dir)[-1:]]
            raise UserError(
                f"{given}: no complete checkpoint in {output_dir}"
                + "".join(f" ({why}; --overwrite_output_dir starts anew)" for why in torn)
            )
    else:
        chosen = resume_from_checkpoint
        wrong = what_is_wrong(Path(chosen)) if Path(chosen).is_dir() else "no such directory"
        if wrong is not None:
            inside = last_complete_checkpoint(chosen)
            hint = f"; did you mean {inside}?" if inside else "; give a checkpoint-N directory, or latest"
            raise UserError(f"{given}: no complete checkpoint there ({wrong}){hint}")
    manifest = read_manifest(Path(chosen))
    assert manifest is not None
    if not any(name.startswith(("optimizer", "global_step")) for name in manifest.files):  # of a Trainer, of DeepSpeed
        raise UserError(
            f"{given}: {chosen} holds weights alone (--save_only_model), without what training goes on with"
        )
    return chosen


def unfit(checkpoint: str) -> str:
    """Returns the start of the error for a checkpoint that does not match this run."""
    return (
        f"--resume_from_checkpoint {checkpoint} does not fit this run; resume with the flags that it was written with"
    )
