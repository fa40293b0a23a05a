"""A process group without the other processes, in which one rank's real code runs (FakeProcessGroup)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# What distributed_c10d knows of the groups there are: a trace inside of a run on several processes gets its own.
_REGISTRIES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")
_UNUSED = 1_000_000  # names of groups are counted, and C++ keeps a list of its own


@contextmanager
def rank_zero_of(processes: int) -> Iterator[DeviceMesh]:
    """Rank 0 of `processes`, as a mesh of one dimension, whatever group this process is in otherwise.

    Of unevenly sharded tensors rank 0 has the most.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    registries = {name: type(getattr(distributed_c10d, name))() for name in _REGISTRIES}
    with patch.multiple(distributed_c10d, _world=distributed_c10d._World(), _group_count=_UNUSED, **registries):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
        try:
            yield init_device_mesh("cpu", (processes,), mesh_dim_names=("dp_shard",))
        finally:
            dist.destroy_process_group()
