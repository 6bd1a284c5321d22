"""The only door to collectives: one communicator per process group.

Owns: reductions and exchange of small JSON values, counting of collectives for the heartbeat, and turning a backend's
error into `PeerLostError`. Does not own: which groups there are (grid.py). Objects travel as JSON: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class PeerLostError(Exception):
    """A collective failed because another rank is gone (or the fabric to it). The state of the step is void."""


@contextmanager
def lost_peers() -> Iterator[None]:
    """The one place where backend errors become PeerLostError."""
    try:
        yield
    except (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError) as e:
        raise PeerLostError(str(e)) from e
    except RuntimeError as e:
        # gloo reports a dead or silent peer as a plain RuntimeError that names its source file.
        text = str(e)
        if "gloo" in text or "Connection" in text or "Timed out waiting" in text or "Broken pipe" in text:
            raise PeerLostError(text) from e
        raise


class Work:
    """A reduction under way."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        """Raises PeerLostError."""
        if self._work is not None:
            with lost_peers():
                self._work.wait()


class Communicator:
    """Collectives over one process group. A group of one does nothing, at no cost.

    `on_collective` is called at the begin of each collective (heartbeat).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        device: torch.device,
        on_collective: Callable[[], None] = lambda: None,
    ) -> None:
        self.group, self.rank, self.size, self.device = group, rank, size, device
        self._on_collective = on_collective

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """In place; the result is bitwise the same on all ranks. Raises PeerLostError."""
        self.all_reduce_async(tensor, op).wait()
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        if self.size == 1:
            return Work(None)
        self._on_collective()
        with lost_peers():
            return Work(dist.all_reduce(tensor, op=op, group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """In place, from the group's rank `source`. Raises PeerLostError."""
        if self.size > 1:
            self._on_collective()
            with lost_peers():
                dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.device))

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Small things only. Raises PeerLostError."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = data.numel()
        self.all_reduce(lengths)
        longest = int(lengths.max())
        # One summed buffer with a row per rank: the same collective on every backend, in a fixed order.
        rows = torch.zeros(self.size, longest, dtype=torch.uint8, device=self.device)
        rows[self.rank, : data.numel()] = data
        self.all_reduce(rows)
        return [json.loads(bytes(rows[r, : int(n)].cpu().numpy())) for r, n in enumerate(lengths.tolist())]
