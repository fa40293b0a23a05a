"""A function in a process of its own, with a time limit: what it breaks or leaks, it keeps to itself.

Processes are forked from a server that has imported the libraries and never touched CUDA: ten seconds saved for each.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from ckpt_ft.errors import UserError, one_line

_PRELOAD = [
    "torch",
    "peft",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.vit.modeling_vit",
    "transformers.models.resnet.modeling_resnet",
    "diffusers.models.unets.unet_2d_condition",
    "benchmarks.on_gpu.work",
]


@dataclass(frozen=True)
class Outcome:
    """How it went: status "ok", "oom", "skipped" (does not suit, or a library is absent), "timeout" or "error"."""

    status: str
    value: Any
    message: str
    seconds: float


start_method = "forkserver"  # gpu.py falls back to "spawn" where a library's import touches CUDA all the same


def call(function: Callable[..., Any], *args: Any, limit: float) -> Outcome:
    """`function(*args)` in a new process, killed after `limit` seconds; arguments and result are pickled."""
    context: Any = multiprocessing.get_context(start_method)
    context.set_forkserver_preload(_PRELOAD)  # what is not installed is passed over
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(send, function, args), daemon=True)
    began = time.perf_counter()
    process.start()
    send.close()
    try:
        status, value, message = receive.recv() if receive.poll(limit) else ("timeout", None, f"over {limit:.0f} s")
    except EOFError:
        process.join()
        status, value, message = "error", None, f"the process ended with exit code {process.exitcode}"
    if status == "timeout":
        process.kill()
    process.join()
    return Outcome(status, value, message, time.perf_counter() - began)


def _run(send: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")  # of the libraries, the same for each case
    gc.freeze()  # collections need not walk, and so copy, what the server imported
    try:
        result = ("ok", function(*args), "")
    except torch.OutOfMemoryError as error:
        result = ("oom", None, one_line(error, 300))
    except UserError as error:
        result = ("skipped", None, one_line(error, 300))
    except Exception as error:  # whatever goes wrong is this case's result
        result = ("error", None, f"{type(error).__name__}: {one_line(error, 300)}")
    send.send(result)
    send.close()
