"""The caching allocator's options, in the syntax of PYTORCH_CUDA_ALLOC_CONF.

Names, defaults and limits are those of torch's c10/core/AllocatorConfig.{h,cpp}. Of the options that change bytes on
the device only expandable segments are replayed; options for pinned host memory and locking are accepted and ignored.
"""

from __future__ import annotations

from ckpt_ft.errors import UserError, did_you_mean

_VALUES = {"expandable_segments": ("True", "False"), "backend": ("native",)}  # that are replayed
_NO_EFFECT = {
    "pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_free_catch_all", "pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
}  # fmt: skip
_NOT_REPLAYED = {
    "garbage_collection_threshold": "collects by age; leave it out",
    "per_process_memory_fraction": "give the capacity in bytes instead",
    **dict.fromkeys(
        ("max_split_size_mb", "roundup_power2_divisions", "max_non_split_rounding_mb", "large_segment_size_mb"),
        "it changes the sizes of blocks and segments; leave it out, or take expandable_segments:True",
    ),
}


def expandable_segments(text: str | None) -> bool:
    """Whether `"backend:native,expandable_segments:True"` turns on expandable segments: one growing range of addresses
    per pool instead of a cudaMalloc per segment. None and "" do not.

    Raises:
        UserError: an unknown option, a value torch would refuse, or an option that the replay does not follow.
    """
    expandable = False
    for option in filter(None, map(str.strip, (text or "").split(","))):
        key, colon, value = (part.strip() for part in option.partition(":"))
        if not colon:
            raise UserError(f"allocator settings: cannot read '{option}'; write option:value,option:value")
        if key in _NOT_REPLAYED:
            raise UserError(f"allocator settings: '{key}' is not replayed: {_NOT_REPLAYED[key]}")
        if key not in _VALUES and key not in _NO_EFFECT:
            raise UserError(f"allocator settings: no option '{key}'{did_you_mean(key, _VALUES)} (expandable_segments)")
        if value not in _VALUES.get(key, (value,)):
            raise UserError(
                f"allocator settings '{key}:{value}': write {' or '.join(_VALUES[key])}; no other is replayed"
            )
        if key == "expandable_segments":
            expandable = value == "True"
    return expandable
