"""`--config FILE` of a command: the training that a YAML file describes, as if its flags had been typed.

The file is a recipe's own, TRL's, axolotl's, or one of the diffusion recipes and so of diffusers' scripts: its keys
say which. Its entries stand in front of the command line's own, which therefore win. What bears on neither memory nor
seconds is passed over and named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.synonyms import names_of

COMMANDS = ("estimate", "plan", "max-batch", "explain")
RECIPES = ("llm", "vlm", "image_classification", "diffusion_unet", "diffusion_transformer", "trl", "axolotl")
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_hf": "adamw", "adamw_torch_fused": "adamw_fused", "adamw_fused": "adamw_fused",
    "adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw", "adafactor": "adafactor", "sgd": "sgd", "adamw": "adamw",
    "prodigy": "prodigy",
}  # fmt: skip
_SWITCHES = {
    "bf16", "fp16", "packing", "ema", "use_peft", "load_in_4bit", "load_in_8bit", "dora", "double_quant",
    "use_8bit_adam", "flash_attention", "flex_attention", "sdp_attention", "eager_attention",
}  # fmt: skip
_ATTENTION = {  # axolotl's switches
    "flash_attention": "flash_attention_2", "flex_attention": "flex_attention", "sdp_attention": "sdpa",
    "eager_attention": "eager",
}  # fmt: skip
_PAGED = ("paged_adamw_8bit", "paged_adamw_32bit")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "auto": "bfloat16"}  # auto: as most checkpoints are saved
# What each kind of file means where it says nothing.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llm": {"batch_size": 8},
    "vlm": {"batch_size": 8, "seq_length": 2048, "train_towers": "language"},
    "image_classification": {"batch_size": 8},
    "trl": {"batch_size": 8, "bf16": True, "gradient_checkpointing": True},
    "axolotl": {"batch_size": 1},
    "diffusion_unet": {"batch_size": 16},
    "diffusion_transformer": {"batch_size": 16},
}


def with_file(words: Sequence[str]) -> list[str]:
    """The words of a command with those of its `--config` in front; as they are where there is none.

    Raises:
        UserError: the file cannot be read, names no model, or asks for what no estimate knows.
    """
    if not words or words[0] not in COMMANDS:
        return list(words)
    rest, path = _taken(list(words[1:]), "--config")
    rest, recipe = _taken(rest, "--recipe")
    if not path:
        if recipe:
            raise UserError(f"--recipe {recipe}: of which file? give --config file.yaml too")
        return list(words)
    from ckpt_ft.training.run.parser import read_yaml

    content = read_yaml(path)
    kind = recipe or _kind(content)
    if kind == "dpo":
        raise UserError(
            f"--config {path}: a step on preferences, with its reference, is TRL's own; its recipe predicts it: "
            f"python recipes/dpo.py --config {path} --ac_policy auto --ac_budget 24GiB"
        )
    if kind not in RECIPES:
        raise UserError(f"--recipe {kind}: no such kind of file ({', '.join(RECIPES)})")
    described = Described(content, kind)
    found = described.words(path, with_policy=words[0] != "plan")
    if kind == "vlm" and not any(word.startswith("--dataset") for word in rest):
        found += ["--images", str(described.get("images") or 1)]
    if described.unread:
        print(f"note: not read of {path}: {', '.join(described.unread)}", file=sys.stderr)
    return [words[0], *found, *rest]


class Described:
    """The entries of a file; what has been asked for is read."""

    def __init__(self, content: dict[str, Any], kind: str) -> None:
        self.content, self.kind = content, kind
        self._read: set[str] = set()

    @property
    def diffusion(self) -> bool:
        return self.kind.startswith("diffusion")

    @property
    def unread(self) -> list[str]:
        return [key for key, value in self.content.items() if key not in self._read and _says(value)]

    def get(self, name: str) -> Any:
        """What the file says under any name of the flag; else the kind's default, None where there is none."""
        for other in names_of(name):
            if other in self.content:
                self._read.add(other)
                return _switched(other, self.content[other]) if name in _SWITCHES else self.content[other]
        return _DEFAULTS[self.kind].get(name)

    def words(self, path: str, with_policy: bool) -> list[str]:
        model = next((found for key in _MODELS if (found := self.get(key))), None)
        if not model:
            raise UserError(f"--config {path}: it names no model ({', '.join(_MODELS)})")
        words = [str(model)]
        for option, value in self._options(path):
            if _says(value):
                words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
        policy = self._policy()
        return words + (["--policy", policy] if with_policy and policy else [])

    def _options(self, path: str) -> Iterator[tuple[str, Any]]:
        yield "batch-size", self._batch(self.get("batch_size"))
        yield from ((option, self.get(name)) for option, name in _PLAIN)
        yield "train-text-encoder", self.diffusion and self.get("train_text_encoder")
        yield "encode-each-step", self.diffusion and self._uncached()
        yield from self._precision()
        yield "optimizer", self._optimizer(path)
        yield from self._adapters()
        switched = [implementation for switch, implementation in _ATTENTION.items() if self.get(switch)]
        yield "attn-implementation", switched[0] if switched else self.get("attn_implementation")

    def _batch(self, samples: Any) -> Any:
        """Images of a batch: with prior preservation each of DreamBooth's comes with one of its class."""
        if not (self.diffusion and self.get("with_prior_preservation") and isinstance(samples, int)):
            return samples
        print(f"note: with_prior_preservation: a batch of {samples} is {2 * samples} images", file=sys.stderr)
        return 2 * samples

    def _uncached(self) -> bool:
        """Whether images and prompts are encoded in each step: as asked for, or because each is drawn anew."""
        said = {name: self.get(name) for name in ("cache_latents", "center_crop", "random_flip")}
        return said["cache_latents"] is False or said["center_crop"] is False or bool(said["random_flip"])

    def _precision(self) -> Iterator[tuple[str, Any]]:
        dtype, bf16, fp16 = self.get("dtype"), self.get("bf16"), self.get("fp16")
        if (
            self.diffusion
            and (self.get("lora_r") or self.get("peft_config"))
            and self.get("mixed_precision") in _DTYPES
        ):
            dtype = self.get("mixed_precision")  # that of frozen weights in the recipes
        if self.kind == "axolotl":
            dtype = "bfloat16" if bf16 else "float16" if fp16 else None
        yield "dtype", _DTYPES.get(dtype, dtype) if dtype else None
        yield "bf16", bool(bf16) and not fp16
        yield "fp16", bool(fp16)
        yield "mixed-precision", self.get("mixed_precision")

    def _optimizer(self, path: str) -> str:
        if self.get("use_8bit_adam"):
            return "adamw_8bit"
        named = str(self.get("optimizer") or "adamw_torch_fused")
        if named not in _OPTIMIZERS:
            raise UserError(f"--config {path}: optimizer {named} is not modelled ({', '.join(_OPTIMIZERS)})")
        if named in _PAGED:
            print(f"note: {named}: its state is counted on the card; paging moves it to the host when memory runs out",
                  file=sys.stderr)  # fmt: skip
        return _OPTIMIZERS[named]

    def _adapters(self) -> Iterator[tuple[str, Any]]:
        adapter, rank, whole = self.get("adapter"), self.get("lora_r"), self.get("peft_config")
        if not (self.get("use_peft") or adapter or whole or self.diffusion):
            return
        yield "peft-config", whole
        if not whole:
            yield from self._lora(rank)
        quantised = bool(self.get("load_in_4bit"))
        yield "load-in-4bit", quantised
        yield "load-in-8bit", self.get("load_in_8bit")
        yield "double-quant", quantised and (self.get("double_quant") or self.kind == "axolotl")
        yield "quant-storage", self.get("quant_storage")
        yield "prepare-kbit", self.kind == "axolotl" and (quantised or bool(self.get("load_in_8bit")))

    def _lora(self, rank: Any) -> Iterator[tuple[str, Any]]:
        targets = self.get("lora_targets")
        targets = targets if isinstance(targets, list) else [targets] if targets else []
        self.get("lora_target_linear")
        yield "lora", rank or (None if self.diffusion else 16)
        yield "lora-targets", ",".join(str(target) for target in targets if target != "all-linear")
        yield "lora-dropout", self.get("lora_dropout")
        yield "dora", self.get("dora")

    def _policy(self) -> str:
        named, checkpointing = self.get("policy"), self.get("gradient_checkpointing")
        return str(named) if named and named != "auto" else "full" if checkpointing else ""


