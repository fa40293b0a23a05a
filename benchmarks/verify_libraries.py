"""Trains tiny models of transformers, diffusers and timm without and with policies, each step verified.

    python benchmarks/verify_libraries.py [--library transformers diffusers timm] [--models llama bert ...]
        [--policies full pointwise ...] [--json FILE] [--seconds 600]

Each model is made from its configuration's defaults with few and narrow layers, in train mode with dropout, or from
the settings in `data/library_models.json`. For each policy, loss, gradients and buffers of the second of two steps are
compared with plain training: "equal" is bit for bit, "rounds otherwise" is within 1e-5 of a tensor's largest value. A
model that neither the rules of this file nor those settings make small, or that does not train from the inputs made
for it, is not built; one that does not repeat its own plain step is not compared. timm needs `pip install timm
torchvision`; with `TIMM_FUSED_ATTN=0` it computes attention by matmuls. With `--json`, results are added to those in
the file, and models that it has are skipped: a long run can be made in parts.
"""

from __future__ import annotations

import argparse
import collections
import functools
import inspect
import itertools
import json
import random
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto

from ckpt_ft import apply_policy
from ckpt_ft.errors import UserError

POLICIES = ("full", "every:2,pointwise", "save:attention+matmul", "segments:2,offload", "head")
MOST_PARAMETERS, MOST_PARAMETERS_OF_TIMM, SECONDS = 5_000_000, 40_000_000, 120


def decoded(value: Any) -> Any:
    """Returns settings or inputs of `data/library_models.json`, whose README says how tensors are written there."""
    if isinstance(value, list):
        return tuple(map(decoded, value))
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("list", *DTYPES):
        ((kind, items),) = value.items()
        return [decoded(item) for item in items] if kind == "list" else torch.tensor(items, dtype=DTYPES[kind])
    if isinstance(value, dict):
        return {key: decoded(item) for key, item in value.items()}
    kind, *sizes = value.split() if isinstance(value, str) else ("",)
    if kind == "randn":
        return torch.randn(*map(int, sizes))
    if kind == "randint":
        low, high, *shape = map(int, sizes)
        return torch.randint(low, high, shape)
    if kind == "full":
        filled = torch.full(tuple(map(int, sizes[2:])), float(sizes[1]))
        return filled.to(DTYPES[sizes[0]])
    return value


DTYPES = {"float": torch.float32, "long": torch.int64, "bool": torch.bool}
KNOWN = json.loads((Path(__file__).parent / "data" / "library_models.json").read_text())
TRANSFORMERS, DIFFUSERS, DIFFUSERS_SIZES = (
    decoded(KNOWN["transformers"]), KNOWN["diffusers"], decoded(KNOWN["sizes of diffusers"]),
)  # fmt: skip
Built = tuple[nn.Module, dict[str, Any]]  # a model and the inputs of its step
TIMM: dict[str, dict[str, Any]] = {**{key: {} for key in KNOWN["timm, as it is"]}, **decoded(KNOWN["timm"])}


def sized(name: str, value: int) -> int:
    """Returns the small value of a setting, by the first pattern that matches its name; a smaller value stays."""
    for pattern, small in KNOWN["sizes of transformers"]:
        if re.search(pattern, name):
            return small if "token_id" in name else min(value, small)
    return value


def shrunk(config: Any) -> dict[str, Any]:
    """Returns the settings of a small configuration for its class, from one with the defaults."""
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            settings[name] = shrunk(value)
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif isinstance(value, int):
            settings[name] = sized(name, value)
        elif isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
            if re.search(r"depths|layer_counts|num_layers|blocks", name):
                settings[name] = [1] * len(value)
            elif re.search(r"hidden|embed|dim|channels|widths", name):
                settings[name] = [8 * (i + 1) for i in range(len(value))]
            elif re.search(r"heads", name):
                settings[name] = [min(x, 2) for x in value]
    settings.pop("layer_types", None)
    for name in ("use_cache", "return_dict"):
        if hasattr(config, name):
            settings[name] = name == "return_dict"
    return settings


def families() -> dict[str, str]:
    """Returns types of models by name with the class that is trained, of the installed transformers."""
    found: dict[str, str] = {}
    for task in KNOWN["tasks of transformers"]:
        for name, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(name, classes if isinstance(classes, str) else classes[0])
    return found


def first_that_trains(attempts: Iterator[Callable[[], Built]]) -> Built:
    """Returns the first model that makes a step. Any error of a library means that the next way is tried."""
    said = "no settings"
    for attempt in attempts:
        try:
            model, inputs = attempt()
            loss_of(model(**inputs)).backward()
            return model, inputs
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
    raise ValueError(said)


def transformers_model(name: str) -> Built:
    """Returns a small model of a type and the inputs of its step."""
    kind, default = getattr(transformers, families()[name]), transformers.AutoConfig.for_model(name)

    def attempt(other: dict[str, int]) -> Built:
        settings = shrunk(default)
        known = {key: value for key, value in other.items() if key in settings}
        config = type(default)(**settings | known | TRANSFORMERS.get(name, {}))
        config.use_cache = False  # a KV cache changes the layout of keys, and a checkpointed block has none
        return instance_of(kind, config), model_inputs(kind, config)

    return first_that_trains(functools.partial(attempt, other) for other in KNOWN["variants of transformers"])


