"""FSDP and HSDP: weights, gradients and optimizer state in shards (Zhao et al. 2023); weights by torch's `fully_shard`.

Owns: which modules are sharded together, where a shard lies, and gradients. FSDP2 brings the weights of a block when
its forward or backward pass begins, and frees them after it; it sees no gradient, so it reduces none. Does not own:
optimizer state (optim/), which has the shards' shapes.

Why gradients are not FSDP2's (torch 2.13; what tests/train/parallel/test_proof.py shows does work):
- It reduces in a hook that autograd runs when a block's dX is done. Under a schedule with a split backward pass dW
  comes later, so there the schedule must reduce by its REDUCE_GRAD action (stage.perform_reduce_grad), after all of
  them: nothing overlaps. Here a bucket goes out as soon as its last contribution is in, whoever runs the backward pass.
- A reduced gradient is rounded to the dtype of the sharded weight: bfloat16 would lose what master weights are for.
  (Sums before that are possible in float32, with `grad_dtype` of the unsharded parameters and reduce_dtype.)
- Gloo knows no scaled sum, so divide factor 1 needs set_force_sum_reduction_for_comms, and float64 is divided anyway.
- Its collectives bypass comm.py. That of weights need not: set_custom_all_gather takes ours.

Unsharded parameters are the same objects in every pass, with or without memory behind them; the backward pass and the
sink know weights by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ...kernels import Ops
from ..box import Box, Replica
from ..comm import Communicator, Work
from ..grid import Grid
from ..linear import gradient_dtype
from ..model import Decoder
from ..params import ParamFacts, ParamTable
from .buckets import BucketedGradients, Slot
from .units import stages_of

_IN_FLIGHT = 2  # reductions at a time, so that memory of gradients is bounded where it is freed after each


@dataclass(frozen=True)
class _Slot(Slot):
    shape: tuple[int, ...]  # of the unsharded gradient
    offset: int  # in the bucket's unsharded gradients
    dim: int  # that is cut

    def view(self, unsharded: Tensor) -> Tensor:
        return unsharded[self.offset : self.offset + prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class _Group:
    """Parameters `names` of one module that FSDP2 gathers together, over `comm`."""

    module: nn.Module
    comm: Communicator
    names: list[str]
    ignored: set[nn.Parameter]


@dataclass
class _Bucket:
    """Parameters of one block that are reduced together: over `first`, whose ranks each get a shard, then `then`."""

    first: Communicator
    then: list[Communicator]
    is_counted: bool  # in the gradient norm, on this rank
    slots: list[_Slot] = field(default_factory=list)
    numel: int = 0
    unsharded: Tensor | None = None  # flat; while contributions come
    reduced: Tensor = field(default_factory=lambda: torch.empty(0))  # flat: this rank's rows of each, one per chunk
    holds_sum: bool = False

    def _chunk(self, slot: _Slot) -> int:
        """A parameter's rows per rank; the last ranks have fewer, or none."""
        return -(-slot.shape[slot.dim] // self.first.size)

    def chunk_numel(self, slot: _Slot) -> int:
        return prod(slot.shape) // slot.shape[slot.dim] * self._chunk(slot)

    def box(self, slot: _Slot, local: Box) -> Box:
        """This rank's part of a parameter that lies at `local`."""
        begin = min(self.first.rank * self._chunk(slot), slot.shape[slot.dim])
        start, shape = list(local.start), list(local.shape)
        start[slot.dim] += begin
        shape[slot.dim] = min(self._chunk(slot), slot.shape[slot.dim] - begin)
        return Box(tuple(start), tuple(shape))

    def by_rank(self) -> Tensor:
        """The unsharded gradients, rank by rank: [ranks, elements of `reduced`]; zeros where a rank has no row."""
        assert self.unsharded is not None
        parts = []
        for slot in self.slots:
            gradient = slot.view(self.unsharded)
            parts.append(gradient if slot.dim == 0 else torch.cat(gradient.chunk(self.first.size, slot.dim)))
        chunks = self.reduced.new_empty(self.first.size, self.reduced.numel())
        torch._chunk_cat(parts, 0, self.first.size, out=chunks)
        return chunks


class FullySharded(BucketedGradients[_Slot]):
    """A DataParallel (data.py). Sharded over `axis`: dense (FSDP), or shard (HSDP: copies of what its ranks hold).

    reduce_each: reduce in every micro-step, and keep only shards of gradients between them; else once per step.
    reshard: free weights between forward and backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        table: ParamTable,
        grid: Grid,
        ops: Ops,
        axis: str = "dense",
        reduce_each: bool = False,
        reshard: bool = True,
    ) -> None:
        assert grid.comms[axis].size > 1, "one rank has nothing to shard"
        self._table, self._grid, self._ops, self._axis, self._reduce_each = table, grid, ops, axis, reduce_each
        self.shards: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._boxes: dict[str, Box] = {}
        self._buckets: list[_Bucket] = []
        self._flights: list[tuple[_Bucket, Tensor, Work]] = []
        self._modules: list[Any] = []  # FSDPModules
        super().__init__(self._collect(model, self._shard(model, reshard)))

    def box(self, name: str) -> Box:
        """See DataParallel."""
        return self._boxes[name]

    def replica(self, name: str) -> Replica:
        """See DataParallel."""
        rest = self._table.replica(name, self._grid, without=self._table[name].reduce_over)
        if self._axis != "shard" or self._table[name].reduce_over != "dense":
            return rest
        copies = self._grid.comms["replicate"]
        return Replica(("replicate", *rest.axes), copies.rank + copies.size * rest.index, copies.size * rest.count)

    def begin_step(self, passes: int, rounds: int = 1) -> None:
        """See DataParallel."""
        super().begin_step(passes, passes if self._reduce_each else rounds)
        self._flights.clear()
        for bucket in self._buckets:
            bucket.unsharded, bucket.holds_sum = None, False

    def finish(self) -> None:
        """See DataParallel. Raises PeerLostError."""
        self.check_complete()
        self._land(0)
        # One axis after the other, the same order on all ranks.
        for position in range(max(len(b.then) for b in self._buckets)):
            works = [b.then[position].all_reduce_async(b.reduced) for b in self._buckets if position < len(b.then)]
            for work in works:
                work.wait()

    def squared_norm(self) -> Tensor:
        """See DataParallel."""
        counted = [b.reduced for b in self._buckets if b.is_counted]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self._grid.device)
        return self._ops.l2norm(counted).double().square()

    def publish(self) -> None:
        """See DataParallel: the next forward pass gathers weights. What an evaluation has gathered is void."""
        for module in self._modules:
            module.reshard()

    def close(self) -> None:
        """See DataParallel."""
        super().close()
        self._flights.clear()

    # Gradients.

    def _buffer(self, slot: _Slot) -> Tensor:
        bucket = self._buckets[slot.bucket]
        if bucket.unsharded is None:
            bucket.unsharded = bucket.reduced.new_empty(bucket.numel)
        return slot.view(bucket.unsharded)

    def _send(self, bucket: int) -> None:
        b = self._buckets[bucket]
        self._land(_IN_FLIGHT - 1)
        chunks, b.unsharded = b.by_rank(), None
        out = torch.empty_like(b.reduced) if b.holds_sum else b.reduced
        self._flights.append((b, out, b.first.reduce_scatter_async(chunks.view(-1), out=out)[1]))

    def _land(self, left: int) -> None:
        """Wait until only `left` reductions are under way."""
        while len(self._flights) > left:
            bucket, out, work = self._flights.pop(0)
            work.wait()
            if bucket.holds_sum:
                bucket.reduced.add_(out)
            bucket.holds_sum = True

    # Building.

    def _shard(self, model: nn.Module, reshard: bool) -> dict[Tensor, str]:
        """Hand the weights to FSDP2. Returns the unsharded parameters, which exist once they were gathered."""
        unsharded: dict[Tensor, str] = {}
        for stage in stages_of(model):
            groups: list[_Group] = []
            for layer in (*stage.stage.layers, None):
                facts = [f for f in self._table if f.layer == layer and f.is_on(stage.stage)]
                root = stage if layer is None else stage.blocks[str(layer)]
                groups += self._groups(stage, root, facts)
            for group in groups:
                fully_shard(
                    group.module,
                    mesh=_mesh(group.comm),
                    reshard_after_forward=reshard and group.module is not stage,
                    shard_placement_fn=partial(_placement, ranks=group.comm.size),
                    ignored_params=group.ignored,
                )
            for group in reversed(groups):  # FSDP2 wants the root first
                module: Any = group.module  # an FSDPModule now: torch mixes that into its class
                module.set_custom_all_gather(_Gather(group.comm))
                module.set_requires_gradient_sync(False, recurse=False)
                module.unshard()
                unsharded |= {self._table.local(model, name): name for name in group.names}
                module.reshard()
                self._modules.append(module)
        return unsharded

    def _groups(self, stage: Decoder, root: nn.Module, facts: list[ParamFacts]) -> list[_Group]:
        """Of a block, or what else a stage has: modules whose weights are sharded over another axis, then the rest."""
        comms, groups = self._grid.comms, []
        ignored: set[nn.Parameter] = set()
        others = {f.name.rpartition(".")[0]: f.reduce_over for f in facts if f.reduce_over != "dense"}
        for place, axis in others.items():
            module = stage.get_submodule(place)
            if comms[axis].size > 1:
                names = [f.name for f in facts if f.name.startswith(f"{place}.")]
                groups.append(_Group(module, comms[axis], names, set()))
            else:
                ignored |= set(module.parameters())
        taken = {name for group in groups for name in group.names}
        names = [f.tied_to or f.name for f in facts if f.name not in taken]
        return [*groups, _Group(root, comms[self._axis], names, ignored)]

    def _collect(self, model: nn.Module, unsharded: dict[Tensor, str]) -> dict[Tensor, _Slot]:
        """Slots by unsharded parameter; buckets, and this rank's share of them."""
        parameters = {name: parameter for parameter, name in unsharded.items()}
        slots: dict[Tensor, _Slot] = {}
        numbers: dict[tuple[Any, ...], int] = {}
        # Gradients come in the reverse order of the forward pass; so do buckets, on all ranks alike.
        for facts in reversed(self._table.owned()):
            key = (facts.layer, facts.is_output, facts.reduce_over, facts.replica_axes, facts.partial_over)
            if key not in numbers:
                numbers[key] = len(self._buckets)
                self._buckets.append(self._bucket(facts))
            bucket, parameter, uses = self._buckets[numbers[key]], parameters[facts.name], self._table.uses(facts.name)
            dim = _cut_dim(parameter.shape, bucket.first.size)
            slot = _Slot(facts.name, numbers[key], uses, tuple(parameter.shape), bucket.numel, dim)
            bucket.slots.append(slot)
            bucket.numel += parameter.numel()
            slots[parameter] = slot
        dtype = gradient_dtype(next(iter(slots)).dtype)
        for bucket in self._buckets:
            self._cut(model, bucket, dtype)
        return slots

    def _bucket(self, facts: ParamFacts) -> _Bucket:
        comms = self._grid.comms
        first, then = comms[facts.reduce_over], []
        if self._axis == "shard" and facts.reduce_over == "dense":
            first, then = comms["shard"], [comms["replicate"]]
        then += [] if facts.partial_over is None else [comms[facts.partial_over]]
        return _Bucket(first, [c for c in then if c.size > 1], self.replica(facts.name).index == 0)

    def _cut(self, model: nn.Module, bucket: _Bucket, dtype: torch.dtype) -> None:
        """This rank's part of the bucket's parameters, as FSDP2 has cut them."""
        numel = sum(bucket.chunk_numel(slot) for slot in bucket.slots)
        bucket.reduced = torch.zeros(numel, dtype=dtype, device=self._grid.device)
        begin = 0
        for slot in bucket.slots:
            parameter = self._table.local(model, slot.name)
            shard = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
            if shard.numel() > 0:
                box = bucket.box(slot, self._table.box(slot.name, self._grid))
                assert tuple(shard.shape) == box.shape, f"{slot.name}: {tuple(shard.shape)}, {box}"
                self._boxes[slot.name], self.shards[slot.name] = box, shard
                self.gradients[slot.name] = bucket.reduced[begin : begin + shard.numel()].view(box.shape)
            begin += bucket.chunk_numel(slot)


def _cut_dim(shape: Sequence[int], ranks: int) -> int:
    """Which dimension is cut: the rows; of stacked matrices, if they are fewer than ranks, the rows of each."""
    return 1 if len(shape) > 2 and shape[0] < ranks and shape[1] % ranks == 0 else 0


def _placement(parameter: nn.Parameter, ranks: int) -> Shard:
    return Shard(_cut_dim(parameter.shape, ranks))


class _Gather:
    """FSDP2's all-gather through our communicator, which counts it and knows what a lost peer looks like."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """On CUDA FSDP2 calls this on a stream of its own, and only that stream waits. Raises PeerLostError."""
        self._comm.all_gather_async(input_tensor, out=output_tensor)[1].wait()


def _mesh(comm: Communicator) -> DeviceMesh:
    """One axis, of the communicator's own group: no group is made here."""
    assert comm.group is not None
    return DeviceMesh.from_group(comm.group, comm.device.type, mesh_dim_names=("shard",))
