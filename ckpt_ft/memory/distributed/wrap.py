"""The model as its launch shares it: accelerate's own FSDP2 wrapping, or DDP's buckets, on fake tensors."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt_ft.errors import UserError

from .buckets import Buckets
from .launch import Launch


def share(model: nn.Module, launch: Launch, mesh: DeviceMesh) -> None:
    """Wrap `model` in place as `accelerate launch` does for `launch`.

    Raises:
        UserError: accelerate refuses it.
    """
    if launch.strategy == "ddp":
        Buckets(model, mesh.get_group(), as_view=launch.gradient_as_bucket_view)
    else:
        _fsdp2(model, launch, mesh)


def _fsdp2(model: nn.Module, launch: Launch, mesh: DeviceMesh) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(launch.mixed_precision)
    with patch.dict(os.environ, {"FSDP_VERSION": "2"}):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=launch.reshard_after_forward,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(launch.wrap) or None,
            cpu_ram_efficient_loading=False,
        )
    plugin.cpu_offload = CPUOffloadPolicy() if launch.cpu_offload else OffloadPolicy()
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp_shard",)),
        device=torch.device("cpu"),
        mixed_precision=launch.mixed_precision,
        is_main_process=False,
    )
    try:
        fsdp2_prepare_model(accelerator, model)
    except ValueError as error:
        raise UserError(f"launch: FSDP2 cannot wrap {type(model).__name__}: {' '.join(str(error).split())}") from error
