"""The process grid: which rank is where on which axis, and the communicators of the axes.

Owns: forming and leaving the process group; groups are created here only, in fixed order, on all ranks. A grid belongs
to one generation; the next pass of the worker forms a new one in the same process. Today the only axis is `data`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .comm import Communicator, lost_peers


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
    world_size: int
    device: torch.device
    data: Communicator  # gradients, over the device's backend
    control: Communicator  # metadata, over gloo in host memory (device memory must not grow at a save)

    @property
    def sizes(self) -> dict[str, int]:
        return {"world": self.world_size, "data": self.data.size}

    def close(self) -> None:
        """Leave the groups; safe after a lost peer. Without it gloo ends the process with std::terminate."""
        if dist.is_initialized():
            dist.destroy_process_group()


def single(device: torch.device | None = None) -> Grid:
    """A grid of one, without any process group."""
    device = device or torch.device("cpu")
    return Grid(0, 1, device, Communicator(None, 0, 1, device), Communicator(None, 0, 1, torch.device("cpu")))


def form(
    m: Membership, backend: str = "auto", timeout: float = 600.0, on_collective: Callable[[], None] = lambda: None
) -> Grid:
    """Form the grid of this generation. The store lives in a process of its own, so that no worker's death takes it.

    Keys are prefixed with attempt and generation: a later pass never reads the addresses of a dead one.

    Raises:
        PeerLostError: the others did not come within `timeout` seconds.
    """
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
    data = Communicator(dist.group.WORLD, m.rank, m.world_size, device, on_collective)
    return Grid(
        m.rank,
        m.world_size,
        device,
        data,
        Communicator(control, m.rank, m.world_size, torch.device("cpu"), on_collective),
    )
