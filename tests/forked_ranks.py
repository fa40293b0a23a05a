"""Two ranks of a CPU process group, without importing torch and transformers once more in each of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def run_ranks(work: Callable[..., None], *args: Any) -> None:
    """Call `work(rank, *args)` in two processes; an exception in one of them is raised here.

    They are forked, but for a machine with a GPU: autograd does not run in the forks of a process that has used one.
    """
    method = "spawn" if torch.cuda.is_available() else "fork"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        mp.start_processes(_quietly, args=(work, *args), nprocs=2, start_method=method)


def _quietly(rank: int, work: Callable[..., None], *args: Any) -> None:
    warnings.simplefilter("ignore")  # a fork inherits pytest's, which raise
    torch.set_num_threads(1)
    work(rank, *args)
