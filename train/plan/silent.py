"""One rank of a large world, alone: communicators that move nothing, return tensors of the right shapes, and count.

Owns: the stand-ins and what they have counted. Shapes are checked as the real collectives would check them, so errors
of layout show without another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...conf.layout import Layout
from ..comm import Communicator, Work
from ..grid import AXES, Grid


@dataclass
class Traffic:
    """What one rank sends along one axis. Bytes as ring algorithms move them: (n - 1) / n of the whole per gather or
    scatter, twice that per all-reduce."""

    calls: int = 0
    sent_bytes: float = 0.0

    def add(self, sent_bytes: float) -> None:
        self.calls += 1
        self.sent_bytes += sent_bytes


@dataclass
class Ledger:
    """Traffic by axis. `multiplier`: how often what is being run now happens in a step."""

    by_axis: dict[str, Traffic] = field(default_factory=dict)
    multiplier: int = 1

    def note(self, axis: str, sent_bytes: float) -> None:
        traffic = self.by_axis.setdefault(axis, Traffic())
        for _ in range(self.multiplier):
            traffic.add(sent_bytes)

    @contextmanager
    def times(self, count: int) -> Iterator[None]:
        """Everything inside the block counts so often."""
        before, self.multiplier = self.multiplier, self.multiplier * count
        try:
            yield
        finally:
            self.multiplier = before


class SilentCommunicator(Communicator):
    """A rank of a group whose others do not exist. Results have the right shape and type; their values mean nothing."""

    def __init__(self, axis: str, rank: int, size: int, device: torch.device, ledger: Ledger) -> None:
        super().__init__(None, rank, size, device)
        self._axis, self._ledger = axis, ledger

    def all_reduce_async(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        if self.size > 1:
            self._ledger.note(self._axis, 2 * tensor.nbytes * (self.size - 1) / self.size)
        return Work(None)

    def all_gather_async(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Work]:
        if self.size == 1:
            return super().all_gather_async(tensor, out)
        shape = (self.size * tensor.shape[0], *tensor.shape[1:])
        if out is None:
            out = tensor.new_empty(shape)
        assert out.numel() == self.size * tensor.numel(), f"{self._axis}: {tuple(tensor.shape)} into {tuple(out.shape)}"
        self._ledger.note(self._axis, tensor.nbytes * (self.size - 1))
        return out, Work(None)

    def reduce_scatter_async(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Work]:
        if self.size == 1:
            return super().reduce_scatter_async(tensor, out)
        assert tensor.shape[0] % self.size == 0, f"{self._axis}: {tensor.shape[0]} rows over {self.size} ranks"
        if out is None:
            out = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        self._ledger.note(self._axis, tensor.nbytes * (self.size - 1) / self.size)
        return out, Work(None)

    def all_to_all_async(
        self, tensor: torch.Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Work]:
        if self.size == 1:
            return tensor, Work(None)
        assert send is None or sum(send) == tensor.shape[0], f"{self._axis}: {send} of {tuple(tensor.shape)}"
        rows = tensor.shape[0] if receive is None else sum(receive)
        self._ledger.note(self._axis, tensor.nbytes * (self.size - 1) / self.size)
        return tensor.new_empty(rows, *tensor.shape[1:]), Work(None)

    def shift(self, tensors: Sequence[torch.Tensor], by: int = 1) -> tuple[list[torch.Tensor], Work]:
        if self.size == 1 or by % self.size == 0:
            return list(tensors), Work(None)
        self._ledger.note(self._axis, sum(t.nbytes for t in tensors))
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors], Work(None)

    def send_async(self, tensor: torch.Tensor, to: int) -> Work:
        assert 0 <= to < self.size
        self._ledger.note(self._axis, tensor.nbytes)
        return Work(None)

    def receive_async(self, out: torch.Tensor, source: int) -> Work:
        assert 0 <= source < self.size
        return Work(None)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if self.size > 1:
            self._ledger.note(self._axis, tensor.nbytes)
        return tensor

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value] * self.size


def silent_grid(layout: Layout, rank: int, device: torch.device, ledger: Ledger | None = None) -> Grid:
    """The grid as `rank` of `layout` sees it, without any process group."""
    ledger = ledger or Ledger()
    make: Callable[[str], Communicator] = lambda axis: SilentCommunicator(  # noqa: E731
        axis, layout.index(axis, rank), len(layout.group(axis, rank)), device, ledger
    )
    return Grid(rank, layout, device, {axis: make(axis) for axis in AXES}, make("world"))
