"""From a configuration to a plan: which ranks are looked at, checkpoint size, and layouts that fit.

Owns: these choices. Does not own: what a rank holds (dry_run.py), times (estimate.py), words (report.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

from ...conf.checks import check, errors
from ...conf.layout import Layout, LayoutError
from ...conf.pipeline import SCHEDULES, stages_per_rank
from ...conf.problems import Problem
from ...conf.schema import Config, ContextMethod, OptimizerKind, ParamDtype
from ...conf.schema import DataParallel as DataKind
from ...conf.schema import Recompute as RecomputeKind
from ..parallel.stages import are_ends_apart, local_specs
from ..params import Role, decoder_table
from .account import DryRun, DryRunError, extended
from .dry_run import dry_run, micro_steps_of
from .estimate import Assumptions, estimate
from .report import GIB, Plan

# Of a configuration that is planned: not where data lies, nor what a cluster is called.
_SECTIONS = ("train", "model", "data", "parallel", "memory", "optim", "precision", "kernels")


def problems_of(config: Config) -> list[Problem]:
    """Errors that a run would be refused for, as far as they matter to a plan."""
    return [
        p
        for p in errors(check(config, files=False))
        if p.field.partition(".")[0] in _SECTIONS and not p.field.startswith(("data.sources", "data.tokenizer"))
    ]


def plan_of(config: Config, procs_per_node: int, assume: Assumptions, only: int | None = None) -> Plan:
    """only: this rank alone; None: one of each pipeline rank, the first of its stage, which has the largest parts.

    Raises:
        DryRunError: a rank's work failed.
    """
    layout = Layout.of(config, config.cluster.nodes * config.cluster.procs_per_node)
    ranks = [s * layout.stage for s in range(layout.pipeline)] if only is None else [only]
    return _plan(config, procs_per_node, assume, [dry_run(config, layout, rank) for rank in ranks])


def quick_plan(config: Config, procs_per_node: int, assume: Assumptions) -> Plan:
    """Of rank 0, from stages of one layer and of two: whatever is held and sent grows by the same for each further one.

    Raises:
        DryRunError: its work failed.
    """
    layout = Layout.of(config, config.cluster.nodes * config.cluster.procs_per_node)
    stages = layout.pipeline * stages_per_rank(config.parallel)
    mine = [len(spec.layers) for spec in local_specs(config, 0)]
    if max(mine) <= 2:
        return _plan(config, procs_per_node, assume, [dry_run(config, layout, 0, most=0)])
    runs = []
    for each in (1, 2):
        small = copy.deepcopy(config)
        small.model.num_layers = each * stages
        small.model.dense_layers = 0
        small.parallel.pipeline_layers = ",".join([str(each)] * stages)
        runs.append(dry_run(small, layout, 0, most=0))
    return _plan(config, procs_per_node, assume, [extended(runs[0], runs[1], sum(mine) / len(mine))])


def _plan(config: Config, procs_per_node: int, assume: Assumptions, runs: list[DryRun]) -> Plan:
    layout = Layout.of(config, config.cluster.nodes * config.cluster.procs_per_node)
    table = decoder_table(config.model, False, are_ends_apart(config.parallel))
    fullest = max(runs, key=lambda run: run.memory.total)
    estimated = estimate(config, layout, fullest, procs_per_node, assume)
    return Plan(config, layout, procs_per_node, runs, estimated, assume, table.numel, checkpoint_bytes(config))


def checkpoint_bytes(config: Config) -> int:
    """Of the tensors of a checkpoint: weights, masters and moments, each element once."""
    width = {ParamDtype.float64: 8, ParamDtype.float32: 4, ParamDtype.bfloat16: 2}[config.precision.params]
    wide = max(width, 4)
    has_masters = width < wide and not config.precision.stochastic_rounding
    total = 0
    for facts in decoder_table(config.model, False, are_ends_apart(config.parallel)).owned():
        is_muon = config.optim.kind is OptimizerKind.muon and facts.role in (Role.MATRIX,)
        total += facts.numel * (width + wide * (1 if is_muon else 2) + wide * has_masters)
    return total


# Layouts that fit.

MOST_TRIED = 40  # layouts that are run dry


def layouts(config: Config, procs_per_node: int, assume: Assumptions, limit: float, count: int) -> list[Plan]:
    """The `count` layouts of the configuration's processes that fit `limit` GiB and are quickest by the estimate.

    Cut are what the checks refuse, and what a rough bound of the state shows not to fit; the rest is run dry in the
    order of a rough guess of its time, at most MOST_TRIED.
    """
    world = config.cluster.nodes * config.cluster.procs_per_node
    candidates = sorted(_candidates(config, world, procs_per_node), key=lambda c: _guess(c, world))
    found: list[Plan] = []
    tried = 0
    for candidate in candidates:
        if tried >= MOST_TRIED or len(found) >= 2 * count:
            break
        if _least_state(candidate, Layout.of(candidate, world)) > limit * GIB:
            continue
        tried += 1
        try:
            plan = quick_plan(candidate, procs_per_node, assume)
        except DryRunError:
            continue
        if plan.worst.memory.total <= limit * GIB:
            found.append(plan)
    return sorted(found, key=lambda plan: plan.estimate.seconds if plan.estimate else 0.0)[:count]


def _candidates(config: Config, world: int, procs_per_node: int) -> Iterator[Config]:
    tensors = [t for t in _powers(min(procs_per_node, world)) if config.model.num_heads % t == 0]
    pipelines = _powers(min(world, config.model.num_layers))
    contexts = [c for c in _powers(min(world, 8)) if c == 1 or config.data.seq_len >= 8192]
    experts = _powers(min(world, config.model.num_experts)) if config.model.num_experts else [1]
    recomputes = [RecomputeKind.none, RecomputeKind.selective, RecomputeKind.full]
    for t, p, c, e, r in product(tensors, pipelines, contexts, experts, recomputes):
        if world % (t * p * c):
            continue
        has_data = world // (t * p) > 1
        kinds = [DataKind.ddp, DataKind.zero1, DataKind.fsdp] if has_data else [DataKind.ddp]
        schedules = ["1f1b", "interleaved", "zbv"] if p > 1 else ["1f1b"]
        for kind, schedule in product(kinds, schedules):
            made = copy.deepcopy(config)
            parallel = made.parallel
            parallel.tensor, parallel.pipeline, parallel.context, parallel.expert = t, p, c, e
            parallel.data, parallel.pipeline_schedule = kind, schedule
            parallel.pipeline_chunks, parallel.pipeline_layers = 0, None
            parallel.context_method, parallel.sequence = ContextMethod.ring, True
            made.memory.recompute = r
            if SCHEDULES[schedule].is_split and r is not RecomputeKind.none:
                continue
            if not problems_of(made) and micro_steps_of(made, Layout.of(made, world)) >= 1:
                yield made


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(max(1, most).bit_length())]


def _guess(config: Config, world: int) -> float:
    """A rough order of times: what is computed again, the bubble, what is exchanged per layer, what is filled up."""
    try:
        layout = Layout.of(config, world)
    except LayoutError:
        return float("inf")
    p = config.parallel
    steps = micro_steps_of(config, layout)
    bubble = (layout.pipeline - 1) / steps * {"1f1b": 1.0, "interleaved": 0.5, "zbv": 0.3}[p.pipeline_schedule]
    filled = steps * config.train.micro_batch * layout.data / config.train.global_batch
    again = {RecomputeKind.none: 0.0, RecomputeKind.selective: 0.02, RecomputeKind.full: 0.33}[config.memory.recompute]
    exchange = 0.02 * (layout.tensor - 1) + 0.03 * (layout.context - 1)
    exchange += {DataKind.ddp: 0.03, DataKind.zero1: 0.02, DataKind.fsdp: 0.06, DataKind.hsdp: 0.05}[p.data]
    return filled * (1 + again + exchange) * (1 + bubble)


def _least_state(config: Config, layout: Layout) -> float:
    """Bytes of state per rank, if everything is cut as evenly as can be."""
    numel = decoder_table(config.model, False, are_ends_apart(config.parallel)).numel
    width = 2 if config.precision.params is ParamDtype.bfloat16 else 4
    cut = layout.tensor * layout.pipeline * (layout.expert if config.model.num_experts else 1)
    states = numel / cut * (8 + (4 if width == 2 else 0))
    whole = numel / cut * (width + 4)
    kind = config.parallel.data
    shared = {DataKind.ddp: 1, DataKind.zero1: layout.dense}.get(kind, layout.dense)
    return states / shared + (whole / shared if kind in (DataKind.fsdp, DataKind.hsdp) else whole)
