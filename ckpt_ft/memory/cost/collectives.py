"""Seconds of collectives, over the links between the GPUs of a machine and between machines.

In a ring, each rank sends the bytes of a collective around once (Patarasuk and Yuan 2009). NCCL runs as many rings in
parallel as there are links or network cards, so the rate is the sum of one GPU's links, and across machines the sum of
one machine's cards.

Sources: NVLink, one direction, from NVIDIA's datasheets (V100 150, A100 300, H100 and H200 450, B200 900 GB/s). NCCL's
protocol reaches about 80 % of the line rate (370 of 450 GB/s on H100: github.com/NVIDIA/nccl-tests/issues/212; 235 of
300 on A100: the model below). Other cards communicate over their slot and the host; half of the slot's rate is an
assumption. Network cards are those of NVIDIA's DGX of the generation (eight of 800 Gb/s with B300, of 400 Gb/s with
H100 and B200, of 200 Gb/s with A100), otherwise one of 100 Gb/s per machine, at 90 % (192 of 200 GB/s from DGX A100s:
NVIDIA/nccl#812; 340 to 380 of 400 with H100: NVIDIA/nccl#1218, nccl-tests#309); `Launch.link` sets another rate.

The latency is NCCL's own model, by which it chooses its protocol: a time to start, a time for each step from one rank
to the next, of which a ring of N ranks has N - 1 (an all-reduce twice as many, or those of a tree), and a share of the
bandwidth (github.com/NVIDIA/nccl, src/graph/tuning.cc, 2.28).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ckpt_ft.memory.gpus import GPU
from ckpt_ft.spec.launch import Launch
from ckpt_ft.units import MIB

# compute capability -> bytes/s, one direction
_NVLINK = {(7, 0): 150e9, (8, 0): 300e9, (9, 0): 450e9, (10, 0): 900e9, (10, 3): 900e9}
_NETWORK_CARDS = {(8, 0): 25e9, (9, 0): 50e9, (10, 0): 50e9, (10, 3): 100e9}  # of a DGX, for each GPU
_ONE_NETWORK_CARD = 12.5e9
_REACHED, _REACHED_BETWEEN = 0.8, 0.9  # within a machine, between machines
_CHANNELS = {True: 24, False: 4}  # of NCCL, over NVLink (as NCCL logs on eight H100) or a slot: an assumption
_TO_EACH_RANK = {True: 32, False: 2}  # channels of an all-to-all between two ranks
_CONNECTION = 12 * MIB  # NCCL's buffers of a connection, on both sides


class _Protocol(NamedTuple):
    """A protocol of NCCL: microseconds to start, and of a step over NVLink, a slot and between machines."""

    start: float
    ring: tuple[float, float, float]
    tree: tuple[float, float, float]
    share: float  # of the bandwidth within a machine
    between: float  # of the bandwidth between machines
    tree_share: float


_LL = _Protocol(6.6, (0.6, 1.0, 2.7), (0.6, 1.0, 5.0), 0.37, 0.12, 0.26)
_LL128 = _Protocol(14.0, (1.9, 2.5, 4.0), (1.25, 1.9, 8.5), 0.92, 0.92, 0.85)
_SIMPLE = _Protocol(8.4, (3.4, 5.7, 14.0), (4.0, 4.0, 14.0), 1.0, 1.0, 0.92)


class Ring(NamedTuple):
    """The ranks of a collective: how many there are, on how many machines, and the other groups like it on each."""

    ranks: int
    machines: int
    groups: int = 1

    @classmethod
    def of(cls, launch: Launch, group: tuple[int, int]) -> Ring:
        """The ring of `group` (number of ranks, distance between them); of all ranks if it is zeros."""
        here = launch.processes // launch.machines
        ranks, distance = group if any(group) else (launch.processes, 1)
        together = max(min(ranks, here // distance), 1)  # ranks of the group on one machine
        return cls(ranks, max(ranks // together, 1), max(here // together, 1))


def bus_bandwidth(launch: Launch, gpu: GPU, group: tuple[int, int] = (0, 0)) -> float:
    """Bytes per second that each rank of `group` sends in a large collective; other groups send at the same time."""
    if launch.link:
        return launch.link
    ring = Ring.of(launch, group)
    inside = _REACHED * _NVLINK[gpu.arch] if gpu.arch in _NVLINK else gpu.host_bandwidth / 2
    inside = (gpu.calibration.link if gpu.calibration else 0.0) or inside
    if ring.machines == 1:
        return inside
    cards = launch.processes // launch.machines
    network = _NETWORK_CARDS[gpu.arch] * cards if gpu.arch in _NETWORK_CARDS else _ONE_NETWORK_CARD
    return min(inside, _REACHED_BETWEEN * network / ring.groups)


def collective_seconds(wire: int, launch: Launch, gpu: GPU, name: str = "", group: tuple[int, int] = (0, 0)) -> float:
    """Seconds of a collective (op `name`) in which each rank sends `wire` bytes, with the fastest protocol.

    group: number of ranks and the distance between them; zeros for all ranks of the launch.
    """
    nvlink = gpu.arch in _NVLINK
    sent = wire / bus_bandwidth(launch, gpu, group)
    ring = Ring.of(launch, group)
    several, here = ring.machines > 1, ring.ranks // ring.machines
    all_reduce = "allreduce" in name or "all_reduce" in name
    found = []
    for protocol in (_LL, _LL128, _SIMPLE) if nvlink else (_LL, _SIMPLE):  # LL128 is for NVLink
        start, (over, slot, between), tree, share, share_between, tree_share = protocol
        inside = max(over if nvlink else slot, (3.0 if protocol is _SIMPLE else 1.0) if several else 0.0)
        steps = (ring.machines - 1) * between + (ring.ranks - ring.machines) * inside
        found.append((start + (1 + all_reduce) * steps) * 1e-6 + sent / (share_between if several else share))
        if all_reduce:
            climb = (here - 1) * tree[0 if nvlink else 1] + int(math.log2(ring.machines)) * tree[2]
            found.append((start + 2 * climb) * 1e-6 + sent / tree_share)
    return min(found)


def memory_left(launch: Launch, gpu: GPU) -> float:
    """The share of the memory bandwidth that a large collective leaves to the kernels beside it.

    Arriving bytes are written to a buffer of NCCL and read back from the L2 cache. Then the result is written
    (all-gather) or the summand is read (reduce-scatter): two passes over memory for each byte that is sent
    (recvCopySend and recvReduceSend of the ring in the Simple protocol, arXiv:2507.04786).
    """
    return 1 - min(2 * bus_bandwidth(launch, gpu) / (gpu.bandwidth * gpu.bandwidth_efficiency), 0.5)


def network_share(gpu: GPU) -> float:
    """The relative slowdown of a kernel while a collective runs: each of its channels occupies an SM."""
    return gpu.sms / (gpu.sms - min(_CHANNELS[gpu.arch in _NVLINK], gpu.sms // 2)) - 1


def nccl_bytes(launch: Launch, gpu: GPU) -> int:
    """Bytes of NCCL's buffers on each GPU, which are allocated outside the caching allocator.

    A connection of two GPUs has 10 MiB on the receiver, the buffers of three protocols (4 + 4.7 + 0.5 MiB), and 2 MiB
    on the sender, in steps of 2 MiB (NVIDIA/nccl, 2.28, src/transport/p2p.cc: p2pRecvSetup, p2pSendSetup). Every
    communicator connects one ring for each channel. DeepSpeed has a communicator beside torch's (utils/groups.py:
    _clone_world_group), and so has each dimension of a mesh. Ulysses' all-to-all also connects each rank with all
    others of its machine, over channels of its own: 32 over NVLink, 2 over a slot, fewer with many ranks
    (src/graph/paths.cc: ncclTopoComputeP2pChannels). On eight H100 these are 2.6 GiB; NVIDIA/nccl#1685 reports buffers
    of these sizes and 3.3 GB.
    """
    if launch.processes == 1:
        return 0
    fast, mesh = gpu.arch in _NVLINK, launch.mesh
    communicators = 1 + (launch.stage > 0) + (launch.sp > 1 if launch.stage else len(mesh) * (len(mesh) > 1))
    here = min(launch.sp, launch.processes // launch.machines)
    between = _TO_EACH_RANK[fast]
    while launch.sp > here and between > 1 and between * math.ceil(launch.sp / 8) > _TO_EACH_RANK[fast]:
        between //= 2
    return (communicators * _CHANNELS[fast] + (here - 1) * between) * _CONNECTION
