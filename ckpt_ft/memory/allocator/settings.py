"""The caching allocator's options, in the syntax of PYTORCH_CUDA_ALLOC_CONF.

Names, defaults and limits are those of torch's c10/core/AllocatorConfig.{h,cpp}. Only options that change bytes on the
device are kept; options for pinned host memory and locking are accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.units import MIB, whole_number

MIN_BLOCK = 512  # every size is rounded up to a multiple of this
_INTERVALS = 16  # roundup_power2_divisions has one entry per power of two from 1 MiB to 64 GiB
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
}


@dataclass(frozen=True)
class AllocatorSettings:
    """The options that decide how the caching allocator places blocks. Sizes are bytes.

    expandable_segments: one growing address range per pool instead of a cudaMalloc per segment.
    max_split_size: blocks of at least this size are never split; None splits all.
    max_non_split_rounding_size: the excess of a block that is never split over the request it may serve.
    roundup_power2_divisions: () for none, else 16 entries, for 1 MiB, 2 MiB ... 32 GiB and up: the number of equal
        steps between two powers of two to which sizes are rounded up; 0 and 1 keep the rounding to 512 bytes.
    large_segment_size: the segment that requests between 1 and 10 MiB share, and a page of a large expandable segment.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding_size: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = ()
    large_segment_size: int = 20 * MIB

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
        if settings.max_split_size is not None and settings.max_split_size < settings.large_segment_size:
            raise UserError(f"allocator settings '{text}': max_split_size_mb must be at least large_segment_size_mb")
        return settings

    def block_size(self, nbytes: int) -> int:
        """The size of the block for a request of `nbytes` (DeviceCachingAllocator::round_size)."""
        if self.roundup_power2_divisions and nbytes >= MIN_BLOCK:
            interval = min(max(nbytes.bit_length() - 1 - 20, 0), _INTERVALS - 1)
            divisions = self.roundup_power2_divisions[interval]
            if divisions > 1 and nbytes > MIN_BLOCK * divisions:
                step = (1 << nbytes.bit_length() - 1) // divisions
                return -(-nbytes // step) * step
        return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def _apply(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    if key in _OPTIONS:
        name, read = _OPTIONS[key]
        return replace(settings, **{name: read(key, value)})
    if key in _NOT_REPLAYED:
        raise UserError(f"allocator settings: '{key}' is not replayed: {_NOT_REPLAYED[key]}")
    if key == "backend":
        if value != "native":
            raise UserError(f"allocator settings 'backend:{value}': only the native caching allocator is replayed")
    elif key not in _NO_EFFECT:
        raise UserError(f"allocator settings: no option '{key}'{did_you_mean(key, _OPTIONS)} ({', '.join(_OPTIONS)})")
    return settings


def _boolean(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UserError(f"allocator settings '{key}:{value}': write True or False")
    return value == "True"


def _bytes(least: int, key: str, value: str) -> int:
    number = whole_number(value)
    if number is None or number < least:
        raise UserError(f"allocator settings '{key}:{value}': write a whole number of MiB, at least {least}")
    return number * MIB


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """The divisions: `"4"` for every size, or `"[256:1,512:2,>:8]"` from each size (MiB) on."""
    if not value.startswith("["):
        return (_power_of_two(key, value, zero=False),) * _INTERVALS
    table: list[int] = [0] * _INTERVALS
    last: int | None = None
    for entry in value.strip("[]").split(","):
        size, _, count = (part.strip() for part in entry.partition(":"))
        divisions = _power_of_two(key, count, zero=True)
        if size == ">":
            start = 0 if last is None else last + 1
            table[start:] = [divisions] * (_INTERVALS - start)
            continue
        index = min(_power_of_two(key, size, zero=False).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            table[:index] = [divisions] * index
        table[index] = divisions
        last = index
    return tuple(table)


def _power_of_two(key: str, text: str, zero: bool) -> int:
    number = whole_number(text)
    if number is None or number & (number - 1) or (number == 0 and not zero):
        example = "write it as in 4 or [256:1,512:2,>:8]"
        raise UserError(f"allocator settings '{key}': '{text}' is not a power of two; {example}")
    return number


_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {  # the field of each option, and how its value is read
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_size", partial(_bytes, 20)),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", partial(_bytes, 20)),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "large_segment_size_mb": ("large_segment_size", partial(_bytes, 11)),
}
