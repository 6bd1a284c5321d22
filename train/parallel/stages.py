"""Which layers make up a pipeline stage, and which stages a rank holds: plain arithmetic, the same on every rank.

Owns: the cut of the layers into contiguous stages (as written in parallel.pipeline_layers, or balanced by cost) and the
placement of stages. Does not own: what a stage computes (model/), when (plan/schedule.py, pipeline.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from ...conf.pipeline import SCHEDULES, stages_per_rank
from ...conf.schema import Activation, Config, ModelConfig, ParallelConfig


@dataclass(frozen=True)
class StageSpec:
    """One stage. The first one begins with the embedding, the last one ends with norm, head and loss."""

    index: int
    layers: tuple[int, ...]  # global numbers, in order
    is_first: bool
    is_last: bool


def whole(num_layers: int) -> StageSpec:
    """All of the model in one stage."""
    return StageSpec(0, tuple(range(num_layers)), True, True)


def rank_of_stage(index: int, pipeline: int, is_v: bool) -> int:
    """The rank on axis `pipeline` that holds a stage: around the ranks, or forth and back."""
    turn, place = divmod(index, pipeline)
    return pipeline - 1 - place if is_v and turn % 2 else place


def stages_of_rank(rank: int, parallel: ParallelConfig) -> list[int]:
    """The stages that a rank of axis `pipeline` holds, in order."""
    if parallel.pipeline == 1:
        return [0]
    is_v = SCHEDULES[parallel.pipeline_schedule].is_v
    count = parallel.pipeline * stages_per_rank(parallel)
    return [i for i in range(count) if rank_of_stage(i, parallel.pipeline, is_v) == rank]


def are_ends_apart(parallel: ParallelConfig) -> bool:
    """Whether the first and the last stage lie on different ranks."""
    return parallel.pipeline > 1 and not SCHEDULES[parallel.pipeline_schedule].is_v


def stage_specs(config: Config) -> list[StageSpec]:
    """All stages of a run, in order. Expects what conf/checks_parallel.py lets through."""
    count = config.parallel.pipeline * stages_per_rank(config.parallel)
    slices = _written(config.parallel) or balance(*layer_costs(config), count)
    assert len(slices) == count, f"{len(slices)} slices for {count} stages"
    return [StageSpec(i, tuple(s), i == 0, i == count - 1) for i, s in enumerate(slices)]


def local_specs(config: Config, rank: int) -> list[StageSpec]:
    """Those of one rank of axis `pipeline`."""
    specs = stage_specs(config)
    return [specs[i] for i in stages_of_rank(rank, config.parallel)]


def describe(config: Config) -> str:
    """The pipeline, in a line for people."""
    p = config.parallel
    layers = ", ".join(str(len(spec.layers)) for spec in stage_specs(config))
    return f"pipeline {p.pipeline_schedule} over {p.pipeline} ranks, layers of the stages: {layers}"


def _written(parallel: ParallelConfig) -> list[range] | None:
    if parallel.pipeline == 1 or parallel.pipeline_layers is None:
        return None
    ends = list(accumulate(int(n) for n in parallel.pipeline_layers.split(",")))
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


# What moving one element of an activation costs, in multiply-adds: on GPUs of the last years a matrix unit does some
# hundred of them in the time in which memory delivers a number.
_ELEMENT = 128


def layer_costs(config: Config) -> tuple[list[int], int, int]:
    """Cost of a token's forward pass in (each layer, embedding, head and loss), in multiply-adds."""
    model = config.model
    head = model.vocab_size * (model.hidden_size + _ELEMENT)
    layers = [_layer_cost(model, config.data.seq_len, i) for i in range(model.num_layers)]
    return layers, model.hidden_size * _ELEMENT, head


def _layer_cost(model: ModelConfig, seq_len: int, layer: int) -> int:
    width = model.head_dim or model.hidden_size // model.num_heads
    is_global = model.sliding_window == 0 or (model.global_every > 0 and (layer + 1) % model.global_every == 0)
    keys = seq_len if is_global else min(seq_len, model.sliding_window)
    attention = 2 * model.hidden_size * width * (model.num_heads + model.num_kv_heads)
    attention += 2 * model.num_heads * width * keys
    features, scores = model.ffn_size, 0
    if model.num_experts and layer >= model.dense_layers:
        features = model.experts_per_token * (model.expert_ffn_size or model.ffn_size) + model.shared_expert_ffn_size
        scores = model.num_experts * model.hidden_size
    matrices = 2 if model.activation is Activation.gelu else 3
    return attention + scores + matrices * model.hidden_size * features


def balance(layers: Sequence[int], first: int, last: int, stages: int) -> list[range]:
    """Cut layers into `stages` contiguous slices, none of them empty, so that the dearest stage is as cheap as can be,
    and among those cuts the sum of the squares of the costs is least. Exact; of equal cuts the one with the earliest
    ends. first, last: what the first and the last stage carry on top.

    Raises:
        ValueError: fewer layers than stages.
    """
    count = len(layers)
    if count < stages:
        raise ValueError(f"{count} layers cannot fill {stages} pipeline stages: each needs one at least")
    sums = [0, *accumulate(layers)]

    def cost(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    def table(limit: float, power: int) -> list[list[float]]:
        """best[stage][begin]: the least of stages `stage`.. on layers `begin`..: the largest (power 1) or the sum of
        squares (power 2), no stage dearer than `limit`."""
        best = [[inf] * (count + 1) for _ in range(stages + 1)]
        best[stages][count] = 0
        for stage in reversed(range(stages)):
            for begin in range(stage, count):
                for end in range(begin + 1, count + 1):
                    here = cost(stage, begin, end)
                    if here > limit:
                        break
                    rest = best[stage + 1][end]
                    whole = max(here, rest) if power == 1 else here * here + rest
                    best[stage][begin] = min(best[stage][begin], whole)
        return best

    dearest = table(inf, 1)[0][0]
    best = table(dearest, 2)
    slices, begin = [], 0
    for stage in range(stages):
        end = next(
            e
            for e in range(begin + 1, count + 1)
            if cost(stage, begin, e) <= dearest
            and cost(stage, begin, e) ** 2 + best[stage + 1][e] == best[stage][begin]
        )
        slices.append(range(begin, end))
        begin = end
    return slices
