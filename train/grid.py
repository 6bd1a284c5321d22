"""The process grid: which rank is where on which axis, and the communicators of the axes.

Owns: forming and leaving the process group; groups are created here only, in fixed order, on all ranks. A grid belongs
to one generation; the next pass of the worker forms a new one in the same process. Which ranks make up a group is
arithmetic: conf/layout.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..conf.layout import Layout
from .comm import Communicator, lost_peers

# Every group of a grid, in the order in which all ranks create them.
AXES = (
    "tensor",
    "kv",
    "context",
    "data",
    "dense",
    "shard",
    "replicate",
    "stage",
    "expert",
    "expert_data",
    "pipeline",
    "tied",
    "world",
)


@dataclass(frozen=True)
class Membership:
    """What a worker is told of its place: by the agent's `form` message, or by the caller in tests."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    generation: int
    store_host: str
    store_port: int


@dataclass(frozen=True)
class Grid:
    """Passed to whatever needs to know where it is; never stored globally."""

    rank: int
    layout: Layout
    device: torch.device
    comms: dict[str, Communicator]  # by axis, see AXES and Layout.group; over the device's backend
    control: Communicator  # metadata, over gloo in host memory (device memory must not grow at a save)

    @property
    def world_size(self) -> int:
        return self.layout.world

    @property
    def data(self) -> Communicator:
        """Ranks that read different samples."""
        return self.comms["data"]

    @property
    def dense(self) -> Communicator:
        """Ranks over which dense gradients are summed: data and context."""
        return self.comms["dense"]

    @property
    def tensor(self) -> Communicator:
        return self.comms["tensor"]

    @property
    def context(self) -> Communicator:
        return self.comms["context"]

    @property
    def pipeline(self) -> Communicator:
        return self.comms["pipeline"]

    @property
    def expert(self) -> Communicator:
        return self.comms["expert"]

    @property
    def world(self) -> Communicator:
        return self.comms["world"]

    @property
    def sizes(self) -> dict[str, int]:
        """What a manifest says of the layout."""
        axes = ("world", "pipeline", "data", "context", "tensor", "expert")
        return {axis: self.layout.sizes[axis] for axis in axes}

    def close(self) -> None:
        """Leave the groups; safe after a lost peer. Without it gloo ends the process with std::terminate."""
        if dist.is_initialized():
            dist.destroy_process_group()


def single(device: torch.device | None = None) -> Grid:
    """A grid of one, without any process group."""
    device = device or torch.device("cpu")
    alone = Communicator(None, 0, 1, device)
    return Grid(0, Layout(), device, dict.fromkeys(AXES, alone), Communicator(None, 0, 1, torch.device("cpu")))


def form(
    m: Membership,
    layout: Layout | None = None,
    backend: str = "auto",
    timeout: float = 600.0,
    on_collective: Callable[[], None] = lambda: None,
) -> Grid:
    """Form the grid of this generation; layout None: all ranks on the data axis. The store lives in a process of its
    own, so that no worker's death takes it.

    Keys are prefixed with attempt and generation: a later pass never reads the addresses of a dead one.

    Raises:
        PeerLostError: the others did not come within `timeout` seconds.
    """
    layout = layout or Layout(data=m.world_size, data_shard=m.world_size)
    assert layout.world == m.world_size, f"{layout} on {m.world_size} ranks"
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", m.local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if m.world_size == 1:
        return single(device)
    limit = timedelta(seconds=timeout)
    with lost_peers():
        store = dist.TCPStore(m.store_host, m.store_port, is_master=False, timeout=limit)
        prefixed = dist.PrefixStore(f"a{m.attempt}/g{m.generation}", store)
        dist.init_process_group(backend, store=prefixed, rank=m.rank, world_size=m.world_size, timeout=limit)
        control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)
        comms = _communicators(layout, m.rank, device, limit, on_collective)
    on_host = Communicator(control, m.rank, m.world_size, torch.device("cpu"), on_collective)
    return Grid(m.rank, layout, device, comms, on_host)


def _communicators(
    layout: Layout, rank: int, device: torch.device, timeout: timedelta, on_collective: Callable[[], None]
) -> dict[str, Communicator]:
    """One group per axis. Axes with the same ranks share one, on every rank alike: what is in flight on a group is
    then ordered among all its users."""
    comms: dict[str, Communicator] = {}
    for axis in AXES:
        ranks = layout.group(axis, rank)
        twin = next((a for a in comms if _coincide(layout, a, axis)), None)
        if twin is not None:
            comms[axis] = comms[twin]
        elif len(ranks) == 1:
            comms[axis] = Communicator(None, 0, 1, device)
        elif len(ranks) == layout.world:
            comms[axis] = Communicator(dist.group.WORLD, rank, layout.world, device, on_collective)
        else:
            # Only the members take part, so that the time does not grow with the number of groups.
            group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=axis)
            comms[axis] = Communicator(group, ranks.index(rank), len(ranks), device, on_collective)
    return comms


def _coincide(layout: Layout, a: str, b: str) -> bool:
    """Whether two axes have the same groups. Each is made of one pattern, repeated over the ranks: that of rank 0 says
    it for all, and is the same on every rank."""
    return layout.group(a, 0) == layout.group(b, 0)
