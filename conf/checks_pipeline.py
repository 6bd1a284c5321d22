"""Rules for pipelines: whether schedule, stages, layers and the number of micro-batches fit together.

Owns: `pipeline_rules`, called by checks_parallel.py. What the schedules ask for is
pipeline.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .layout import Layout
from .pipeline import SCHEDULES, micro_steps_problem, stages_per_rank
from .problems import Problem, nearest
from .schema import Config, ParallelConfig

_LAYERS = re.compile(r"\d+(,\d+)*")


def pipeline_rules(config: Config, layout: Layout | None) -> Iterator[Problem]:
    """layout: that of the whole allocation; None where its sizes do not fit, which is told elsewhere."""
    p = config.parallel
    if p.pipeline_schedule not in SCHEDULES:
        near = nearest(p.pipeline_schedule, SCHEDULES)
        hint = f"; nearest: {near}" if near else ""
        yield Problem("parallel.pipeline_schedule", p.pipeline_schedule, f"expected {_any_of(SCHEDULES)}{hint}")
        return
    if p.pipeline == 1:
        yield from _unread(p)
        return
    if p.pipeline_chunks < 0:
        return  # told by the rule for ranges
    facts = SCHEDULES[p.pipeline_schedule]
    chunks = stages_per_rank(p)
    if facts.most_chunks is not None and not facts.least_chunks <= chunks <= facts.most_chunks:
        expected = f"{p.pipeline_schedule} has {facts.chunks} per rank; leave it out, or take interleaved"
        yield Problem("parallel.pipeline_chunks", str(chunks), expected)
        return
    yield from _layers(config, p.pipeline * chunks)
    if layout is not None:
        yield from _micro_steps(config, layout, chunks)


def _unread(parallel: ParallelConfig) -> Iterator[Problem]:
    for name, nothing in (("pipeline_chunks", 0), ("pipeline_layers", None), ("pipeline_schedule", "1f1b")):
        value = getattr(parallel, name)
        if value != nothing:
            message = "has no effect with parallel.pipeline=1"
            yield Problem(f"parallel.{name}", str(value), message, "warning")


def _layers(config: Config, stages: int) -> Iterator[Problem]:
    p, layers = config.parallel, config.model.num_layers
    if layers < stages:
        of = f"parallel.pipeline={p.pipeline} x {stages // p.pipeline} per rank = {stages} stages"
        yield Problem("model.num_layers", str(layers), f"cannot fill {of}; expected at least a layer for each")
    if p.pipeline_layers is None:
        return
    field, text = "parallel.pipeline_layers", p.pipeline_layers
    if not _LAYERS.fullmatch(text):
        yield Problem(field, text, "expected the number of layers of each stage in order, e.g. 7,8,8,7")
        return
    numbers = [int(n) for n in text.split(",")]
    if len(numbers) != stages:
        yield Problem(
            field, text, f"names {len(numbers)} stages; expected {stages}, parallel.pipeline x stages per rank"
        )
    elif min(numbers) < 1:
        yield Problem(field, text, "expected at least one layer in each stage")
    elif sum(numbers) != layers:
        yield Problem(field, text, f"has {sum(numbers)} layers in all; expected model.num_layers={layers}")


def _micro_steps(config: Config, layout: Layout, chunks: int) -> Iterator[Problem]:
    p, train = config.parallel, config.train
    if min(train.micro_batch, train.global_batch) < 1:
        return
    per_rank = -(-train.global_batch // layout.data)
    steps = -(-per_rank // train.micro_batch)
    problem = micro_steps_problem(p.pipeline_schedule, p.pipeline, chunks, steps)
    if problem is not None:
        of = f"train.global_batch / data-parallel ranks / train.micro_batch = {train.global_batch} / {layout.data} / "
        yield Problem(
            "parallel.pipeline_schedule",
            p.pipeline_schedule,
            f"a step has {of}{train.micro_batch} = {steps} micro-batches per rank, and {problem}; change one of them",
        )


def _any_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
