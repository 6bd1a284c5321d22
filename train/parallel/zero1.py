"""ZeRO-1: every rank computes with all weights, and updates its share of them (Rajbhandari et al. 2020).

Owns: flat buffers of parameters and of gradients, cut into buckets and these into one shard per rank; a reduce-scatter
per bucket while the backward pass goes on, an all-gather per bucket while the next forward pass begins. Sums, never
means. Does not own: optimizer state (optim/), which has the shards' shapes.

A bucket holds rows of one width, so that the border between two ranks' shards falls between two rows: a shard is a box
of each parameter it has a part of. Gradients are formed in the very memory that is reduced, and parameters lie in the
memory that is gathered: nothing is copied. Rows are added only at a bucket's end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...kernels import Ops
from ..box import Box, Replica
from ..comm import Communicator, Work
from ..grid import Grid
from ..linear import gradient_dtype
from ..params import ParamFacts, ParamTable
from .buckets import BucketedGradients, Slot
from .units import units

_ALIGNMENT = 16  # elements: parameters and shards begin on such a boundary
_ROWS_PER_RANK = 16  # at least, of a bucket that is closed: what is added at its end stays below a sixteenth


@dataclass(frozen=True)
class _Slot(Slot):
    gradient: Tensor  # in the parameter's shape


@dataclass(frozen=True)
class _Bucket:
    """Parameters that are reduced together, over `first`, whose ranks each get a shard, and then over `then`."""

    parameters: Tensor  # flat, one shard after the other
    gradients: Tensor  # likewise
    reduced: Tensor  # this rank's shard of the sum
    first: Communicator
    then: Communicator | None
    is_counted: bool  # in the gradient norm, on this rank

    @property
    def own(self) -> Tensor:
        """This rank's shard of the parameters."""
        size = self.reduced.numel()
        return self.parameters[self.first.rank * size : (self.first.rank + 1) * size]


