"""Runs a recipe under DeepSpeed on CPU ranks, once per list of flags:
`accelerate launch --config_file ... deepspeed_on_cpu.py recipes/llm.py FLAGS -- FLAGS`.

accelerate requires an accelerator before it enables DeepSpeed, although DeepSpeed's engine runs on gloo.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from itertools import groupby

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

if __name__ == "__main__":
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)  # type: ignore[method-assign]
    # their compilation takes more than a minute at first use; gloo's collectives exist already
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    script, *arguments = sys.argv[1:]
    for is_separator, flags in groupby(arguments, lambda argument: argument == "--"):
        if not is_separator:
            AcceleratorState._reset_state(reset_partial_state=True)
            runpy.run_path(script)["main"](list(flags))
