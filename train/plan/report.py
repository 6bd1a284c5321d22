"""What a plan says, as text and as JSON. The numbers are dry_run.py's and estimate.py's.

Owns: the words, and which lines nobody has verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...conf.layout import Layout
from ...conf.schema import Config
from .account import DryRun
from .estimate import Assumptions, Estimate

GIB = 2**30

# What a device holds besides tensors. No run on a GPU has confirmed these; they are in no total.
UNVERIFIED = (
    ("CUDA context and modules", "0.5 to 1 GiB"),
    ("allocator fragmentation", "0 to 10 % of the total"),
    ("NCCL buffers", "some 0.1 GiB per process group"),
    ("cuBLAS workspace", "32 MiB per stream"),
)


@dataclass(frozen=True)
class Plan:
    """A layout, judged. runs: one rank of each pipeline rank that was looked at."""

    config: Config
    layout: Layout
    procs_per_node: int
    runs: Sequence[DryRun]
    estimate: Estimate | None
    assume: Assumptions
    parameters: int
    checkpoint_bytes: int

    @property
    def worst(self) -> DryRun:
        return max(self.runs, key=lambda run: run.memory.total)


def describe(config: Config, layout: Layout) -> str:
    """A layout in a few words, as overrides."""
    p, words = config.parallel, []
    for axis in ("tensor", "pipeline", "context", "expert"):
        if getattr(p, axis) > 1:
            words.append(f"{axis}={getattr(p, axis)}")
    if p.pipeline > 1:
        words.append(f"pipeline_schedule={p.pipeline_schedule}")
    if layout.dense > 1:
        words.append(f"data={p.data.value}")
    text = " ".join(f"parallel.{word}" for word in words)
    if config.memory.recompute.value != "none":
        text += f" memory.recompute={config.memory.recompute.value}"
    return text.strip() or "one rank"


def text_of(plan: Plan) -> str:
    """The whole report."""
    lines = [*_head(plan), "", *_memory(plan), "", *_traffic(plan), "", *_time(plan), "", *_checkpoint(plan)]
    return "\n".join(lines) + "\n"


def _head(plan: Plan) -> list[str]:
    layout, config = plan.layout, plan.config
    run = plan.runs[0]
    axes = " x ".join(f"{axis} {layout.sizes[axis]}" for axis in ("pipeline", "data", "context", "tensor"))
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    return [
        f"{plan.parameters / 1e9:.2f} billion parameters on {layout.world} GPUs: {axes}{experts}; "
        f"data={config.parallel.data.value}",
        f"a step: {config.train.global_batch} samples of {config.data.seq_len} tokens, {run.micro_steps} micro-batches "
        f"of {config.train.micro_batch} per rank",
    ]


def _memory(plan: Plan) -> list[str]:
    worst = plan.worst
    memory = worst.memory
    stages = ", ".join(f"stage of {_layers(layers)}" for layers in worst.layers)
    flight = ", ".join(f"{gib(n)} GiB in stage {stage}" for stage, n in worst.per_micro_batch.items())
    places = f"{', '.join(f'{axis} {at}' for axis, at in worst.coordinates.items())}"
    rows = [
        ("weights", memory.weights, f"{worst.parameters / 1e6:,.1f} million, {plan.config.precision.params.value}"),
        ("gradients", memory.gradients, ""),
        ("master weights", memory.masters, ""),
        ("optimizer moments", memory.moments, ""),
        ("gathered weights, gradients", memory.gathered, "whole ones of FSDP, while needed")
        if memory.gathered
        else None,
        ("activations", memory.activations, f"a micro-batch: {flight}"),
        ("sent activations", memory.sends, "kept by torch's schedule until the step ends") if memory.sends else None,
        ("inputs", memory.inputs, ""),
        ("transient", memory.transient, f"highest in: {memory.peak_at}"),
        ("total", memory.total, ""),
    ]
    found = [f"memory of the fullest rank looked at, {worst.rank} ({places}; {stages}), GiB of live tensors"]
    found += [_row(*row) for row in rows if row is not None]
    if memory.host:
        found.append(_row("host memory for the optimizer", memory.host, "not part of the total"))
    found += [f"  {name:<30}{'unverified':>10}  {what}; not part of the total" for name, what in UNVERIFIED]
    if len(plan.runs) > 1:
        others = ", ".join(f"{run.rank}: {gib(run.memory.total)}" for run in plan.runs)
        found.append(f"  by rank: {others}")
    return found


def _row(name: str, size: int, note: str) -> str:
    return f"  {name:<30}{gib(size):>10}  {note}".rstrip()


def _layers(layers: Sequence[int]) -> str:
    return f"layers {layers[0]} to {layers[-1]}" if layers else "no layer"


def _traffic(plan: Plan) -> list[str]:
    axes = [] if plan.estimate is None else plan.estimate.axes
    if not axes:
        return ["communication: none"]
    lines = [
        "communication of that rank in a step",
        f"  {'axis':<14}{'ranks':>6}{'collectives':>13}{'GiB sent':>10}  link",
    ]
    for a in axes:
        link = "between nodes" if a.crosses_nodes else "within a node"
        lines.append(f"  {a.axis:<14}{a.size:>6}{a.calls:>13,}{a.sent_bytes / GIB:>10.2f}  {link}, {a.seconds:.3f} s")
    return lines


def _time(plan: Plan) -> list[str]:
    e, a = plan.estimate, plan.assume
    if e is None:
        return ["step time: not estimated"]
    return [
        f"estimate, not measured: {e.seconds:.2f} s per step, {e.tokens_per_second:,.0f} tokens/s, "
        f"{100 * e.mfu:.0f} % MFU",
        f"  passes {e.passes:.2f} s (of which {100 * e.bubble:.1f} % bubble), exposed exchange of gradients and "
        f"weights {e.exposed:.2f} s, optimizer {e.optimizer:.3f} s",
        f"  assumed: {a.peak / 1e12:.0f} TFLOP/s x {a.efficiency:g}, {a.inside / 1e9:g} GB/s per GPU within a node, "
        f"{a.across / 1e9:g} GB/s between nodes",
    ]


def _checkpoint(plan: Plan) -> list[str]:
    writers = plan.layout.world
    return [
        f"a checkpoint: {gib(plan.checkpoint_bytes)} GiB in all, {gib(plan.checkpoint_bytes / writers)} per rank if "
        "all write equally much"
    ]


def gib(size: float) -> str:
    """With two places, three where there would be nothing else."""
    value = size / GIB
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.4f}"


def json_of(plan: Plan) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    return {
        "layout": plan.layout.sizes,
        "overrides": describe(plan.config, plan.layout),
        "parameters": plan.parameters,
        "worst_rank": plan.worst.rank,
        "ranks": [asdict(run) | {"total": run.memory.total} for run in plan.runs],
        "estimate": None if plan.estimate is None else asdict(plan.estimate),
        "assumed": asdict(plan.assume),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "unverified": dict(UNVERIFIED),
    }


def table_of_layouts(plans: Iterable[Plan], limit: float) -> str:
    """Layouts that fit, best first."""
    plans = list(plans)
    if not plans:
        return (
            f"no layout fits {limit:g} GiB: give more GPUs or memory, a smaller train.micro_batch, or bfloat16 "
            "(precision=bf16)\n"
        )
    lines = [
        f"layouts that fit {limit:g} GiB of live tensors per GPU, by estimated (not measured) time of a step",
        f"  {'s/step':>8}{'MFU':>6}{'GiB':>8}  overrides",
    ]
    for plan in plans:
        e = plan.estimate
        assert e is not None
        lines.append(
            f"  {e.seconds:>8.2f}{100 * e.mfu:>5.0f}%{plan.worst.memory.total / GIB:>8.1f}  "
            f"{describe(plan.config, plan.layout)}"
        )
    return "\n".join(lines) + "\n"