class Zero1(BucketedGradients[_Slot]):
    """A DataParallel (data.py). Parameters of `model` are moved into the buffers."""

    def __init__(self, model: nn.Module, table: ParamTable, grid: Grid, ops: Ops, bucket_bytes: int) -> None:
        self._table, self._grid, self._ops = table, grid, ops
        self.shards: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._boxes: dict[str, Box] = {}
        self._buckets: list[_Bucket] = []
        slots: dict[Tensor, _Slot] = {}
        # Gradients come in the reverse order of the forward pass; so do buckets, on all ranks alike.
        order = [(f, table.local(model, f.name)) for f in reversed(table.owned())]
        for number, plan in enumerate(_plans(order, grid, bucket_bytes)):
            slots |= self._lay_out(number, plan)
        super().__init__(slots)
        self._works: list[Work] = []
        self._arrivals = _Arrivals(_first_uses(model, table, {slot.name: slot.bucket for slot in slots.values()}))

    def box(self, name: str) -> Box:
        """See DataParallel."""
        return self._boxes[name]

    def replica(self, name: str) -> Replica:
        """See DataParallel."""
        return self._table.replica(name, self._grid, without=self._table[name].reduce_over)

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
        for work in [b.then.all_reduce_async(b.reduced) for b in self._buckets if b.then is not None]:
            work.wait()

    def squared_norm(self) -> Tensor:
        """See DataParallel."""
        counted = [b.reduced for b in self._buckets if b.is_counted]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self._grid.device)
        return self._ops.l2norm(counted).double().square()

    def publish(self) -> None:
        """See DataParallel. The exchange goes on until a module needs what it brings. Raises PeerLostError."""
        self._arrivals.wait_for_all()
        # In the order of the forward pass.
        works = {
            number: bucket.first.all_gather_async(bucket.own, out=bucket.parameters)[1]
            for number, bucket in reversed(list(enumerate(self._buckets)))
            if bucket.first.size > 1
        }
        self._arrivals.expect(works)

    def close(self) -> None:
        """See DataParallel; exchanges under way are left to the process group's end."""
        super().close()
        self._works.clear()
        self._arrivals.forget()

    def _buffer(self, slot: _Slot) -> Tensor:
        return slot.gradient

    def _send(self, bucket: int) -> None:
        b = self._buckets[bucket]
        self._works.append(b.first.reduce_scatter_async(b.gradients, out=b.reduced)[1])

    def _lay_out(self, number: int, plan: _Plan) -> dict[Tensor, _Slot]:
        """Buffers of one bucket, parameters moved into them. What is between parameters is zero and stays so."""
        facts, parameter = plan.members[0].facts, plan.members[0].parameter
        comm, then = self._grid.comms[facts.reduce_over], _then(facts, self._grid)
        chunk = plan.rows_per_rank(comm.size) * plan.width  # elements
        dtype = gradient_dtype(parameter.dtype)
        parameters = parameter.new_zeros(comm.size * chunk, requires_grad=False)
        gradients, reduced = (parameters.new_zeros(n, dtype=dtype) for n in (parameters.numel(), chunk))
        is_counted = self.replica(facts.name).index == 0
        self._buckets.append(_Bucket(parameters, gradients, reduced, comm, then, is_counted))
        slots = {}
        for member in plan.members:
            name, p, begin = member.facts.name, member.parameter, member.row * plan.width
            place = parameters[begin : begin + p.numel()].view(p.shape)
            place.copy_(p.detach())
            p.data = place
            gradient = gradients[begin : begin + p.numel()].view(p.shape)
            slots[p] = _Slot(name, number, self._table.uses(name), gradient)
            self._cut(name, member, plan, comm.rank * chunk)
        return slots

    def _cut(self, name: str, member: _Member, plan: _Plan, begin: int) -> None:
        """Note this rank's rows of a parameter, if it has any; its shard of the bucket begins at element `begin`."""
        bucket, width = self._buckets[-1], plan.width
        offset = begin // width - member.row  # of the shard's first row, from the parameter's first row
        first = min(max(0, offset), member.rows)
        last = min(max(0, offset + bucket.reduced.numel() // width), member.rows)
        if first == last:
            return
        local = self._table.box(name, self._grid)
        box = _rows_of(local, member.rows, first, last)
        where = slice((first - offset) * width, (last - offset) * width)
        self._boxes[name] = box
        self.shards[name] = bucket.own[where].view(box.shape)
        self.gradients[name] = bucket.reduced[where].view(box.shape)


class _Arrivals:
    """Exchanges under way, and hooks on the modules that wait for them; none while nothing is under way.

    `first_uses`: (module, whether after it, buckets).
    """

    def __init__(self, first_uses: list[tuple[nn.Module, bool, list[int]]]) -> None:
        self._first_uses = first_uses
        self._works: dict[int, Work] = {}
        self._handles: list[RemovableHandle] = []

    def expect(self, works: dict[int, Work]) -> None:
        self._works = works
        if not works:
            return
        for module, is_after, buckets in self._first_uses:
            handles: list[RemovableHandle] = []
            hook = partial(self._meet, buckets, handles)
            handles.append(module.register_forward_hook(hook) if is_after else module.register_forward_pre_hook(hook))
            self._handles += handles

    def wait_for_all(self) -> None:
        """Raises PeerLostError."""
        for work in self._works.values():
            work.wait()
        self.forget()

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._works = {}

    def _meet(self, buckets: list[int], handles: list[RemovableHandle], *_: Any) -> None:
        for handle in handles:
            handle.remove()
        for bucket in buckets:
            work = self._works.pop(bucket, None)
            if work is not None:
                work.wait()


def _first_uses(
    model: nn.Module, table: ParamTable, buckets: dict[str, int]
) -> list[tuple[nn.Module, bool, list[int]]]:
    return [(u.module, u.is_after, sorted({buckets[name] for name in u.names})) for u in units(model, table)]


# How parameters are put into buckets.


@dataclass(frozen=True)
class _Member:
    facts: ParamFacts
    parameter: Tensor
    row: int  # where it begins in its bucket
    rows: int


@dataclass
class _Plan:
    """A bucket in the making: rows of `width` elements."""

    width: int
    nominal_elements: int = 0
    rows: int = 0
    last: int = 0  # when its last gradient comes
    members: list[_Member] = field(default_factory=list)

    @property
    def _align(self) -> int:
        """Rows after which alignment is met again."""
        return _ALIGNMENT // gcd(_ALIGNMENT, self.width)

    def add(self, facts: ParamFacts, parameter: Tensor, position: int, nominal_elements: int) -> None:
        row, rows = _round_up(self.rows, self._align), parameter.numel() // self.width
        self.members.append(_Member(facts, parameter, row, rows))
        self.rows, self.last = row + rows, position
        self.nominal_elements += nominal_elements

    def rows_per_rank(self, size: int) -> int:
        return _round_up(-(-self.rows // size), self._align)


def _plans(order: list[tuple[ParamFacts, Tensor]], grid: Grid, bucket_bytes: int) -> list[_Plan]:
    """Buckets by when their last gradient comes.

    Decided by what all ranks of a stage agree on, whatever their own parts of parameters are: else those that hold the
    same piece of one would cut it differently, or reduce in different orders.
    """
    itemsize = gradient_dtype(order[0][1].dtype).itemsize
    open_plans: dict[tuple[Any, ...], _Plan] = {}
    plans: list[_Plan] = []
    for position, (facts, parameter) in enumerate(order):
        size = grid.comms[facts.reduce_over].size
        key, width, nominal = _key(facts, parameter, size), _width(facts, parameter, size), _nominal(facts, grid)
        plan = open_plans.get(key)
        if plan is None:
            plan = open_plans[key] = _Plan(width)
            plans.append(plan)
        plan.add(facts, parameter, position, nominal)
        is_large = plan.nominal_elements * itemsize >= bucket_bytes
        if is_large and plan.nominal_elements >= _ROWS_PER_RANK * size * prod(facts.shape[1:]):
            del open_plans[key]
    return sorted(plans, key=lambda plan: plan.last)


def _key(facts: ParamFacts, parameter: Tensor, size: int) -> tuple[Any, ...]:
    """Parameters of one key may share a bucket: what is reduced alike, held by the same ranks, and of one width."""
    alone = facts.name if parameter.dim() > 2 or facts.partial_over == "tied" else None
    cut = (facts.unit, facts.shard_axis) if facts.shard_dim not in (None, 0) else None
    return facts.reduce_over, facts.replica_axes, facts.partial_over, facts.shape[1:], cut, alone


def _width(facts: ParamFacts, parameter: Tensor, size: int) -> int:
    """Elements of a row. Stacked matrices (experts) are cut between the matrices, or all inside if ranks are more."""
    if parameter.dim() > 2 and size % parameter.shape[0] == 0:
        ranks_each = size // parameter.shape[0]
        rows = parameter.shape[0] * parameter.shape[1]
        inner = prod(parameter.shape[2:])
        if parameter.shape[1] % ranks_each == 0 and rows // size * inner % _ALIGNMENT == 0:
            return inner
    return prod(parameter.shape[1:])


def _rows_of(local: Box, rows: int, first: int, last: int) -> Box:
    """The box of rows `first` to `last` of a parameter that lies at `local` and counts as `rows` rows."""
    if rows == local.shape[0]:
        return local.rows(first, last - first)
    # Rows of stacked matrices, all of one of them.
    each = local.shape[1]
    start = (local.start[0] + first // each, local.start[1] + first % each, *local.start[2:])
    return Box(start, (1, last - first, *local.shape[2:]))


def _nominal(facts: ParamFacts, grid: Grid) -> int:
    """Elements on each rank, if the cut were even."""
    return facts.numel if facts.shard_axis is None else -(-facts.numel // grid.comms[facts.shard_axis].size)


def _then(facts: ParamFacts, grid: Grid) -> Communicator | None:
    comm = None if facts.partial_over is None else grid.comms[facts.partial_over]
    return None if comm is None or comm.size == 1 else comm


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