def instance_of(kind: Any, *args: Any, most: int = MOST_PARAMETERS, **kwargs: Any) -> nn.Module:
    """An instance of a class of models.

    Raises:
        ValueError: it has too many parameters.
    """
    with torch.device("meta"):
        if (count := sum(p.numel() for p in kind(*args, **kwargs).parameters())) > most:
            raise ValueError(f"not small: {count:,} parameters")
    torch.manual_seed(0)
    model: nn.Module = kind(*args, **kwargs)
    return model.train()


def model_inputs(kind: Any, config: Any) -> dict[str, Any]:
    """Returns inputs of a class of transformers from its name and its argument names."""
    torch.manual_seed(1)
    ids = torch.randint(3, 99, (2, 16))
    size = getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    frames = (getattr(config, "num_frames", 2),) if kind.__name__.endswith("VideoClassification") else ()
    values = {
        "input_ids": ids,
        "pixel_values": torch.randn(2, *frames, channels, height, width),
        "pixel_values_videos": torch.randn(2, getattr(config, "frames_per_clip", 2), channels, height, width),
        "input_values": torch.randn(2, 4000),
        "input_features": torch.randn(2, 64, getattr(config, "num_mel_bins", 80)),
    }
    takes = inspect.signature(kind.forward).parameters
    main = kind.main_input_name if kind.main_input_name in values else next(name for name in values if name in takes)
    inputs = {main: values[main]}
    if "labels" in takes:
        pixels = torch.randint(0, 2, (2, height, width))
        labels = {"Classification": torch.tensor([0, 1]), "SemanticSegmentation": pixels, "CTC": ids[:, :3]}
        inputs["labels"] = next((made for end, made in labels.items() if kind.__name__.endswith(end)), ids)
    return inputs


# --- diffusers

BLOCKS = {"down_block_types": slice(0, 2), "up_block_types": slice(-2, None)}  # as many as `block_out_channels`


def diffusers_model(name: str) -> Built:
    """Returns a small model of a class of diffusers, and inputs from its argument names."""
    import diffusers

    kind = getattr(diffusers, name)
    settings: dict[str, Any] = {}
    for key, parameter in inspect.signature(kind.__init__).parameters.items():
        value, default = DIFFUSERS_SIZES.get(key), parameter.default
        fits = (
            value is not None and default is not None and not (isinstance(default, tuple) and isinstance(value, int))
        )
        if key in BLOCKS and isinstance(default, tuple):
            settings[key] = default[BLOCKS[key]]
        elif fits:
            settings[key] = value

    def known() -> Built:
        model = instance_of(kind, **decoded(DIFFUSERS[name]["settings"]))
        torch.manual_seed(1)
        return model, decoded(DIFFUSERS[name]["inputs"])

    def attempts() -> Iterator[Callable[[], Built]]:
        for drop in ((), ("axes_dims_rope", "axes_dim_rope", "patch_size", "in_channels", "out_channels")):
            chosen = {key: value for key, value in settings.items() if key not in drop}
            for shape in range(4):
                yield functools.partial(attempt, chosen, shape)

    def attempt(chosen: dict[str, Any], shape: int) -> Built:
        model = instance_of(kind, **chosen)
        return model, list(diffusers_inputs(model))[shape]

    return first_that_trains(iter([known]) if name in DIFFUSERS else attempts())


def diffusers_inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Yields inputs as images, as videos and as packed tokens."""
    torch.manual_seed(1)
    config = model.config
    channels = config.get("in_channels") or 4
    text = next((config[key] for key in KNOWN["widths of texts"] if isinstance(config.get(key), int)), 32)
    for shape in ((2, channels, 8, 8), (2, channels, 5, 8, 8), (2, 5, channels, 8, 8), (2, 16, channels)):
        packed = len(shape) == 3
        values = {
            **{name: torch.randn(shape) for name in ("hidden_states", "sample", "latents")},
            **{name: torch.randn(2, 6, text) for name in ("encoder_hidden_states", "prompt_embeds")},
            **decoded(KNOWN["inputs of diffusers"]),
            "timestep": torch.tensor([0.3, 0.4] if packed else [3, 4]),
            "pooled_projections": torch.randn(2, config.get("pooled_projection_dim") or 32),
            "img_ids": torch.arange(48).view(16, 3) % 4,
        }
        names = [
            key for key, parameter in inspect.signature(model.forward).parameters.items()
            if key in values and (parameter.default is parameter.empty or key in KNOWN["needed inputs"])
        ]  # fmt: skip
        yield {key: values[key] for key in names}


def diffusers_names() -> list[str]:
    """Returns U-Nets, transformers, autoencoders and ControlNets of the installed diffusers."""
    import diffusers

    pattern = r"(UNet.*Model|Transformer\w*Model|Transformer\w*|^Autoencoder\w+|^VQModel|Prior)$"
    found = {
        name for name in dir(diffusers)
        if re.search(pattern, name) and inspect.isclass(getattr(diffusers, name))
        and issubclass(getattr(diffusers, name), diffusers.ModelMixin)
    }  # fmt: skip
    return sorted(found | DIFFUSERS.keys())


# --- timm


def timm_model(name: str) -> Built:
    """Returns a small model of timm for 64 x 64 pixels, or for its own size, and two images."""
    import timm  # type: ignore[import-not-found]

    def attempt(settings: dict[str, Any], small: bool) -> Built:
        settings = settings | TIMM[name] | {"num_classes": 8}
        model = instance_of(functools.partial(timm.create_model, name), most=MOST_PARAMETERS_OF_TIMM, **settings)
        side = 64 if small else int(model.default_cfg["input_size"][-1])  # type: ignore[index]
        torch.manual_seed(1)
        return model, {next(iter(inspect.signature(model.forward).parameters)): torch.randn(2, 3, side, side)}

    ways = itertools.product(({"img_size": 64}, {}), (True, False))  # not every model takes an image size
    return first_that_trains(functools.partial(attempt, settings, small) for settings, small in ways)


# --- shared by all libraries


def loss_of(output: Any) -> torch.Tensor:
    """Returns the model's loss, or the sum of the mean squares of its outputs."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.float().mean()
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    trained = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in trained]).sum()


