"""Which checkpoint a run goes on from: the newest whole one, or the one that is named. Manifests say which."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_ft.errors import UserError, one_line

from .manifest import read_manifest, what_is_wrong

_NAME = re.compile(r"checkpoint-(\d{1,18})")
PIPELINE_LORA = "pytorch_lora_weights.safetensors"  # of a U-Net or transformer, and text encoders
ADAPTER = ("adapter_config.json", PIPELINE_LORA)  # by which PEFT and diffusers know one
WHOLE = ("config.json", "model_index.json")


def check_output_dir(output_dir: str) -> None:
    """Raises UserError when `output_dir`, or what should be a directory above it, is a file, or no name of one."""
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

    Left side by side, the folder would load as the new weights with the old adapter on them.
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
    """The directories `checkpoint-N` in `output_dir`, whole or not, the oldest first; `checkpoint-best` is none."""
    if not Path(output_dir).is_dir():
        return []
    found = [(int(match[1]), path) for path in Path(output_dir).iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def last_complete_checkpoint(output_dir: str, run: str | None = None) -> str | None:
    """The newest whole checkpoint, with `run` of that run; what a killed run left half is passed over."""
    for path in reversed(checkpoints(output_dir)):
        manifest = read_manifest(path)
        if manifest is not None and run in (None, manifest.run) and what_is_wrong(path) is None:
            return str(path)
    return None


def resume_path(resume_from_checkpoint: str | None, output_dir: str) -> str | None:
    """The checkpoint directory meant by `--resume_from_checkpoint`: "latest" (or "true"), or a path; None for a fresh
    run.

    Raises:
        UserError: there is no whole checkpoint there, or one of weights alone.
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
    if not any(name.startswith(("optimizer", "global_step")) for name in manifest.files):  # Trainer's, DeepSpeed's
        raise UserError(
            f"{given}: {chosen} holds weights alone (--save_only_model), without what training goes on with"
        )
    return chosen


def unfit(checkpoint: str) -> str:
    """What an error says first, where what is read from `checkpoint` is not what this run needs."""
    return (
        f"--resume_from_checkpoint {checkpoint} does not fit this run; resume with the flags that it was written with"
    )
