"""A process group without the other processes, in which one rank's real code runs (FakeProcessGroup)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch._C._distributed_c10d import _set_global_rank, _unregister_process_group
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# What distributed_c10d knows of the groups there are: a trace inside of a run on several processes gets its own.
_REGISTRIES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")
_UNUSED = count(1_000_000, 1_000_000)  # groups are named by numbers, and C++ keeps a list of its own


@contextmanager
def rank_of(*processes: int, rank: int = 0, names: tuple[str, ...] | None = ("dp_shard",)) -> Iterator[DeviceMesh]:
    """One of the processes of a mesh, whatever group this process is in otherwise.

    Of unevenly sharded tensors rank 0 has the most.

    Args:
        processes: along each dimension of the mesh, and `names` of the dimensions.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own: dict[str, Any] = {name: type(getattr(distributed_c10d, name))() for name in _REGISTRIES}
    own |= {"_world": distributed_c10d._World(), "_group_count": next(_UNUSED), "_default_pg_init_method": None}
    hook, before = sys.excepthook, dist.get_rank() if dist.is_initialized() else -1
    try:
        with patch.multiple(distributed_c10d, **own):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(processes))
            yield init_device_mesh("cpu", processes, mesh_dim_names=names)
    finally:
        # destroy_process_group() would take every group off C++'s list, those of a run on several processes too
        for name in own["_pg_names"].values():
            _unregister_process_group(name)
        _set_global_rank(before)
        sys.excepthook = hook  # init_process_group has put one over it