_MODELS = ("model_name_or_path", "pretrained_model_name_or_path", "base_model")
_PLAIN = (
    ("accumulation", "accumulation"),
    ("seq-length", "seq_length"),
    ("packing", "packing"),
    ("resolution", "resolution"),
    ("aspect-ratio-buckets", "aspect_ratio_buckets"),
    ("image-size", "image_size"),
    ("max-pixels", "max_pixels"),
    ("longest-side", "longest_side"),
    ("train-towers", "train_towers"),
    ("audio-seconds", "audio_seconds"),
    ("max-grad-norm", "max_grad_norm"),
    ("ema", "ema"),
    ("budget", "budget"),
)


def _switched(name: str, value: Any) -> bool | None:
    known: dict[Any, bool | None] = {
        None: None,
        True: True,
        False: False,
        "true": True,
        "false": False,
        "auto": True,
    }  # axolotl's bf16: auto
    if not isinstance(value, (bool, str, int, type(None))) or value not in known:
        raise UserError(f"{name}: {str(value)[:40]!r} is neither true nor false")
    return known[value]


def _says(value: Any) -> bool:
    """Whether an entry says something; 0 does: no clipping, no dropout."""
    return not (value is None or value is False or value == "")


_OF_IMAGES = {"train_towers", "max_pixels", "longest_side", "image_column", "image_folder", "image_size", "images"}


def _kind(content: dict[str, Any]) -> str:
    if "base_model" in content:
        return "axolotl"
    if "beta" in content:
        return "dpo"
    if _OF_IMAGES & content.keys():
        return "vlm"
    return "diffusion_unet" if "pretrained_model_name_or_path" in content else "llm"


def _taken(words: list[str], option: str) -> tuple[list[str], str]:
    """`words` without `option` and its value, and the value; "" where it is not there."""
    for at, word in enumerate(words):
        if word.startswith(f"{option}="):
            return words[:at] + words[at + 1 :], word.partition("=")[2]
        if word == option:
            if at + 1 == len(words):
                raise UserError(f"{option}: expected a value after it")
            return words[:at] + words[at + 2 :], words[at + 1]
    return words, ""
