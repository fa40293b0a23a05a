"""Runs a function in its own process with a time limit, so that failures and leaks do not affect others.

Processes are forked from a server that has imported the libraries and never used CUDA, which saves ten seconds each.
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

_MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "vit", "resnet")]
_PRELOAD = [
    "torch",
    "peft",
    "accelerate",
    *_MODELS,
    "diffusers.models.unets.unet_2d_condition",
    "benchmarks.on_gpu.work",
]


@dataclass(frozen=True)
class Outcome:
    """The outcome: status "ok", "oom", "skipped" (unsuitable, or a library is missing), "timeout" or "error"."""

    status: str
    value: Any
    message: str
    seconds: float


start_method = "forkserver"  # gpu.py uses "spawn" if a library's import initializes CUDA


def call(function: Callable[..., Any], *args: Any, limit: float) -> Outcome:
    """Calls `function(*args)` in a new process, killed after `limit` seconds; arguments and result are pickled."""
    context: Any = multiprocessing.get_context(start_method)
    context.set_forkserver_preload(_PRELOAD)  # packages that are not installed are ignored
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
    warnings.simplefilter("ignore")  # warnings of the libraries, equal for each case
    gc.freeze()  # garbage collection does not search, and so copy, the server's imported objects
    try:
        result = ("ok", function(*args), "")
    except torch.OutOfMemoryError as error:
        result = ("oom", None, one_line(error, 300))
    except UserError as error:
        result = ("skipped", None, one_line(error, 300))
    except Exception as error:  # any failure is this case's result
        result = ("error", None, f"{type(error).__name__}: {one_line(error, 300)}")
    send.send(result)
    send.close()
