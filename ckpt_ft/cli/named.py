"""What a user names in place of a model: a training file, a run's output, an adapter, a GGUF file, a packed copy."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.peft_file import ADAPTER_CONFIG
from ckpt_ft.spec.settings import KINDS
from ckpt_ft.spec.trainer import kind_of
from ckpt_ft.spec.training_file import MODELS
from ckpt_ft.workloads.model_config import find_model, hub_answers, hub_id

from .words import TUNED, WORDS, alike, hear, pieces_of

SAVED_ARGUMENTS = "training_args.bin"  # of a Trainer's output directory
_MADE = ("mixed_precision", "distributed_state", "deepspeed_plugin", "hf_deepspeed_config")  # from the others
# Ends of names of copies of a model: how their weights are packed.
_PACKED = re.compile(
    r"[-_.](?:(?P<whole>bf16|fp16|dequantized|finetuned[-_].*)|(?P<eight>fp8(?:-dynamic)?|int8|8bit|w8a8|q8_0)"
    r"|(?:unsloth-)?(?:bnb-|mlx-)?(?:4bit|nf4|awq|gptq|aqlm|gguf|hqq|exl2|int4|nvfp4|mxfp4|w4a16|i?q[2-6](?:_\w+)?)"
    r"(?:[-_](?:\d+bit|int[48]|\d+x\d+|marlin|quantized[.\w]*))*)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Named:
    """What a name stands for.

    Attributes:
        model: Hub id, directory or configuration file of a model; "" if the training file names it.
        file: a training file.
        content, kind: of a training that is no YAML file, and its kind of `training_file.RECIPES`.
        flags: values of our flags that the name says.
        notes: how the name was understood.
    """

    model: str
    file: str = ""
    content: Mapping[str, Any] | None = None
    kind: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def named(given: str) -> Named:
    """Returns what the MODEL of a command line stands for.

    Raises:
        UserError: it is a file of another kind; the line says which command or option takes it.
    """
    path, suffix = Path(given), Path(given).suffix.lower()
    if suffix == ".py":
        raise UserError(f"{given} is a script: `ckpt-ft dry-run {given}` predicts the step that it runs")
    if suffix in (".yaml", ".yml", ".toml"):
        return Named("", given)
    if suffix == ".json" and path.is_file():
        return _of_json(path)
    if suffix == ".gguf":
        found = packed_copy(path.stem)
        if found is None:
            raise UserError(f"{given}: GGUF weights cannot be trained: name the model that they were made of")
        return replace(found, notes=(f"GGUF weights cannot be trained: answered as {found.model} in 4 bits",))
    if path.is_dir() and (path / SAVED_ARGUMENTS).is_file():
        return _of_run(path)
    if path.is_dir() and (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
        return _of_adapter(path)
    return Named(given)


def _of_json(path: Path) -> Named:
    """A training file in JSON, an adapter's configuration or a model's; DeepSpeed's is none of these."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Named(str(path))  # the error is that of a model's configuration
    keys = set(content) if isinstance(content, dict) else set()
    if "zero_optimization" in keys:
        raise UserError(f"{path} is DeepSpeed's: name a model, and give --launch {path}")
    if "peft_type" in keys:
        return _of_adapter(path.parent)
    is_model = keys & {"model_type", "_class_name", "architectures"}
    return Named("", str(path)) if keys & {*MODELS} and not is_model else Named(str(path))


def _of_adapter(path: Path) -> Named:
    content = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = str(content.get("base_model_name_or_path") or "")
    if not base:
        raise UserError(f"{path}: its {ADAPTER_CONFIG} names no base model: name it, and give --peft-config {path}")
    return Named(base, flags={"peft_config": str(path)}, notes=(f"{path} is an adapter of {base}",))


def _of_run(path: Path) -> Named:
    """A Trainer's output: its arguments, and its model or adapter."""
    kind, content = read_saved(path / SAVED_ARGUMENTS)
    adapter = (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
    of = _of_adapter(path) if adapter else Named(str(path))
    note = f"{path} is a run's output: its settings are those of {SAVED_ARGUMENTS}"
    return replace(
        of, content={"model_name_or_path": of.model, **content}, kind=kind, file=str(path), notes=(*of.notes, note)
    )


def packed_copy(name: str) -> Named | None:
    """The known model of which `name` is a packed or renamed copy, with what it is loaded in; None for other names.

    A copy on the Hub that is not packed has a configuration of its own, which is read where the Hub answers.
    """
    base, bits = name.rstrip("/").rpartition("/")[2], 0
    while end := _PACKED.search(base):
        bits = 0 if end["whole"] else 8 if end["eight"] else 4
        base = base[: end.start()]
    model = next((known for last in ("", "-hf") if find_model(known := hub_id(base + last))), "")
    if name.count("/") == 1 and (name.endswith(f"/{base}") or not model) and hub_answers():
        return None  # the Hub has its configuration
    if not model and base != name:
        model = alike([word for word in WORDS.findall(base.lower()) if word not in TUNED])
    if not model:
        return None
    packed = {"load_in_4bit": True, "double_quant": True} if bits == 4 else {"load_in_8bit": True} if bits else {}
    layout = f" in {bits} bits, in the layout of bitsandbytes" if bits else ""
    return Named(model, flags=packed, notes=(f"{name} is answered as {model}{layout}",))


def unpacked(model: str) -> Named | None:
    """Returns the model that is known of which `model` is a packed copy or what people call it; None for others."""
    if not model or find_model(model) or Path(model).exists():
        return None
    return packed_copy(model) or (None if "/" in model else spoken(model))


def spoken(name: str) -> Named | None:
    """The known model that people mean by a family, a size and a method ("llama 3 8b", "SDXL LoRA"); None for none.

    Raises:
        UserError: a method without a model.
    """
    for text in dict.fromkeys((name, re.sub(r"[_:-]+", " ", name))):  # 8-bit is a word, Qwen3-Embedding-0.6B are three
        heard = hear(text.split())
        model = find_model(hub_id(" ".join(pieces_of(heard.model))))
        if found := model.name if model else alike(pieces_of(heard.model)):
            return Named(found, flags=heard.flags, notes=(f"{name} is answered as {found}",))
    if heard.flags and not heard.model:
        raise UserError(f"'{name}': name a model too, one of `ckpt-ft models`: 'Qwen3-0.6B {name}'")
    return None


class _Plain:
    """Stands in for every class of a pickle, of which nothing is run: its attributes, or what made it."""

    def __init__(self, *args: Any) -> None:
        self.made_of = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _Plainly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Plain,), {})

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_saved(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the kind of training of a saved `training_args.bin`, and its settings; no code in the file is run.

    Raises:
        UserError: it cannot be read, or has no arguments.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            saved = _Plainly(io.BytesIO(archive.read(name))).load()
        stated = {name: value for name, value in vars(saved).items() if not name.startswith("_") and name not in _MADE}
        found = {name: _value(value) for name, value in stated.items()}
    except Exception as error:  # a pickle may fail in any way
        raise UserError(f"{path}: no saved TrainingArguments ({one_line(error, 100)})") from error
    kind = kind_of(type(saved).__name__)
    return kind if kind in KINDS else "llm", {name: value for name, value in found.items() if value is not None}


def _value(value: Any) -> Any:
    """A saved value as a file has it: an enum's value, a dataclass's fields."""
    if not isinstance(value, _Plain):
        return value
    made = vars(value).pop("made_of", ())
    return made[0] if made else {name: _value(inner) for name, inner in vars(value).items()} or None
