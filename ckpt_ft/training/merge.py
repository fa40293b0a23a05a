"""Merges a trained adapter into its base model: full weights that load without PEFT.

Bad input raises UserError, one line that names the file or the flag.
"""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.utils import get_peft_model_state_dict, load_peft_weights
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from transformers import AutoConfig, AutoProcessor

from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.files import make_directory
from ckpt_ft.spec.peft_file import ADAPTER_CONFIG
from ckpt_ft.training.checkpoints import PIPELINE_LORA
from ckpt_ft.validation import is_of_the_disk, library_reads

logger = logging.getLogger(__name__)
_PROCESSOR_FILES = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def merge(adapter: str, output: str, base: str = "", dtype: str = "auto") -> Path:
    """Merge `adapter` into the weights of its base model and write the result to `output`.

    Args:
        adapter: the output_dir of a recipe, with PEFT's `adapter_config.json`. Diffusers merges those of pipelines.
        output: a directory that does not exist yet, or is empty.
        base: Hub id or directory; by default the one that the adapter names.
        dtype: dtype of the merged weights; "auto" keeps the base's. If the base was trained in 4 bits, its unquantised
            weights are loaded.
    """
    source, target = Path(adapter), Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--output {output} exists already; give a new directory")
    if (source / PIPELINE_LORA).is_file():
        raise UserError(
            f"{adapter} is a LoRA of a pipeline, which diffusers merges: pipe.load_lora_weights({adapter!r}), "
            "pipe.fuse_lora(), pipe.unload_lora_weights(), pipe.save_pretrained(...)"
        )
    if not (source / ADAPTER_CONFIG).is_file():
        raise UserError(f"{adapter} holds no adapter: no {ADAPTER_CONFIG} in it; give a LoRA run's output_dir")
    merged = _merged_adapter(source, base, dtype)
    if target.is_dir():
        target.rmdir()
    try:
        return make_directory(target, lambda directory: [part.save_pretrained(directory) for part in merged])
    except OSError as error:
        kind = WorkFailed if is_of_the_disk(error) else UserError
        raise kind(f"--output {output} cannot be written: {one_line(error)}") from error


def _merged_adapter(source: Path, base: str, dtype: str) -> list[Any]:
    """Returns the model, and its tokenizer or processor if it has one."""
    with library_reads(f"{source / ADAPTER_CONFIG} cannot be read"):
        settings = json.loads((source / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        name = base or settings.get("base_model_name_or_path")
        library = str((settings.get("auto_mapping") or {}).get("parent_library"))
    if library.startswith("diffusers"):
        raise UserError(
            f"{source} adapts a part of a pipeline: PeftModel.from_pretrained(pipe.<part>, {str(source)!r})"
            ".merge_and_unload() merges it, and pipe.save_pretrained(...) saves the pipeline"
        )
    if not name:
        raise UserError(f"{source / ADAPTER_CONFIG} names no base model; give it with --base")
    with library_reads(f"{source} cannot be merged into its base {name} (another: --base)"):
        kind = _class_of(AutoConfig.from_pretrained(name))
        merged = _merged(kind.from_pretrained(name, dtype=dtype), source, name)
        return [merged, *_processor(source, name)]


def _processor(source: Path, base: str) -> list[Any]:
    """Returns the tokenizer or processor saved with the adapter, or else the base's, if it has one."""
    from ckpt_ft.training.vision_language import without_videos  # needs Pillow

    with without_videos():
        if any((source / file).is_file() for file in _PROCESSOR_FILES):
            return [AutoProcessor.from_pretrained(source)]
        try:
            return [AutoProcessor.from_pretrained(base)]
        except Exception as error:
            logger.warning(
                "merged without a tokenizer or processor: %s has none to read (%s)", base, one_line(error, 200)
            )
            return []


def _merged(model: Any, source: Path, base: str) -> Any:
    tuned = PeftModel.from_pretrained(model, str(source))
    config = tuned.active_peft_config
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise UserError(
            f"{source} is {config.peft_type.value}, which does not change weights and cannot be merged; load it with "
            "peft.PeftModel.from_pretrained"
        )
    _check_whole(tuned, source, base)
    return tuned.merge_and_unload(safe_merge=True)


def _check_whole(tuned: Any, source: Path, base: str) -> None:
    """Raises UserError if the adapter's file and the adapted model do not have the same tensors.

    PEFT leaves missing tensors at their initial values and ignores unexpected ones, so half an adapter would be
    merged. Embeddings that were saved with the adapter are not compared.
    """
    ours = set(get_peft_model_state_dict(tuned, save_embedding_layers=False))
    beside = tuple(f"{name}.weight" for name in EMBEDDING_LAYER_NAMES)
    theirs = {name for name in load_peft_weights(str(source), device="cpu") if not name.endswith(beside)}
    ours = {name for name in ours if not name.endswith(beside)}
    for names, how in ((ours - theirs, "lacks"), (theirs - ours, "has beyond it")):
        if names:
            raise UserError(
                f"{source} {how} {len(names)} tensors of an adapter for base {base} ({min(names)}); give the base "
                "that it was trained on with --base, or the whole adapter"
            )


def _class_of(config: Any) -> Any:
    """Returns the class that the base was trained as."""
    names = getattr(config, "architectures", None) or []
    kind = getattr(importlib.import_module("transformers"), names[0], None) if names else None
    if kind is None:
        raise UserError(f"the base's configuration names the class {names or None}, which transformers does not have")
    return kind
