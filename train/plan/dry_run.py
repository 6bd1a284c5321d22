"""One rank of any layout alone, on meta tensors: built as the trainer builds it, and led through one step.

Owns: the rank's work in the order of its schedule, and what is measured on the way (live bytes, traffic). Shapes that
do not fit show here as they would in a run. Does not own: what the rank is made of (assemble.py), the order of work
(schedule.py), how numbers are told (report.py).

Values are not known: experts are taken to be equally loaded, and documents to be shorter than a chunk of attention.
Kernels are the references, attention that of a fused kernel: what lives long is the same for all, scratch memory is
not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...conf.layout import Layout
from ...conf.pipeline import SCHEDULES, stages_per_rank
from ...conf.schema import Config, ContextMethod, OptimizerKind
from ...conf.schema import DataParallel as DataKind
from ...kernels import Ops, select
from ...kernels.attention import chunked_attention
from ..assemble import build_data_parallel, build_optimizer, build_stages, join, param_dtype, stages_of, table_of
from ..data.dataset import Batch
from ..data.loader import Share
from ..grid import Grid
from ..linear import WeightGradients
from ..model import Decoder, DropoutKey, Sums
from ..optim.weights import Optimizer
from ..parallel.context import cut_rows
from ..parallel.data import DataParallel
from ..parallel.stages import rank_of_stage, stages_of_rank
from .account import DryRun, DryRunError, Memory
from .live import LiveBytes, bytes_of
from .schedule import Action, Kind, Order, order_of, peak_in_flight
from .silent import Ledger, Traffic, silent_grid

META = torch.device("meta")


def micro_steps_of(config: Config, layout: Layout) -> int:
    """Micro-batches per step and rank."""
    return Share(config.train.global_batch, config.train.micro_batch, 0, layout.data).micro_steps


def dry_run(config: Config, layout: Layout, rank: int, as_device: str = "cuda", most: int | None = None) -> DryRun:
    """Build and run `rank`. as_device: whose memory is meant, cuda or cpu: attention differs.

    most: micro-batches that are run at most; traffic is extended to all of them, and what is held does not grow with
    more. None: as many as fill the pipeline twice. 0: of a pipeline one, and what is held is reckoned from it.

    Raises:
        DryRunError: something does not fit together; says where.
    """
    # The compiler looks at none of what this watches, and finds nothing to compile in it; blocks keep what they keep.
    eager = replace(config, kernels=replace(config.kernels, compile=False))
    return _Rehearsal(eager, layout, rank, as_device, most).run()


def plan_ops(as_device: str) -> Ops:
    """Reference kernels; attention in the way of the device's fused kernels."""
    ops = select({"default": "reference"}, "cpu")
    return ops if as_device == "cpu" else replace(ops, attention=_fused_attention)


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_ids: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Kernels for documents and windows (varlen, flash) keep what the plain one keeps; only a soft cap needs chunks."""
    out, lse = chunked_attention(q, k, v, None if softcap is None else doc_ids, None, scale, softcap)
    return (out, lse) if return_lse else out


class _Rehearsal:
    def __init__(self, config: Config, layout: Layout, rank: int, as_device: str, most: int | None) -> None:
        self.config, self.layout, self.rank, self.as_device = config, layout, rank, as_device
        self.ledger, self.live = Ledger(), LiveBytes()
        self.grid: Grid = silent_grid(layout, rank, META, self.ledger)
        self.chunks = stages_per_rank(config.parallel)
        self.micro_steps = micro_steps_of(config, layout)
        self._is_quick = most == 0 and layout.pipeline > 1
        self._most_held = min(self.micro_steps, 2 * layout.pipeline * self.chunks)
        if self._is_quick:
            self.order = _one_each(config, layout, self.chunks)
        else:
            self.order = _order(config, layout, self.chunks, self.micro_steps, most)
        self._is_v = layout.pipeline > 1 and SCHEDULES[config.parallel.pipeline_schedule].is_v
        self.queue = WeightGradients()
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._results: list[Sums] = []
        self._sent: list[Tensor] = []  # torch's schedules of several stages wait for what they sent at the step's end
        self._keeps_sent = config.parallel.pipeline_schedule not in ("gpipe", "1f1b")
        self._products: dict[tuple[int, int], Callable[[], None]] = {}
        self._batches: dict[int, Batch] = {}
        self.per_micro_batch: dict[int, int] = {}
        self._by_kind: dict[tuple[int, Kind], list[dict[str, Traffic]]] = {}
        self._held = self._held_whole = self._held_sent = self._peak = 0
        self._whole: Callable[[], int] = lambda: 0  # bytes of whole weights and gradients
        self._peak_at = "start"

    def run(self) -> DryRun:
        self._at = "building"
        try:
            with self.live:
                return self._run()
        except (AssertionError, RuntimeError, ValueError, NotImplementedError, IndexError, KeyError) as error:
            if isinstance(error, DryRunError):
                raise
            first = str(error).splitlines()[0] if str(error) else ""
            where = f"rank {self.rank} of {self.layout.world}, {self._at}"
            raise DryRunError(f"{where}: {type(error).__name__}: {first}") from error

    def _run(self) -> DryRun:
        config, live = self.config, self.live
        ops = plan_ops(self.as_device)
        specs = stages_of(config, self.grid)
        whole = table_of(config, self.grid)
        table = whole.part(specs)
        self.stages: dict[int, Decoder] = {
            stage.stage.index: stage for stage in build_stages(config, self.grid, ops, self.queue, table, specs)
        }
        model = join(list(self.stages.values()))
        table.check(model, self.grid)
        parameters = sum(p.numel() for _, p in model.named_parameters())
        share = self._share(ops, table, model)
        self.queue.sink = share.sink
        weights = bytes_of([*share.shards.values(), *(p for _, p in model.named_parameters())])
        gradients = live.now - weights
        here = replace(config, memory=replace(config.memory, offload_optimizer=False))
        optimizer: Optimizer | None = build_optimizer(here, self.grid, ops, table, share)
        masters = bytes_of(optimizer.state().get("master", {}).values()) if optimizer else 0
        moments = live.now - weights - gradients - masters
        host = 0
        if config.memory.offload_optimizer and self.as_device != "cpu":
            host, masters, moments, optimizer = masters + moments, 0, 0, None
        base = live.now
        live.reset_peak()
        share.begin_step(self.order.micro_steps)
        self._work(base)
        sent = bytes_of(self._sent) // self.order.micro_steps  # of a micro-batch
        self._sent.clear()
        for held in (self._inputs, self._outputs, self._gradients):
            held.clear()
        inputs = self._input_bytes()
        self._after("the reduction of gradients", share.finish)
        self._after("the gradient norm", share.squared_norm)
        self._results.clear()
        self._batches.clear()
        if optimizer is not None and config.optim.kind is OptimizerKind.adamw:
            self._after("the optimizer", partial(optimizer.step, share.gradients, 1e-3, 1, 1.0))
        self._after("the exchange of weights", share.publish)
        gathered, sends = self._held_whole, self._held_sent
        activations = self._held - gathered - sends - inputs
        if self._keeps_sent:
            sends += sent * (self.micro_steps - self.order.micro_steps)
        transient = self._peak - base - self._held
        if self._is_quick:
            activations = max(activations, self._reckoned())
        memory = Memory(
            weights, gradients, masters, moments, gathered, sends, inputs, activations, host, transient, self._peak_at
        )  # fmt: skip
        owned = sum(t.numel() for t in share.shards.values())
        traffic = self._traffic()
        share.close()
        coordinates = {axis: self.layout.index(axis, self.rank) for axis in ("pipeline", "data", "context", "tensor")}
        layers = [list(spec.layers) for spec in specs]
        return DryRun(
            self.rank, coordinates, layers, parameters, owned, memory, self.per_micro_batch, self.micro_steps, traffic
        )

    def _share(self, ops: Ops, table: Any, model: Any) -> DataParallel:
        kind = self.config.parallel.data
        axis = "shard" if kind is DataKind.hsdp else "dense"
        if kind in (DataKind.fsdp, DataKind.hsdp) and self.grid.comms[axis].size > 1:
            from .sharded import Sharded

            reshard = self.grid.pipeline.size == 1
            share = Sharded(model, table, self.grid, ops, axis, reshard=reshard, live=self.live)
            self._whole = share.whole_bytes
            return share
        return build_data_parallel(self.config, self.grid, ops, table, model)

    def _reckoned(self) -> int:
        """Activations of the micro-batches in flight, from those of one."""
        order = order_of(self.config.parallel.pipeline_schedule, self.layout.pipeline, self.chunks, self._most_held)
        peak = peak_in_flight(order)[self.grid.pipeline.rank]
        return int(peak.cost(self.per_micro_batch.__getitem__, self.per_micro_batch.__getitem__))

    # The step.

    def _work(self, base: int) -> None:
        mine = self.order.ranks[self.grid.pipeline.rank]
        for action in mine:
            self._at = f"{_name(action)}"
            before, counts = self.live.now, self._counts()
            self.live.reset_peak()
            self._do(action)
            if action.kind is Kind.FORWARD:
                self.per_micro_batch.setdefault(action.stage, self.live.now - before)
                self._hold(self.live.now - base)
            self._note_peak(self._at)
            self._by_kind.setdefault((action.stage, action.kind), []).append(_since(counts, self._counts()))

    def _hold(self, held: int) -> None:
        if held > self._held:
            self._held, self._held_whole = held, self._whole()
            self._held_sent = self._sent_bytes()

    def _sent_bytes(self) -> int:
        """Of what was sent and nobody else holds."""
        cached = [t.untyped_storage() for t in self._outputs.values()]
        return bytes_of(t for t in self._sent if not any(t.untyped_storage() is c for c in cached))

    def _note_peak(self, at: str) -> None:
        if self.live.peak > self._peak:
            self._peak, self._peak_at = self.live.peak, at

    def _after(self, what: str, work: Callable[[], Any]) -> None:
        self._at = what
        self.live.reset_peak()
        work()
        self._note_peak(what)

    def _do(self, action: Action) -> None:
        stage, micro = self.stages[action.stage], action.micro
        key = (action.stage, micro)
        if action.kind is Kind.FORWARD:
            self._forward(stage, key)
        elif action.kind is Kind.WEIGHT:
            self._products.pop(key)()
        else:
            self._backward(stage, key, is_split=action.kind is Kind.INPUT)

    def _forward(self, stage: Decoder, key: tuple[int, int]) -> None:
        dropout = DropoutKey(0, 0) if self.config.model.dropout else None
        x_TD = None
        if not stage.stage.is_first:
            x_TD = self._inputs.get(key)
            if x_TD is None:
                x_TD = self._inputs[key] = self._activation().requires_grad_()
        if self.layout.pipeline == 1:
            self._batches.pop(key[1] - 1, None)
            self._results.clear()
        out = stage(self._batch(key[1]), 1.0, dropout, x_TD)
        if isinstance(out, Sums):
            self._results.append(out)
            out = out.objective
        else:
            self._send(out, key, +1)
        self._outputs[key] = out

    def _backward(self, stage: Decoder, key: tuple[int, int], is_split: bool) -> None:
        self.queue.is_deferred = is_split
        out, x_TD = self._outputs.pop(key), self._inputs.pop(key, None)
        gradient = None
        if not stage.stage.is_last:
            gradient = self._gradients.pop(key, None)
            gradient = self._activation() if gradient is None else gradient
        out.backward(gradient)
        out.detach_()  # as torch's stages do: results do not keep their graphs
        if x_TD is not None:
            assert x_TD.grad is not None
            self._send(x_TD.grad, key, -1)
            x_TD.grad = None
        if is_split:
            self._products[key] = self.queue.take()
        else:
            self.queue.drain()

    def _send(self, tensor: Tensor, key: tuple[int, int], by: int) -> None:
        """To the neighbouring stage, on this rank or on another."""
        stage, micro = key
        to = rank_of_stage(stage + by, self.layout.pipeline, self._is_v)
        if to != self.grid.pipeline.rank:
            self.grid.pipeline.send_async(tensor, to)
            self._sent = [*(self._sent if self._keeps_sent else ()), tensor.detach()]
        elif by > 0:
            self._inputs[stage + by, micro] = tensor.detach().requires_grad_()
        else:
            self._gradients[stage + by, micro] = tensor

    def _activation(self) -> Tensor:
        """Memory to receive into."""
        p, c = self.config.parallel, self.config
        tokens = c.train.micro_batch * c.data.seq_len // self.layout.context
        tokens = tokens // self.layout.tensor if p.sequence else tokens
        return torch.empty(tokens, c.model.hidden_size, dtype=param_dtype(c), device=META)

    def _batch(self, micro: int) -> Batch:
        if micro not in self._batches:
            cut = partial(
                cut_rows,
                method=ContextMethod(self.config.parallel.context_method),
                rank=self.grid.context.rank,
                size=self.grid.context.size,
            )
            # Not while bytes are counted: a batch comes from the host's memory.
            with torch.utils._python_dispatch._disable_current_modes():
                batch = cut(_host_batch(self.config)).to(META)
            self.live.watch(_tensors(batch))
            self._batches[micro] = batch
        return self._batches[micro]

    def _input_bytes(self) -> int:
        return sum(bytes_of(_tensors(batch)) for batch in self._batches.values())

    # Traffic.

    def _counts(self) -> dict[str, Traffic]:
        return {axis: replace(traffic) for axis, traffic in self.ledger.by_axis.items()}

    def _traffic(self) -> dict[str, Traffic]:
        """Of all micro-steps, from those that were run: what a first micro-batch costs, so many times more."""
        total = self._counts()
        more = self.micro_steps - self.order.micro_steps
        for deltas in self._by_kind.values():
            for axis, traffic in deltas[0].items():
                total[axis].calls += traffic.calls * more
                total[axis].sent_bytes += traffic.sent_bytes * more
        return total


def _order(config: Config, layout: Layout, chunks: int, micro_steps: int, most: int | None) -> Order:
    if layout.pipeline == 1:
        few = min(micro_steps, most or 2)
        actions = [Action(kind, 0, m) for m in range(few) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        return Order("accumulation", 1, 1, few, (tuple(actions),))
    few = min(micro_steps, most or 2 * layout.pipeline * chunks)
    return order_of(config.parallel.pipeline_schedule, layout.pipeline, chunks, few)


def _one_each(config: Config, layout: Layout, chunks: int) -> Order:
    """One micro-batch through every stage of each rank: as much as shows what one takes."""
    stages = [stages_of_rank(r, config.parallel) for r in range(layout.pipeline)]
    ranks = [
        (*(Action(Kind.FORWARD, s, 0) for s in mine), *(Action(Kind.BACKWARD, s, 0) for s in reversed(mine)))
        for mine in stages
    ]
    return Order(config.parallel.pipeline_schedule, layout.pipeline, chunks, 1, tuple(ranks))


def _host_batch(config: Config) -> Batch:
    rows, length = config.train.micro_batch, config.data.seq_len
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    positions = torch.arange(length).repeat(rows, 1)
    doc_ids = positions * 3 // length if config.data.mask_documents else None
    return Batch(tokens, tokens.clone(), positions, doc_ids, torch.arange(rows))


def _tensors(batch: Batch) -> list[Tensor]:
    return [t for t in (batch.tokens, batch.targets, batch.positions, batch.doc_ids) if t is not None]


def _since(before: Mapping[str, Traffic], now: Mapping[str, Traffic]) -> dict[str, Traffic]:
    nothing = Traffic()
    return {
        axis: Traffic(t.calls - before.get(axis, nothing).calls, t.sent_bytes - before.get(axis, nothing).sent_bytes)
        for axis, t in now.items()
    }


_VERBS = {
    Kind.FORWARD: "forward pass",
    Kind.BACKWARD: "backward pass",
    Kind.INPUT: "backward pass of the inputs",
    Kind.WEIGHT: "backward pass of the weights",
}


def _name(action: Action) -> str:
    return f"{_VERBS[action.kind]} of micro-batch {action.micro} in stage {action.stage}"
