"""Ranks of a CPU process group that do not import torch and transformers again."""

from __future__ import annotations

import gc
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from recipe_scripts import forget_process


def run_ranks(work: Callable[..., None], *args: Any, ranks: int = 2) -> None:
    """Calls `work(rank, *args)` in `ranks` processes with torchrun's environment; raises a worker's exception.

    The processes are forked, except on a machine with a GPU: autograd does not run in forks of a process that has used
    one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    method = "spawn" if torch.cuda.is_available() else "fork"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        mp.start_processes(_rank, args=(ranks, port, work, *args), nprocs=ranks, start_method=method)


def _rank(rank: int, ranks: int, port: int, work: Callable[..., None], *args: Any) -> None:
    warnings.simplefilter("ignore")  # a fork inherits pytest's filters, which raise
    gc.freeze()  # otherwise each garbage collection of a rank would search, and so copy, the heap shared with pytest
    torch.set_num_threads(1)
    rank_environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in rank_environment.items()}, MASTER_ADDR="127.0.0.1")
    forget_process()
    work(rank, *args)
