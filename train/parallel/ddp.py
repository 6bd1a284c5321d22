"""Data parallelism with everything on every rank: gradients in one flat buffer, reduced in buckets.

Owns: where gradients live, and their cut into buckets. A bucket's all-reduce starts as soon as its last gradient of the
step is in, while the backward pass goes on. Sums, never means. Does not own: when that is (buckets.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels import Ops
from ..box import Box, Replica
from ..comm import Communicator, Work
from ..grid import Grid
from ..linear import gradient_dtype
from ..params import ParamFacts, ParamTable
from .buckets import BucketedGradients, Slot

_ALIGNMENT = 16  # elements: each gradient begins on a 64-byte boundary


@dataclass(frozen=True)
class _Slot(Slot):
    gradient: Tensor  # view of the flat buffer, in the parameter's shape


@dataclass(frozen=True)
class _Bucket:
    """Gradients that are reduced together, over `first` and then over `then`."""

    flat: Tensor  # view of the flat buffer
    first: Communicator
    then: Communicator | None


class DistributedDataParallel(BucketedGradients[_Slot]):
    """A DataParallel (data.py)."""

    def __init__(self, model: nn.Module, table: ParamTable, grid: Grid, ops: Ops, bucket_bytes: int) -> None:
        self._table, self._grid, self._ops = table, grid, ops
        # Gradients come in the reverse order of the forward pass; so do buckets, on all ranks alike.
        order = [(f, table.local(model, f.name)) for f in reversed(table.owned())]
        self.shards = {f.name: p.detach() for f, p in reversed(order)}
        slots, self._buckets, self.flat = _lay_out(order, table, grid, bucket_bytes)
        super().__init__(slots)
        self.gradients: Mapping[str, Tensor] = {slot.name: slot.gradient for slot in slots.values()}
        self._counted = [g for name, g in self.gradients.items() if self.replica(name).index == 0]
        self._works: list[Work] = []

    def box(self, name: str) -> Box:
        """See DataParallel."""
        return self._table.box(name, self._grid)

    def replica(self, name: str) -> Replica:
        """See DataParallel."""
        return self._table.replica(name, self._grid)

    def begin_step(self, passes: int, rounds: int = 1) -> None:
        """See DataParallel."""
        super().begin_step(passes, rounds)
        self._works.clear()

    def finish(self) -> None:
        """See DataParallel. Raises PeerLostError."""
        self.check_complete()
        for work in self._works:
            work.wait()
        self._works.clear()
        for work in [b.then.all_reduce_async(b.flat) for b in self._buckets if b.then is not None]:
            work.wait()

    def squared_norm(self) -> Tensor:
        """See DataParallel."""
        if len(self._counted) == len(self._slots):
            return self._ops.l2norm([self.flat]).double().square()
        if not self._counted:
            return torch.zeros((), dtype=torch.float64, device=self.flat.device)
        return self._ops.l2norm(self._counted).double().square()

    def publish(self) -> None:
        """See DataParallel: every rank updates everything itself."""

    def close(self) -> None:
        """See DataParallel; reductions under way are left to the process group's end."""
        super().close()
        self._works.clear()

    def _buffer(self, slot: _Slot) -> Tensor:
        return slot.gradient

    def _send(self, bucket: int) -> None:
        b = self._buckets[bucket]
        self._works.append(b.first.all_reduce_async(b.flat))


@dataclass
class _Plan:
    """A bucket in the making: of gradients with the same reductions."""

    members: list[tuple[ParamFacts, Tensor]]
    elements: int = 0
    last: int = 0  # when its last gradient comes


def _plans(order: list[tuple[ParamFacts, Tensor]], grid: Grid, bucket_elements: float) -> list[_Plan]:
    """Buckets by what they are reduced over, ordered by when their last gradient comes."""
    open_plans: dict[tuple[Communicator, Communicator | None], _Plan] = {}
    plans: list[_Plan] = []
    for position, (facts, parameter) in enumerate(order):
        key = _reductions(facts, grid)
        plan = open_plans.get(key)
        if plan is None or plan.elements >= bucket_elements:
            plan = open_plans[key] = _Plan([])
            plans.append(plan)
        plan.members.append((facts, parameter))
        plan.elements += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        plan.last = position
    return sorted(plans, key=lambda plan: plan.last)


def _reductions(facts: ParamFacts, grid: Grid) -> tuple[Communicator, Communicator | None]:
    then = None if facts.partial_over is None else grid.comms[facts.partial_over]
    return grid.comms[facts.reduce_over], None if then is None or then.size == 1 else then


def _lay_out(
    order: list[tuple[ParamFacts, Tensor]], table: ParamTable, grid: Grid, bucket_bytes: int
) -> tuple[dict[Tensor, _Slot], list[_Bucket], Tensor]:
    """Slots by parameter, buckets, and the flat buffer [elements], which starts as zeros (gaps stay zero)."""
    dtype = gradient_dtype(order[0][1].dtype)
    plans = _plans(order, grid, bucket_bytes / dtype.itemsize)
    flat = torch.zeros(sum(plan.elements for plan in plans), dtype=dtype, device=order[0][1].device)
    slots: dict[Tensor, _Slot] = {}
    buckets: list[_Bucket] = []
    at = 0
    for number, plan in enumerate(plans):
        begin = at
        for facts, parameter in plan.members:
            gradient = flat[at : at + parameter.numel()].view(parameter.shape)
            slots[parameter] = _Slot(facts.name, number, table.uses(facts.name), gradient)
            at += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        buckets.append(_Bucket(flat[begin:at], *_reductions(plan.members[0][0], grid)))
    return slots, buckets, flat
