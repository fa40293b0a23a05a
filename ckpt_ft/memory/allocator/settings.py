"""The caching allocator's options, in the syntax of PYTORCH_CUDA_ALLOC_CONF.

Names, defaults and limits are those of torch's c10/core/AllocatorConfig.{h,cpp}. The two options that people set are
replayed. Others that change bytes on the device are refused; those for pinned host memory and locking have no effect
here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ckpt_ft.errors import UserError, meant
from ckpt_ft.units import MIB, whole_number

_OPTIONS = ("expandable_segments", "max_split_size_mb")
_LEAST_SPLIT = 20  # MiB: the segment that requests between 1 and 10 MiB share is always split
_PAIR = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]*)\s*(?:,|$)")
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
    "roundup_power2_divisions": "rounds sizes to other steps; leave it out",
    "max_non_split_rounding_mb": "leave it out: it is 20 by default",
    "large_segment_size_mb": "leave it out: it is 20 by default",
}


@dataclass(frozen=True)
class AllocatorSettings:
    """The options that decide how the caching allocator places blocks. Sizes are bytes.

    expandable_segments: one growing address range per pool instead of a cudaMalloc per segment.
    max_split_size: blocks of at least this size are never split; None splits all.
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
        if number is None or number < _LEAST_SPLIT:
            raise UserError(
                f"allocator settings '{key}:{value}': write a whole number of MiB, at least {_LEAST_SPLIT}"
            )
        return replace(settings, max_split_size=number * MIB)
    if key in _NOT_REPLAYED:
        raise UserError(f"allocator settings: '{key}' is not replayed: {_NOT_REPLAYED[key]}")
    if key == "backend":
        if value != "native":
            raise UserError(f"allocator settings 'backend:{value}': only the native caching allocator is replayed")
    elif key not in _NO_EFFECT:
        raise UserError(f"allocator settings: no option '{key}'{meant(key, _OPTIONS)} ({', '.join(_OPTIONS)})")
    return settings
