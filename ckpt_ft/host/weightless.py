"""`from_pretrained` of transformers and diffusers without weights: a model has the shapes and dtypes of its config.

The files of a checkpoint are not opened, and need not exist.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_ft.compat.libraries import attention_of, init_weights
from ckpt_ft.errors import UserError
from ckpt_ft.standins import flash_attention
from ckpt_ft.standins.quantised_layers import to_int8, to_nf4

Put = Callable[[nn.Module], None]
_OWN = (  # arguments of `from_pretrained` that are about files, or read here
    "state_dict", "proxies", "tqdm_class", "output_loading_info", "dtype",
    "torch_dtype", "device_map", "max_memory", "offload_folder", "offload_buffers", "quantization_config",
    "subfolder", "variant", "adapter_kwargs", "adapter_name", "generation_config", "gguf_file",
    "distributed_config", "device_mesh", "tp_plan", "tp_size", "trust_remote_code", "allow_all_kernels", "use_kernels",
    "kernel_config", "key_mapping", "mirror", "low_cpu_mem_usage", "from_tf", "from_flax",
    "offload_state_dict", "cache_dir", "ignore_mismatched_sizes", "force_download", "local_files_only", "token",
    "revision", "use_safetensors", "weights_only", "fusion_config", "disable_mmap",
)  # fmt: skip
_OF_CONFIG = ("subfolder", "cache_dir", "force_download", "local_files_only", "token", "revision", "trust_remote_code")


def load_no_weights(put: Put, below: int = 0) -> None:
    """Replace `from_pretrained` in this process.

    put: called with each model on "meta", and turns its tensors into fakes.
    below: checkpoints on this machine with fewer bytes are loaded.
    """
    with suppress(ImportError):  # a package that is missing, or broken on this machine, is none of the script's
        _patch_transformers(put, below)
    when_imported("diffusers.models.modeling_utils", lambda: _patch_diffusers(put, below))


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call `call` when the script imports a module, after it: few scripts need one that takes long to import."""
    sys.meta_path.insert(0, _WhenImported(name, call))


