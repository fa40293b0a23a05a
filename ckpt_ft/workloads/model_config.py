"""A model's configuration by name: a file, a directory, the Hub, or one of the known models; and its positions.

The configurations of known models come with the package in `configs/`, one file for each family. An entry has the
configuration as far as it decides shapes (and that of the image processor), the number of parameters that its
publisher states, other names on the Hub with the same shapes, and the source.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.training_spec import TrainingSpec

CONFIGS = Path(__file__).parent / "configs"
NICKNAMES = {
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sd1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "flux": "black-forest-labs/FLUX.1-dev",
}
MIRRORS = ("unsloth", "NousResearch")  # owners of copies on the Hub under the same model names


@dataclass(frozen=True)
class KnownModel:
    """A model whose configuration comes with the package.

    Attributes:
        family: the file that has it.
        parameters: as published, exact or rounded ("32B").
        also: other names on the Hub with the same shapes.
        dtype: of the published checkpoint: `torch_dtype` of its config.json, or that of its weights.
        processor: the published settings of its image processor.
        parts: of a pipeline: the configurations of its VAE and text encoders.
    """

    name: str
    family: str
    config: dict[str, Any]
    parameters: int | str
    also: tuple[str, ...]
    source: str
    dtype: str = ""
    processor: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of the class that is trained."""
        named: str = self.config.get("_class_name") or self.config["architectures"][0]
        return named


@functools.cache
def known_models() -> dict[str, KnownModel]:
    """Every known model by its name on the Hub."""
    found = {}
    for path in sorted(CONFIGS.glob("*.json")):
        for name, entry in json.loads(path.read_text(encoding="utf-8")).items():
            found[name] = KnownModel(name, path.stem, also=tuple(entry.pop("also", ())), **entry)
    return found


@functools.cache
def names() -> dict[str, KnownModel]:
    """Every name on the Hub of a known model."""
    return {name: model for model in known_models().values() for name in (model.name, *model.also)}


@functools.cache
def _short_names() -> dict[str, str]:
    return {name.rpartition("/")[2].lower(): name for name in reversed(names())}


def hub_id(name: str) -> str:
    """The full name on the Hub of a name without its owner; `name` itself if it is unknown, whole or a local path.

    A name that is known only as instruction-tuned is that one: "Qwen2.5-VL-7B".
    """
    if name in names() or Path(name).exists():
        return name
    short = name.lower()
    found = [known for end in ("", "-instruct", "-it") if (known := _short_names().get(short + end))]
    return NICKNAMES.get(short) or next(iter(found), name)


def find_model(name: str) -> KnownModel | None:
    """The known model of that name: its name on the Hub, a mirror's, or the name without the owner."""
    owner, _, last = name.rpartition("/")
    return names().get(hub_id(last if owner in MIRRORS else name))


_OF_A_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
_MOST = 2**40
_MOST_LAYERS = 10_000
_PARTS = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")  # parts of a pipeline
_REPEATS = re.compile(r"layers|depth|blocks|stages|experts")  # in names of numbers of parts
_AT_LEAST_1 = ("vocab_size", "hidden_size", "d_model", "n_embd", "num_hidden_layers", "n_layer")
_AT_LEAST_0 = re.compile(r"(image|sample|patch|intermediate)_size$|channels$|_dim$")  # -1 is a value of other names


def read_config(name: str) -> dict[str, Any]:
    """The model's configuration as a dict, from a file, a directory, the package or the Hub."""
    if not name:  # Path would take it for the working directory
        raise UserError(
            "no model is named: give a Hub id, a directory or a config file (`ckpt-ft models` lists some); "
            "`ckpt-ft where --device CARD` says what a card trains"
        )
    path = Path(name)
    if path.is_file():
        return _read_json(path)
    if path.is_dir():
        is_pipeline = (path / "model_index.json").is_file()
        own = ["unet/config.json", "transformer/config.json", *([] if is_pipeline else ["config.json"])]
        if files := _files(name, own):
            return _read_json(files[0])
        pipeline = "this pipeline has neither a unet nor a transformer to train"
        raise UserError(f"{name}: {pipeline if is_pipeline else 'no config.json in this directory'}")
    known = find_model(name)
    return dict(known.config) if known else _from_hub(name)


def checkpoint_dtype(name: str) -> str:
    """The dtype of a model's checkpoint, which `dtype: auto` loads it in.

    Raises:
        UserError: its configuration does not say it.
    """
    config, known = read_config(name), find_model(name)
    for part in (config, config.get("text_config") or {}):
        stated = str(part.get("dtype") or part.get("torch_dtype") or "").removeprefix("torch.")
        if stated:
            return stated
    if known is not None and known.dtype:
        return known.dtype
    raise UserError(f"dtype auto: nothing says the dtype of {name}'s checkpoint; give float32, bfloat16 or float16")


