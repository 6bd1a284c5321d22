"""How long a step might take: an estimate from arithmetic, traffic and the schedule, before any device has run it.

Owns: the assumptions, and what follows from them. No figure here was ever measured on a GPU. Does not own: how much
arithmetic a token takes (flops.py), traffic (dry_run.py), the order of work (schedule.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...conf.layout import Layout
from ...conf.pipeline import stages_per_rank
from ...conf.schema import Config, ParamDtype
from ...conf.schema import DataParallel as DataKind
from ...conf.schema import Recompute as RecomputeKind
from ..flops import flops_per_token
from ..parallel.stages import are_ends_apart, layer_costs, stage_specs
from ..params import decoder_table
from .account import DryRun
from .dry_run import micro_steps_of
from .schedule import Durations, Timeline, order_of, simulate
from .silent import Traffic

OVERLAPPED = ("data", "dense", "shard", "replicate", "expert_data", "tied", "kv", "world", "stage")


@dataclass(frozen=True)
class Assumptions:
    """What is not known before a run. Speeds are those that one GPU reaches in one direction, in bytes per second."""

    peak: float  # FLOP/s of the device in the dtype of the weights
    efficiency: float = 0.5  # of the peak that matrix products reach, with all that runs between them
    inside: float = 300e9  # within a node (NVLink)
    across: float = 40e9  # between nodes (InfiniBand at 400 Gbit/s per GPU)
    device_memory: float = 2.5e12  # of the device's own memory, for the optimizer


@dataclass(frozen=True)
class AxisTime:
    """Traffic of one axis in one step, on one rank."""

    axis: str
    size: int
    calls: int
    sent_bytes: float
    crosses_nodes: bool
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, by what they are spent on."""

    seconds: float
    passes: float  # of the pipeline, with what it waits for
    exposed: float  # gradients and weights on their way while nothing computes
    optimizer: float
    bubble: float  # part of the passes in which a rank waits, 0 to 1
    tokens_per_second: float
    mfu: float
    axes: list[AxisTime] = field(default_factory=list)


def flops_per_step(config: Config) -> float:
    """Of all ranks, without what is computed again."""
    table = decoder_table(config.model, False, are_ends_apart(config.parallel))
    tokens = config.train.global_batch * config.data.seq_len
    return flops_per_token(config.model, table, config.data.seq_len) * tokens


def crosses_nodes(layout: Layout, axis: str, rank: int, procs_per_node: int) -> bool:
    """Whether the ranks of this rank's group lie on several nodes."""
    return len({r // procs_per_node for r in layout.group(axis, rank)}) > 1


def axis_times(run: DryRun, layout: Layout, procs_per_node: int, assume: Assumptions) -> list[AxisTime]:
    """Of the axes on which something is sent."""
    return [
        _axis_time(axis, traffic, run, layout, procs_per_node, assume)
        for axis, traffic in run.traffic.items()
        if traffic.calls
    ]


def _axis_time(
    axis: str, traffic: Traffic, run: DryRun, layout: Layout, procs_per_node: int, assume: Assumptions
) -> AxisTime:
    crosses = crosses_nodes(layout, axis, run.rank, procs_per_node)
    seconds = traffic.sent_bytes / (assume.across if crosses else assume.inside)
    size = len(layout.group(axis, run.rank))
    return AxisTime(axis, size, traffic.calls, traffic.sent_bytes, crosses, seconds)


def timeline_of(config: Config, layout: Layout, assume: Assumptions, waiting: float = 0.0) -> Timeline:
    """The schedule in seconds. waiting: of one micro-batch on one rank for ranks that share its layers."""
    chunks, micro_steps = stages_per_rank(config.parallel), micro_steps_of(config, layout)
    forward = _forward_seconds(config, layout, assume)
    count = len(forward)
    again = _again(config)
    share = [f / sum(forward) * layout.pipeline for f in forward]
    passes = [f + waiting * s / 3 for f, s in zip(forward, share, strict=True)]
    inputs = [f * (1 + again) + waiting * s * 2 / 3 for f, s in zip(forward, share, strict=True)]
    tokens = config.train.micro_batch * config.data.seq_len / layout.context / layout.tensor
    width = 4 if config.precision.params is ParamDtype.float32 else 2
    transfer = tokens * config.model.hidden_size * width / assume.across if layout.pipeline > 1 else 0.0
    durations = Durations(passes, inputs, forward, transfer)
    if layout.pipeline == 1:
        # One after the other: a pipeline of one stage.
        return simulate(order_of("gpipe", 1, 1, micro_steps), durations)
    assert count == layout.pipeline * chunks
    return simulate(order_of(config.parallel.pipeline_schedule, layout.pipeline, chunks, micro_steps), durations)


def _forward_seconds(config: Config, layout: Layout, assume: Assumptions) -> list[float]:
    """Of one micro-batch in each stage."""
    micro = flops_per_step(config) / config.train.global_batch * config.train.micro_batch
    whole = micro / 3 / (layout.tensor * layout.context) / (assume.peak * assume.efficiency)
    layers, first, last = layer_costs(config)
    costs = [
        sum(layers[i] for i in s.layers) + (first if s.is_first else 0) + (last if s.is_last else 0)
        for s in stage_specs(config)
    ]
    return [whole * cost / sum(costs) for cost in costs]


def _again(config: Config) -> float:
    """Forward passes that the backward pass runs again, as a part of all."""
    memory = config.memory
    return 1.0 / memory.recompute_every if memory.recompute is RecomputeKind.full else 0.0


def estimate(config: Config, layout: Layout, run: DryRun, procs_per_node: int, assume: Assumptions) -> Estimate:
    """Of a step, from one rank's dry run.

    Traffic between ranks that share layers (tensor, context, expert) counts in full. Gradients and weights between
    data-parallel ranks travel while the backward pass of one micro-batch runs; under FSDP, in which they travel with
    every micro-batch, while anything is computed. What does not fit in there is exposed.
    """
    axes = axis_times(run, layout, procs_per_node, assume)
    waiting = sum(a.seconds for a in axes if a.axis in ("tensor", "context", "expert")) / run.micro_steps
    timeline = timeline_of(config, layout, assume, waiting)
    hidden = sum(a.seconds for a in axes if a.axis in OVERLAPPED)
    is_sharded = config.parallel.data in (DataKind.fsdp, DataKind.hsdp)
    behind = max(timeline.busy) * (1.0 if is_sharded else 2 / 3 / run.micro_steps)
    exposed = max(0.0, hidden - behind)
    optimizer = 7 * 4 * run.owned / assume.device_memory  # reads and writes of masters, moments and gradients
    seconds = timeline.length + exposed + optimizer
    tokens = config.train.global_batch * config.data.seq_len
    mfu = flops_per_step(config) / (seconds * layout.world * assume.peak)
    return Estimate(
        seconds, timeline.length, exposed, optimizer, timeline.bubble, tokens / seconds, mfu,
        sorted(axes, key=lambda a: -a.seconds),
    )  # fmt: skip