class _WhenImported(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            self.call()

        spec.loader.exec_module = executed
        return spec


def _local_file(name: Any, files: Iterable[str], given: Mapping[str, Any]) -> Path | None:
    """The first of `files` that a checkpoint has on this machine."""
    from transformers.utils import cached_file

    where = {"subfolder": given.get("subfolder") or "", "revision": given.get("revision"), "local_files_only": True}
    for file in files:
        with suppress(OSError):
            return Path(cached_file(str(name), file, **where))
    return None


def _is_small(name: Any, given: Mapping[str, Any], below: int) -> bool:
    """Whether a checkpoint is one file on this machine with fewer bytes than `below`, and not to be quantised."""
    if not below or given.get("quantization_config") is not None:
        return False
    names = ("model", "diffusion_pytorch_model", "pytorch_model")
    found = _local_file(name, [f"{one}.{kind}" for one in names for kind in ("safetensors", "bin")], given)
    return found is not None and found.stat().st_size < below


def _patch_transformers(put: Put, below: int) -> None:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ckpt_ft.compat.libraries import from_config as make
    from ckpt_ft.workloads.transformers_models import keep_in_float32

    load = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if _is_small(name, kwargs, below):
            return load(cls, name, *args, config=config, **kwargs)
        given = {key: kwargs.pop(key) for key in list(kwargs) if key in _OWN or key.startswith("_")}
        given = {key: value for key, value in given.items() if value is not None}
        if unsupported := [key for key in ("gguf_file", "distributed_config", "tp_plan") if given.get(key)]:
            raise UserError(f"from_pretrained({unsupported[0]}=...) is not modelled in a dry run; leave it out")
        if not isinstance(config, PreTrainedConfig):
            files = {key: given[key] for key in _OF_CONFIG if key in given and key != "trust_remote_code"}
            config, kwargs = cls.config_class.from_pretrained(
                config or name, return_unused_kwargs=True, **files, **kwargs
            )
        config = copy.deepcopy(config)
        attention = kwargs.pop("attn_implementation", None) or attention_of(config)
        quantised = given.get("quantization_config") or getattr(config, "quantization_config", None)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        experts = kwargs.pop("experts_implementation", None)
        chosen = {"experts_implementation": experts} if experts else {}
        model = built(
            cls, config, *args, dtype=_dtype(given, config), attn_implementation=_fused(attention), **chosen, **kwargs
        )
        model.name_or_path = model.config.name_or_path = str(name)
        _draw_missing(model, str(name), given)
        _quantise(model, quantised)
        put(model)
        _to_device_map(model, given.get("device_map"))
        model.eval()
        empty: dict[str, Any] = {
            key: [] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        }
        return (model, empty) if given.get("output_loading_info") else model

    def built(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            model = make.__func__(cls, config, **kwargs)
        keep_in_float32(model, str(model.dtype).removeprefix("torch."))
        return model

    def from_config(cls: Any, config: Any, **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation"):
            kwargs["attn_implementation"] = _fused(kwargs["attn_implementation"])
        model = built(cls, config, **kwargs)
        if sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) < below:
            return make.__func__(cls, config, **kwargs)
        put(model)
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    setattr(PreTrainedModel, make.__name__, classmethod(from_config))


def _draw_missing(model: Any, name: str, given: Mapping[str, Any]) -> None:
    """Draw the random numbers that loading draws for weights that the checkpoint lacks, such as those of a new head.

    So a script that sets a seed gets its batches in the order of a live run. Checkpoints that are not on this machine
    are passed over.
    """
    from transformers import PreTrainedModel

    known = _names_in_checkpoint(name, given)
    prefix = f"{model.base_model_prefix}."
    seen: set[int] = set()

    def draw(module: nn.Module, path: str, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child, inner in module.named_children():
            draw(inner, f"{path}{child}.", owner)
        own = {f"{path}{part}": p for part, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(map(id, own.values()))
        if own and not any({key, key.removeprefix(prefix), prefix + key} & known for key in own):
            init_weights(owner)(copy.deepcopy(module).to_empty(device="cpu"))

    if known:
        draw(model, "", model)


def _names_in_checkpoint(name: str, given: Mapping[str, Any]) -> set[str]:
    """The names of a checkpoint's tensors; none if it is not on this machine."""
    from safetensors import safe_open

    files = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors")
    found = _local_file(name, files, given)
    if found is None:
        return set()
    if found.suffix == ".json":
        return set(json.loads(found.read_text())["weight_map"])
    with safe_open(found, "pt") as tensors:
        return set(tensors.keys())


def _dtype(given: dict[str, Any], config: Any) -> torch.dtype:
    asked = given.get("dtype", given.get("torch_dtype", "auto"))
    if isinstance(asked, dict):
        asked = asked.get("", "auto")
    if asked == "auto":
        asked = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, asked) if isinstance(asked, str) else asked


def _fused(attention: Any) -> Any:
    """The stand-in for a kernel of FlashAttention, which need not be installed."""
    if not isinstance(attention, str) or "flash" not in attention:
        return attention
    flash_attention.register()
    return flash_attention.NAME_3 if attention.endswith("3") else flash_attention.NAME


def _quantise(model: nn.Module, config: Any) -> None:
    """Pack the layers of `model` as bitsandbytes does; raises UserError for another library's method."""
    if config is None:
        return
    asked = config if isinstance(config, dict) else config.to_dict()
    skip = tuple(asked.get("llm_int8_skip_modules") or ()) or None
    if asked.get("load_in_8bit"):
        to_int8(model, skip)
    elif asked.get("load_in_4bit"):
        compute = asked.get("bnb_4bit_compute_dtype") or "float32"
        compute = getattr(torch, compute.removeprefix("torch.")) if isinstance(compute, str) else compute
        to_nf4(model, compute, skip, bool(asked.get("bnb_4bit_use_double_quant")))
    else:
        raise UserError(
            f"quantization {asked.get('quant_method', type(config).__name__)}: a dry run knows bitsandbytes' 4 and 8 "
            "bits; ask `ckpt-ft estimate MODEL` for others"
        )
    model.is_quantized = model.is_loaded_in_4bit = True  # type: ignore[assignment]
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bool(asked.get("load_in_4bit")), bool(asked.get("load_in_8bit"))  # type: ignore[assignment]
    model.quantization_method = "bitsandbytes"  # type: ignore[assignment]
    model.config.quantization_config = config  # type: ignore[union-attr]


def _to_device_map(model: nn.Module, where: Any) -> None:
    """Move a model to the card if its device map names it, or says "auto"."""
    if where is None:
        return
    parts = set(where.values()) if isinstance(where, dict) else {where}
    if parts <= {"cpu", torch.device("cpu")} or not torch.cuda.is_available():
        return
    if not all(
        part in ("auto", "balanced", "sequential", "cuda", "cuda:0", 0, torch.device("cuda", 0)) for part in parts
    ):
        raise UserError(f'device_map {where}: a dry run puts a model on one card; give "auto" or leave it out')
    model.to("cuda")


def _patch_diffusers(put: Put, below: int) -> None:
    from diffusers.models.modeling_utils import ModelMixin

    load = ModelMixin.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, **kwargs: Any) -> Any:
        if _is_small(name, kwargs, below):
            return load(cls, name, **kwargs)
        files = {key: kwargs[key] for key in (*_OF_CONFIG[:-1], "proxies") if kwargs.get(key) is not None}
        config = cls.load_config(name, **files)
        with torch.device("meta"):
            model = cls.from_config(config)
        if isinstance(kwargs.get("torch_dtype"), torch.dtype):
            model.to(kwargs["torch_dtype"])
        put(model)
        return model.eval()

    ModelMixin.from_pretrained = classmethod(from_pretrained)