def read_processor(name: str) -> dict[str, Any]:
    """The settings of a model's processor, those of images first; {} if there are none."""
    if known := find_model(name):
        return dict(known.processor)
    return {key: value for file in _files(name, _OF_A_PROCESSOR) for key, value in _read_json(file).items()}


def read_parts(name: str) -> dict[str, dict[str, Any]]:
    """The pipeline's configurations of its VAE and text encoders; {} if they are not known."""
    if known := find_model(name):
        return known.parts
    return {file.parent.name: _read_json(file) for file in _files(name, [f"{part}/config.json" for part in _PARTS])}


def _files(name: str, places: Sequence[str]) -> list[Path]:
    """The files of a local model, or of one on the Hub; of the Hub's local cache if the Hub cannot be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    if Path(name).exists():
        return [file for place in places if (file := Path(name, place)).is_file()]
    offline, found = not hub_answers(), []
    for place in places:
        with suppress(HfHubHTTPError, OSError):
            found.append(Path(hf_hub_download(name, place, local_files_only=offline)))
    return found


def _from_hub(name: str) -> dict[str, Any]:
    """The config on the Hub, or in the Hub's local cache if the Hub cannot be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    offline = not hub_answers()
    reason = "the Hub cannot be reached" if offline else "the Hub has no config of that name"
    for place in ("config.json", "unet/config.json", "transformer/config.json"):
        try:
            return _read_json(Path(hf_hub_download(name, place, local_files_only=offline)))
        except HfHubHTTPError as error:
            reason = one_line(error, 160)
        except (HFValidationError, OSError):  # an invalid name, or not in the cache
            continue
    close = difflib.get_close_matches(name, names(), n=1, cutoff=0.7)
    meant = f"did you mean '{close[0]}'? " if close else ""
    hint = f"{meant}`ckpt-ft models` lists the models that need no Hub"
    if offline and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        hint += f"; for this one give its config.json (`hf download {name} config.json --local-dir .` fetches it)"
    elif offline:
        hint += "; for any other, give the directory or the config.json of a model"
    raise UserError(f"no model '{name}': no such file or directory, and {reason}; {hint}")


def hub_answers() -> bool:
    """Whether the Hub can be reached. Sends one request, because the Hub's client retries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except HTTPError:
        return True  # it answers, even if it refuses
    except OSError:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {one_line(error, 200)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a model's config is a JSON object, not a {type(content).__name__}")
    check_sizes(str(path), content)
    for key in ("model_type", "_class_name"):
        if key in content and not isinstance(content[key], str):
            raise UserError(f"{path}: {key} is a name, not {str(content[key])[:50]!r}")
    named = content.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{path}: architectures is a list of names, not {str(named)[:50]!r}")
    return content


def _number(part: dict[str, Any]) -> Any:
    """Reads {"__float__": "Infinity"}, as transformers 5 writes numbers that JSON does not have."""
    named = part.get("__float__")
    return float(named) if len(part) == 1 and isinstance(named, str) else part


def check_sizes(source: str, value: Any, key: str = "") -> None:
    """Raises UserError for sizes of no model: building a billion layers would never end, and 0 tokens are no words."""
    if isinstance(value, dict):
        for name, part in value.items():
            check_sizes(source, part, str(name))
    elif isinstance(value, list):
        for part in value[:_MOST_LAYERS]:
            check_sizes(source, part, key)
    elif isinstance(value, (int, float)) and value not in (float("inf"), float("-inf")):  # Mamba-2's time limits
        most = _MOST_LAYERS * (10 if "experts" in key else 1) if _REPEATS.search(key) else _MOST
        least = 1 if key in _AT_LEAST_1 else 0 if _AT_LEAST_0.search(key) else -most
        if not least <= value <= most:
            allowed = f"at least {least}" if value < least else f"at most {most}"
            raise UserError(f"{source}: {key} {str(value)[:20]} is no size of a model; {allowed}")


STRETCHES = ("linear", "dynamic", "yarn")  # `rope_type` of transformers that need nothing but a factor
_OFFSET = 4  # a table may have a few more rows: two in OPT


def trained_positions(config: Any) -> int:
    """The number of positions that the model was trained on, from its text configuration; 0 if it states none."""
    text = config.get_text_config()
    names = ("max_target_positions", "max_position_embeddings", "max_seq_len")  # Whisper's, most models', MPT's
    stated = next(filter(None, (getattr(text, name, None) for name in names)), 0)
    return max(int(stated), 0)  # XLNet's -1 means no limit


def is_rotary(config: Any) -> bool:
    """Whether positions are rotations computed for any length [transformers/modeling_rope_utils.py]."""
    return bool(getattr(config.get_text_config(), "rope_parameters", None))


def position_limit(model: Any) -> int:
    """The longest sequence that the model can process; 0 if there is no limit.

    Learned and precomputed positions are a table with a row for each position. Rotary positions, ALiBi and recurrent
    layers have none, but MPT makes the biases of its ALiBi for so many positions in each step.
    """
    from torch import nn

    most = trained_positions(model.config)
    if not most or is_rotary(model.config):
        return 0
    if model.config.model_type == "mpt":
        return most
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, table in tables.items():
        if "position" in name and table.padding_idx is not None and table.num_embeddings == most:
            return most - table.padding_idx - 1  # RoBERTa's positions start after that of padding
    rows = {table.num_embeddings for table in tables.values()}
    sizes = rows | {size for buffer in model.buffers() for size in buffer.shape}
    return most if any(most <= size <= most + _OFFSET for size in sizes) else 0


def stretch_positions(config: Any, rope_scaling: str, length: int) -> None:
    """Set the RoPE scaling of a configuration for sequences of `length` tokens, as transformers reads it.

    Args:
        rope_scaling: one of `STRETCHES`; "" and "none" change nothing. The factor is `length` over the number of
            positions that the model was trained on.

    Raises:
        UserError: the model has no rotary positions, or its configuration scales them already.
    """
    if rope_scaling not in STRETCHES:
        return
    trained = trained_positions(config)
    if not is_rotary(config) or not trained:
        raise UserError(f"rope scaling {rope_scaling}: a {config.model_type} has no rotary positions to scale")
    if length <= trained:
        return
    for layers, stated in _ropes(config).items():
        kind = stated.get("rope_type", "default")
        if kind != "default":
            raise UserError(
                f"rope scaling {rope_scaling}: the configuration has rope_type {kind} already; give none to keep it"
            )
        if "sliding" not in layers:  # a sliding window is no longer than before
            stated |= {"rope_type": rope_scaling, "factor": length / trained}
            stated |= {"original_max_position_embeddings": trained} if rope_scaling == "yarn" else {}


def check_causal(name: str, config: Any) -> None:
    """Raises UserError for an encoder, which as a causal language model would see the label of each of its tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)  # BERT's flag, XLM's
    if config.is_encoder_decoder or (config.model_type in ENCODERS and not causal):
        kind = (
            "encoder-decoder"
            if config.is_encoder_decoder
            else "encoder: each token sees the one that it is to predict"
        )
        raise UserError(
            f"model {name} cannot be trained as a causal language model: a {config.model_type} is an {kind}"
        )


