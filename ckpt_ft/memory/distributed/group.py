"""A process group of one rank without the other processes, which runs the rank's real code (FakeProcessGroup)."""

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

# Tables of process groups in distributed_c10d: a trace in a distributed run uses separate tables.
_REGISTRIES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")
_UNUSED = count(1_000_000, 1_000_000)  # numbers for names of groups: C++ has its own list of names


@contextmanager
def rank_of(*processes: int, rank: int = 0, names: tuple[str, ...] | None = ("dp_shard",)) -> Iterator[DeviceMesh]:
    """Makes this process one rank of a mesh, even if it is in another process group.

    Args:
        processes: number of processes along each dimension of the mesh.
        rank: this process's rank; with uneven shards, rank 0 holds the most.
        names: names of the dimensions.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()  # it keeps meshes, with their groups, and an equal mesh is answered from it
    own: dict[str, Any] = {name: type(getattr(distributed_c10d, name))() for name in _REGISTRIES}
    own |= {"_world": distributed_c10d._World(), "_group_count": next(_UNUSED), "_default_pg_init_method": None}
    hook, before = sys.excepthook, dist.get_rank() if dist.is_initialized() else -1
    try:
        with patch.multiple(distributed_c10d, **own):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(processes))
            yield init_device_mesh("cpu", processes, mesh_dim_names=names)
    finally:
        _clear_sharding_prop_cache()
        # destroy_process_group() would remove every group from C++'s list, also those of a distributed run
        for name in own["_pg_names"].values():
            _unregister_process_group(name)
        _set_global_rank(before)
        sys.excepthook = hook  # init_process_group has replaced it
