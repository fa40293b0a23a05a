"""The caching allocator's options, in the syntax of PYTORCH_CUDA_ALLOC_CONF.

Names, defaults and limits are those of torch's c10/core/AllocatorConfig.{h,cpp}. Only options that change bytes on the
device are kept; options for pinned host memory and locking are accepted and ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.units import MIB, whole_number

LEAST_SPLIT = 20  # MiB, of max_split_size_mb
_PAIR = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]*)\s*(?:,|$)")
_OPTIONS = ("expandable_segments", "max_split_size_mb")
_NO_EFFECT = {
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_free_catch_all",
    "pinned_reserve_segment_size_mb",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
}
_NOT_REPLAYED = {
    "garbage_collection_threshold": "collects by age; leave it out",
    "per_process_memory_fraction": "give the capacity in bytes instead",
    **dict.fromkeys(
        ("roundup_power2_divisions", "max_non_split_rounding_mb", "large_segment_size_mb"),
        "it changes the sizes of blocks and segments; leave it out",
    ),
}


@dataclass(frozen=True)
class AllocatorSettings:
    """The options that decide how the caching allocator places blocks.

    expandable_segments: one growing address range per pool instead of a cudaMalloc per segment.
    max_split_size: bytes; blocks of at least this size are never split; None splits all.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None

    @staticmethod
    def parse(text: str | None) -> AllocatorSettings:
        """Settings from `"expandable_segments:True,max_split_size_mb:128"`; None and "" give the defaults.

        Raises:
            UserError: an unknown option, a value torch would refuse, or an option that the replay does not follow.
        """
        settings, at, text = AllocatorSettings(), 0, (text or "").strip()
        while at < len(text):
            pair = _PAIR.match(text, at)
            if pair is None:
                raise UserError(f"allocator settings: cannot read '{text[at:]}'; write option:value,option:value")
            settings = _apply(settings, pair[1], pair[2].strip())
            at = pair.end()
        return settings


def _apply(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise UserError(f"allocator settings '{key}:{value}': write True or False")
        return replace(settings, expandable_segments=value == "True")
    if key == "max_split_size_mb":
        number = whole_number(value)
        if number is None or number < LEAST_SPLIT:
            raise UserError(f"allocator settings '{key}:{value}': write a whole number of MiB, at least {LEAST_SPLIT}")
        return replace(settings, max_split_size=number * MIB)
    if key in _NOT_REPLAYED:
        raise UserError(f"allocator settings: '{key}' is not replayed: {_NOT_REPLAYED[key]}")
    if key == "backend":
        if value != "native":
            raise UserError(f"allocator settings 'backend:{value}': only the native caching allocator is replayed")
    elif key not in _NO_EFFECT:
        raise UserError(f"allocator settings: no option '{key}'{did_you_mean(key, _OPTIONS)} ({', '.join(_OPTIONS)})")
    return settings
