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
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckpt_ft.compat.distributed import WORLD, set_global_rank, unregister_group, world_of

# torch 2.13 has new names for them, and warns of the old ones
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_UNUSED = count(1_000_000, 1_000_000)  # numbers for names of groups: C++ has its own list of names


@contextmanager
def rank_of(*processes: int, rank: int = 0, names: tuple[str, ...] | None = ("dp_shard",)) -> Iterator[DeviceMesh]:
    """Makes this process one rank of a mesh, even if it is in another process group.

    Args:
        processes: number of processes along each dimension of the mesh.
        rank: this process's rank; with uneven shards, rank 0 holds the most.
    """
    from ckpt_ft.compat.distributed import clear_sharding_cache

    clear_sharding_cache()  # it keeps meshes, with their groups, and an equal mesh is answered from it
    # a trace in a distributed run has tables of process groups of its own
    own: dict[str, Any] = {name: {} for name, held in vars(distributed_c10d).items() if type(held) is dict}
    own = {name: new for name, new in own.items() if not name.startswith("__")}
    known = world_of(distributed_c10d)
    world, groups = type(known)(), known.group_count
    hook, before = sys.excepthook, dist.get_rank() if dist.is_initialized() else -1
    try:
        with patch.multiple(distributed_c10d, **own, **{WORLD: world}):
            world.group_count = next(_UNUSED)
            dist.init_process_group("fake", rank=rank, world_size=math.prod(processes))
            names_of_groups = world.pg_names
            yield init_device_mesh("cpu", processes, mesh_dim_names=names)
    finally:
        known.group_count = groups
        clear_sharding_cache()
        # destroy_process_group() would remove every group from C++'s list, also those of a distributed run
        for name in names_of_groups.values():
            unregister_group(name)
        set_global_rank(before)
        sys.excepthook = hook  # init_process_group has replaced it
