"""The only door to collectives: one communicator per process group.

Owns: collectives, exchange of small JSON values, counting of collectives for the heartbeat, and turning a backend's
error into `PeerLostError`. Does not own: which groups there are (grid.py), or derivatives (the autograd functions that
use these). Objects travel as JSON: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Gloo reports a dead or silent peer as a plain RuntimeError: by its source file, or by one of these.
_OF_LOST_PEERS = ("gloo", "Connection", "Timed out waiting", "Broken pipe", "timeout caused pair closure")

# torch 2.13 renamed these, and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What a compiled graph holds in their place: the same collectives without a handle, an error or a heartbeat of ours.
_traced = torch.ops._c10d_functional
_SUM = dist.ReduceOp.SUM


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
        text = str(e)
        if any(words in text for words in _OF_LOST_PEERS):
            raise PeerLostError(text) from e
        raise


class Work:
    """A collective under way; its buffers are not to be touched before `wait` has returned."""

    def __init__(self, *works: dist.Work | None) -> None:
        self._works = works

    def wait(self) -> None:
        """Raises PeerLostError. The backend's work is let go of, for it holds its buffers."""
        works, self._works = self._works, ()
        for work in works:
            if work is not None:
                with lost_peers():
                    work.wait()


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
        self._name = "" if group is None else group.group_name
        self._on_collective = on_collective

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = _SUM) -> torch.Tensor:
        """In place; the result is bitwise the same on all ranks. Raises PeerLostError."""
        if op is _SUM and self.size > 1 and torch.compiler.is_compiling():
            return _traced.wait_tensor(_traced.all_reduce(tensor, "sum", self._name))
        self.all_reduce_async(tensor, op).wait()
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        if self.size == 1:
            return Work(None)
        self._on_collective()
        with lost_peers():
            return Work(dist.all_reduce(tensor, op=op, group=self.group, async_op=True))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank, one after another: [size * n, ...]. Raises PeerLostError."""
        if self.size > 1 and torch.compiler.is_compiling():
            return _traced.wait_tensor(_traced.all_gather_into_tensor(tensor.contiguous(), self.size, self._name))
        gathered, work = self.all_gather_async(tensor)
        work.wait()
        return gathered

    def all_gather_async(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Work]:
        """(result, work); the result holds its values once the work is waited for. out: where to put it."""
        if self.size == 1 and out is None:
            return tensor, Work(None)
        tensor = tensor.contiguous()
        if out is None:
            out = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        if self.size == 1:
            return out.copy_(tensor), Work(None)
        self._on_collective()
        with lost_peers():
            return out, Work(_all_gather(out, tensor, group=self.group, async_op=True))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of [size * n, ...]; this rank's n rows of it. Raises PeerLostError."""
        if self.size > 1 and torch.compiler.is_compiling():
            return _traced.wait_tensor(_traced.reduce_scatter_tensor(tensor.contiguous(), "sum", self.size, self._name))
        scattered, work = self.reduce_scatter_async(tensor)
        work.wait()
        return scattered

    def reduce_scatter_async(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Work]:
        """As all_gather_async."""
        if self.size == 1 and out is None:
            return tensor, Work(None)
        tensor = tensor.contiguous()
        assert tensor.shape[0] % self.size == 0, f"{tensor.shape[0]} rows over {self.size} ranks"
        if out is None:
            out = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        if self.size == 1:
            return out.copy_(tensor), Work(None)
        self._on_collective()
        with lost_peers():
            return out, Work(_reduce_scatter(out, tensor, group=self.group, async_op=True))

    def all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows of `tensor` to the ranks in turn: `send[r]` of them to rank r, `receive[r]` from it; None: equally many.

        Returns the rows received, by rank. Raises PeerLostError.
        """
        received, work = self.all_to_all_async(tensor, send, receive)
        work.wait()
        return received

    def all_to_all_async(
        self, tensor: torch.Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Work]:
        """As all_to_all; the rows hold their values once the work is waited for."""
        if self.size == 1:
            return tensor, Work(None)
        tensor = tensor.contiguous()
        rows = tensor.shape[0] if receive is None else sum(receive)
        out = tensor.new_empty(rows, *tensor.shape[1:])
        counts = (None if receive is None else list(receive), None if send is None else list(send))
        self._on_collective()
        with lost_peers():
            return out, Work(dist.all_to_all_single(out, tensor, *counts, group=self.group, async_op=True))

    def shift(self, tensors: Sequence[torch.Tensor], by: int = 1) -> tuple[list[torch.Tensor], Work]:
        """Send tensors to the rank `by` places on around the ring, and receive as many from `by` places before.

        Returns (received, work), of the same shapes on all ranks. Raises PeerLostError.
        """
        if self.size == 1 or by % self.size == 0:
            return list(tensors), Work(None)
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        received = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        self._on_collective()
        with lost_peers():
            sends = [dist.P2POp(dist.isend, t.contiguous(), group=self.group, group_peer=to) for t in tensors]
            receives = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=source) for t in received]
            return received, Work(*dist.batch_isend_irecv([*sends, *receives]))

    def send_async(self, tensor: torch.Tensor, to: int) -> Work:
        """To rank `to` of the group, which receives it. Raises PeerLostError."""
        self._on_collective()
        with lost_peers():
            return Work(dist.isend(tensor.contiguous(), group=self.group, group_dst=to))

    def receive_async(self, out: torch.Tensor, source: int) -> Work:
        """Into `out` from rank `source`, which sends as much. Raises PeerLostError."""
        self._on_collective()
        with lost_peers():
            return Work(dist.irecv(out, group=self.group, group_src=source))

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