def set_router_loss(config: Any, coefficient: float | None, kind: type, by_trl: bool = False) -> None:
    """Set the weight of the routers' auxiliary loss in the configuration of a `kind`; None keeps the model's own.

    by_trl: whether one of TRL's trainers asks for the routers' logits, which it does not of its reference model.

    Raises:
        UserError: the class adds no such loss, or weighs it by another name.
    """
    if coefficient is None:
        return
    text = config.get_text_config()
    known = hasattr(sys.modules[kind.__module__], "load_balancing_loss_func") and hasattr(text, "router_aux_loss_coef")
    if coefficient and not known:
        raise UserError(f"router aux loss coef {coefficient:g}: {kind.__name__} has no router loss; leave it out")
    text.output_router_logits = coefficient > 0 and not by_trl
    text.router_aux_loss_coef = coefficient


def with_rope_scaling(spec: TrainingSpec, config: Any, length: int) -> TrainingSpec:
    """Returns `spec` for sequences of `length` tokens, as a recipe takes it: beyond the positions with a scaling."""
    spec = spec.edit(seq_length=length)
    beyond = 0 < trained_positions(config) < length and is_rotary(config)
    return spec.edit(rope_scaling="none") if beyond and not spec.model.rope_scaling else spec


def beyond_note(config: Any, rope_scaling: str, length: int) -> str:
    """A sentence about sequences that are longer than those that the model was trained on; "" if they are not."""
    trained = trained_positions(config)
    if not trained or length <= trained or not is_rotary(config):
        return ""
    said = f"sequences of {length} tokens: the model was trained on {trained} positions"
    if rope_scaling in STRETCHES:
        return f"{said}; rope_scaling {rope_scaling} with factor {length / trained:.4g}"
    kinds = sorted({str(rope.get("rope_type", "default")) for rope in _ropes(config).values()} - {"default"})
    if kinds:
        return f"{said}; its configuration scales them by {' and '.join(kinds)}"
    return f"{said}; rotary positions run at any length, and --rope-scaling yarn stretches them"


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """The RoPE parameters by type of layer; by "" if all layers have the same ones."""
    found = config.get_text_config().rope_parameters
    return {"": found} if "rope_theta" in found else dict(found)
