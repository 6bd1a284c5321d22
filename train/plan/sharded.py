"""FSDP of a rank that is alone: parallel/fsdp.py with memory that comes and goes as under FSDP2, but without FSDP2.

Owns: a stand-in for `fully_shard`, which does not take meta tensors: when weights are gathered and freed, into how much
memory, and what is sent for it. Gradients are FullySharded's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels import Ops
from ...kernels.numerics import apply
from ..comm import Communicator
from ..grid import Grid
from ..linear import gradient_dtype
from ..parallel.fsdp import FullySharded, _Bucket, _cut_dim
from ..parallel.units import stages_of
from ..params import ParamTable
from .live import LiveBytes


class Sharded(FullySharded):
    """A DataParallel (parallel/data.py) on meta tensors."""

    def __init__(
        self, model: nn.Module, table: ParamTable, grid: Grid, ops: Ops, axis: str, reshard: bool, live: LiveBytes
    ) -> None:
        self._live, self._gathering = live, _Gathering()
        super().__init__(model, table, grid, ops, axis, reshard=reshard)

    def whole_bytes(self) -> int:
        """Of weights and gradients that are not cut at this moment."""
        gradients = sum(b.unsharded.nbytes for b in self._buckets if b.unsharded is not None)
        return gradients + sum(unit.whole_bytes for unit in self._modules)

    def _shard(self, model: nn.Module, reshard: bool) -> dict[Tensor, str]:
        unsharded: dict[Tensor, str] = {}
        for stage in stages_of(model):
            groups = []
            for layer in (*stage.stage.layers, None):
                facts = [f for f in self._table if f.layer == layer and f.is_on(stage.stage)]
                groups += self._groups(stage, stage if layer is None else stage.blocks[str(layer)], facts)
            for group in groups:
                parameters = [self._table.local(model, name) for name in dict.fromkeys(group.names)]
                unsharded |= {self._table.local(model, name): name for name in group.names}
                is_root = group.module is stage
                self._modules.append(
                    _Unit(group.module, group.comm, parameters, reshard and not is_root, is_root, self)
                )
            unsharded |= {p: name for name, p in model.named_parameters() if p not in unsharded}
        return unsharded

    def _cut(self, model: nn.Module, bucket: _Bucket, dtype: torch.dtype) -> None:
        numel = sum(bucket.chunk_numel(slot) for slot in bucket.slots)
        bucket.reduced = torch.zeros(numel, dtype=dtype, device=self._grid.device)
        begin = 0
        for slot in bucket.slots:
            parameter = self._table.local(model, slot.name).detach()
            box = bucket.box(slot, self._table.box(slot.name, self._grid))
            padded = bucket.chunk_numel(slot)
            size = _numel(box.shape)
            shard = parameter if bucket.first.size == 1 else parameter.new_empty(padded)[:size].view(box.shape)
            if size > 0:
                self._boxes[slot.name], self.shards[slot.name] = box, shard
                self.gradients[slot.name] = bucket.reduced[begin : begin + size].view(box.shape)
            begin += padded


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class _Gathering:
    """What all units of a rank share: gathered memory that is not yet let go of."""

    def __init__(self) -> None:
        self.last: Tensor | None = None  # of the last unit in the forward pass
        self.ahead: dict[_Unit, Tensor] = {}  # begun before it is needed, in the backward pass
        self.used: list[_Unit] = []  # in the order in which forward passes ended


class _Unit:
    """Weights that are gathered together; see FSDPParamGroup in torch."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        parameters: list[Tensor],
        reshard: bool,
        is_root: bool,
        owner: Sharded,
    ) -> None:
        self._comm, self._reshard, self._is_root = comm, reshard, is_root
        self._live, self._gathering = owner._live, owner._gathering
        self._dtype = parameters[0].dtype if parameters else gradient_dtype(torch.float32)
        self._storages, self._bytes = [], []
        for p in parameters:
            rows = p.shape[_cut_dim(p.shape, comm.size)]
            padded = p.numel() // rows * -(-rows // comm.size) * comm.size
            p.data = p.data.new_empty(padded)[: p.numel()].view(p.shape)
            self._storages.append(p.untyped_storage())
            self._bytes.append(padded * p.itemsize)
        self._is_whole, self._is_in_backward = True, False
        self.reshard()
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after)

    @property
    def whole_bytes(self) -> int:
        return sum(self._bytes) if self._is_whole else 0

    def reshard(self) -> None:
        """Free the memory of whole weights."""
        if self._is_whole:
            self._is_whole = False
            self._resize([0] * len(self._storages))

    def _resize(self, sizes: list[int]) -> None:
        for storage, size in zip(self._storages, sizes, strict=True):
            storage.resize_(size)
        self._live.recount(self._storages)

    def begin(self) -> Tensor | None:
        """Gather into one buffer; None: nothing to do."""
        if self._is_whole or not self._storages:
            return None
        if self in self._gathering.ahead:
            return self._gathering.ahead.pop(self)
        out = torch.empty(sum(self._bytes) // self._dtype.itemsize, dtype=self._dtype, device="meta")
        self._comm.all_gather_async(out[: out.numel() // self._comm.size], out=out)
        return out

    def _end(self) -> None:
        if not self._is_whole:
            self._is_whole = True
            self._resize(self._bytes)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_in_backward:  # computed again
            return None
        flat = self.begin()
        if flat is not None:
            self._gathering.last = None
            self._end()
            self._gathering.last = flat
        if self._is_root or not torch.is_grad_enabled():
            return None
        return tree_map(self._watched, args), kwargs

    def _watched(self, leaf: Any) -> Any:
        is_to_watch = isinstance(leaf, Tensor) and leaf.requires_grad
        return apply(_AtBackward, leaf, self._after_backward) if is_to_watch else leaf

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_in_backward:
            return
        if self._is_root:
            self._gathering.last = None
        if self._reshard:
            self.reshard()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._before_backward)
        self._gathering.used.append(self)

    def _before_backward(self, gradient: Tensor) -> None:
        if self._is_in_backward:
            return
        self._is_in_backward = True
        if self.begin() is not None:
            self._end()
        if self._is_root:
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        used = self._gathering.used
        if self in used:
            at = used.index(self)
            del used[at:]
        if used and not used[-1]._is_root:
            ahead = used[-1].begin()
            if ahead is not None:
                self._gathering.ahead[used[-1]] = ahead

    def _after_backward(self) -> None:
        self._is_in_backward = False
        self.reshard()


class _AtBackward(torch.autograd.Function):
    """The tensor itself; calls when the backward pass comes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None
