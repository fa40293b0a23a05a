"""Parts of a pipeline, each loaded by itself: what is wrong with one is one line that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads, require_weights
from ckpt_ft.workloads.workload import MIXED_PRECISION

from .arguments import PipelineArguments

if TYPE_CHECKING:
    from accelerate import Accelerator


def given(args: PipelineArguments) -> str:
    """The flag that names the pipeline, for errors."""
    return f"--pretrained_model_name_or_path {args.pretrained_model_name_or_path}"


def frozen_dtype(accelerator: Accelerator) -> torch.dtype:
    """That of weights which are not trained: mixed precision's.

    Raises:
        UserError: fp16 on a CPU, where Accelerate casts nothing to it.
    """
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("--mixed_precision fp16 needs a GPU; on a CPU give bf16 or no")
    return MIXED_PRECISION.get(accelerator.mixed_precision) or torch.float32


def in_dtype(dtype: torch.dtype) -> dict[str, Any]:
    """`dtype` as diffusers' `from_pretrained` is told it: under a name that has changed."""
    from diffusers.utils import deprecation_utils

    renamed = hasattr(deprecation_utils, "_TORCH_DTYPE_DEPRECATION_MESSAGE")
    return {"dtype" if renamed else "torch_dtype": dtype}


def pipeline_index(args: PipelineArguments) -> dict[str, Any]:
    """The pipeline's own file: its class and those of its components.

    Raises:
        UserError: it is not there or cannot be read.
    """
    from diffusers import DiffusionPipeline

    with library_reads(f"{given(args)}: no usable model_index.json"):
        index = DiffusionPipeline.load_config(args.pretrained_model_name_or_path, revision=args.revision)
        return {**index, "_class_name": index["_class_name"]}  # which must be there


def load_vae(path: str) -> Any:
    """A VAE from a place of its own, or from the `vae` folder of a pipeline there."""
    from diffusers import AutoencoderKL

    with library_reads(f"--pretrained_vae_model_name_or_path {path} cannot be loaded"):
        try:
            vae = AutoencoderKL.from_pretrained(path)
        except (OSError, ValueError):
            vae = AutoencoderKL.from_pretrained(path, subfolder="vae")
        require_weights(vae)
    return vae


def check_words(source: str, tokenizer: Any) -> None:
    """Raises UserError where `tokenizer` tells no word from another: without its files it knows none."""
    if tokenizer("a").input_ids == tokenizer("b").input_ids:
        raise UserError(
            f"{source}: its tokenizer knows no words; are its files (tokenizer.json, vocab.json) all there?"
        )


def load_part(cls: Any, args: PipelineArguments, subfolder: str, **kwargs: Any) -> Any:
    """`cls.from_pretrained` of one part of the pipeline.

    Raises:
        UserError: it is not there or cannot be read.
    """
    with library_reads(f"{given(args)}: no usable {subfolder}"):
        part = cls.from_pretrained(
            args.pretrained_model_name_or_path, subfolder=subfolder, revision=args.revision, **kwargs
        )
        if isinstance(part, nn.Module):
            require_weights(part)
    return part
