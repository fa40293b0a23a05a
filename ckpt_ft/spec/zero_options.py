"""What of a DeepSpeed configuration decides the bytes and seconds of ZeRO, with DeepSpeed's own defaults.

Names and defaults are those of deepspeed/runtime/zero/config.py (0.19.8). "auto" is worked out from the model's hidden
size by accelerate (accelerator.py: _prepare_deepspeed), and so it is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_ft.errors import UserError

_AUTO = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
_COUNTS = (*_AUTO, "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size")
_ALONE = {  # is modelled with this value, DeepSpeed's default, alone
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "allgather_partitions": True,
    "use_multi_rank_bucket_allreduce": True,
    "memory_efficient_linear": True,
    "compute_grad_norm": True,
    "parameter_alignment": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "use_all_reduce_for_fetch_params": False,
    "allgather_sequential": False,
    "module_granularity_threshold": 0,
}
# Changes no step: what is checked, logged and saved. Round robin deals gradients out so that every rank needs what is
# modelled, the last one's; parts are gathered in one piece, whatever the bucket (runtime/utils.py).
_FREE = {
    "stage", "allgather_bucket_size", "round_robin_gradients", "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "load_from_fp32_weights", "ignore_unused_parameters",
    "elastic_checkpoint", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
    "pipeline_loading_checkpoint", "overlap_comm", "offload_optimizer", "offload_param",
}  # fmt: skip


@dataclass(frozen=True)
class ZeroOptions:
    """DeepSpeed's `zero_optimization`, as far as it is modelled; counts are of elements, None is "auto".

    Attributes:
        reduce_bucket_size: gradients that are reduced at a time.
        overlap_comm: whether they are reduced beside backward; None for DeepSpeed's default, stage 3 alone.
        prefetch_bucket_size: parameters that stage 3 gathers ahead of their use.
        param_persistence_threshold: parameters up to this size are not partitioned by stage 3 ...
        model_persistence_threshold: ... as long as they are no more than this together.
        max_live_parameters: parameters that stage 3 gathers ahead only as long as it holds fewer.
        max_reuse_distance: parameters that are used again within so many stay gathered.
        sub_group_size: parameters that stage 3 updates at a time.
    """

    reduce_bucket_size: int | None = 500_000_000
    overlap_comm: bool | None = None
    prefetch_bucket_size: int | None = 50_000_000
    param_persistence_threshold: int | None = 100_000
    model_persistence_threshold: int = 2**63 - 1
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000

    @classmethod
    def read(cls, options: Mapping[str, Any], source: str) -> ZeroOptions:
        """Those of `zero_optimization` in a DeepSpeed configuration.

        Raises:
            UserError: an option that is not modelled, or a count that is none.
        """
        found: dict[str, Any] = {}
        for key, value in options.items():
            name = key.removeprefix("stage3_") if key.removeprefix("stage3_") in (*_COUNTS, *_ALONE, *_FREE) else key
            if name in _COUNTS:
                found[name] = None if value == "auto" and name in _AUTO else _count(value, key, source)
            elif name in _ALONE and value != _ALONE[name] and value != "auto":
                raise UserError(f"{source}: {key}: {value} is not modelled; leave it at {_ALONE[name]}")
            elif name not in _ALONE and name not in _FREE:
                raise UserError(f"{source}: {key} of zero_optimization is not modelled; leave it out")
        overlap = options.get("overlap_comm")
        return cls(**found, overlap_comm=None if overlap in (None, "auto") else bool(overlap))

    def filled(self, stage: int, hidden_size: int | None) -> ZeroOptions:
        """No option left open: defaults of the stage, and "auto" from the model's hidden size.

        Raises:
            UserError: "auto" for a model without a hidden size, which accelerate refuses as well.
        """
        auto = [name for name in _AUTO if getattr(self, name) is None]
        if auto and hidden_size is None:
            raise UserError(f"launch: {', '.join(auto)}: auto, and the model has no hidden_size; give a number")
        sizes = (
            {}
            if hidden_size is None
            else {
                "reduce_bucket_size": hidden_size**2,
                "prefetch_bucket_size": int(0.9 * hidden_size**2),
                "param_persistence_threshold": 10 * hidden_size,
            }
        )
        overlap = stage == 3 if self.overlap_comm is None else self.overlap_comm
        return replace(self, overlap_comm=overlap, **{name: sizes[name] for name in auto})


def _count(value: Any, key: str, source: str) -> int:
    try:
        count = int(float(value))  # 5e8 is a text in YAML
    except (TypeError, ValueError, OverflowError):
        count = -1
    if count < 0:
        raise UserError(f"{source}: {key}: {value}: give a number of elements, or auto where DeepSpeed takes it")
    return count