def numbers(model: nn.Module, inputs: dict[str, Any], before: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns loss, gradients and buffers of the second of two steps, from the buffers `before`."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model(**inputs))
        loss.backward()
    found = {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def differing(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], bound: float) -> list[str]:
    """Returns the names of values that differ by more than a bound, relative to the largest value."""
    if ours.keys() != plain.keys():
        return sorted(ours.keys() ^ plain.keys())
    largest = max((float(x.abs().max()) for x in plain.values() if x.is_floating_point() and x.numel()), default=0.0)
    found = []
    for name, wanted in plain.items():
        both_nan = wanted.isnan().any() and ours[name].isnan().any()
        if torch.equal(ours[name], wanted) or not wanted.numel() or both_nan:
            continue
        scale = max(float(wanted.abs().max()), 1e-3 * largest)
        if not bound or float((ours[name] - wanted).abs().max()) > bound * scale:
            found.append(name)
    return found


def verdicts(model: nn.Module, inputs: dict[str, Any], policies: list[str]) -> dict[str, str]:
    """Returns, by policy: "equal", "raised: ...", "differs: ..." or "no match: ..."."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plain = numbers(model, inputs, before)
    if again := differing(numbers(model, inputs, before), plain, 0):
        return dict.fromkeys(policies, f"not deterministic: {again[0]}")
    found = {}
    for policy in policies:
        try:
            applied = apply_policy(model, policy, verify="always")
        except UserError as error:
            found[policy] = f"no match: {error}"
            continue
        try:
            ours = numbers(model, inputs, before)
            if names := differing(ours, plain, 1e-5):
                found[policy] = f"differs: {', '.join(names[:3])} ({len(names)})"
            else:
                found[policy] = "rounds otherwise" if differing(ours, plain, 0) else "equal"
        except Exception as error:  # any error is reported
            found[policy] = f"raised: {type(error).__name__}: {error}"
        applied.remove()
    return found


# by library: the function that builds a model and its inputs from a name, and the function that lists names
LIBRARIES: dict[str, tuple[Callable[[str], Built], Callable[[], Iterable[str]]]] = {
    "transformers": (transformers_model, families),
    "diffusers": (diffusers_model, diffusers_names),
    "timm": (timm_model, lambda: TIMM),
}


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def main() -> None:
    """Runs, prints one line per model, and fails if a step raised or differed under a policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", choices=list(LIBRARIES), default=["transformers", "diffusers"])
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after a model that ends later")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    begin = time.monotonic()
    results: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    results["versions"] = {name: version(name) for name in ("torch", *args.library)} | results.get("versions", {})
    signal.signal(signal.SIGALRM, _too_long)
    for library in args.library:
        found = results.setdefault(library, {})
        build, names = LIBRARIES[library]
        for name in args.models or names():
            if name in found:
                continue
            if time.monotonic() - begin > args.seconds:
                break
            signal.alarm(SECONDS)
            try:
                model, inputs = build(name)
                found[name] = verdicts(model, inputs, args.policies)
            except Exception as error:  # any error of the library: this model does not train this way
                found[name] = f"not built: {type(error).__name__}: {error}"[:300]
            signal.alarm(0)
            print(f"{name}: {found[name]}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    wrong = []
    for library in args.library:
        built = {name: found for name, found in results[library].items() if isinstance(found, dict)}
        counts = collections.Counter(v.partition(":")[0] for found in built.values() for v in found.values())
        print(f"{library}: {len(built)} of {len(results[library])} classes built; by policy and class: {dict(counts)}")
        wrong += [
            f"{name} {policy}: {found}"
            for name, of in built.items()
            for policy, found in of.items()
            if found.startswith(("raised", "differs"))
        ]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
