"""Ranks of a CPU process group, without importing torch and transformers once more in each of them."""

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
    """Call `work(rank, *args)` in `ranks` processes with torchrun's environment; an exception in one is raised here.

    They are forked, but for a machine with a GPU: autograd does not run in the forks of a process that has used one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    method = "spawn" if torch.cuda.is_available() else "fork"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        mp.start_processes(_rank, args=(ranks, port, work, *args), nprocs=ranks, start_method=method)


def _rank(rank: int, ranks: int, port: int, work: Callable[..., None], *args: Any) -> None:
    warnings.simplefilter("ignore")  # a fork inherits pytest's, which raise
    gc.freeze()  # else each collection of a rank searches, and copies, the heap that it shares with pytest
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()}, MASTER_ADDR="127.0.0.1")
    forget_process()
    work(rank, *args)
