"""Layers to stages, stages to ranks."""

from __future__ import annotations

import itertools

import pytest
from stoker.conf.schema import Config, ParallelConfig
from stoker.train.parallel.stages import (
    StageSpec,
    balance,
    describe,
    layer_costs,
    local_specs,
    stage_specs,
    stages_of_rank,
)


def sizes(slices: list[range]) -> list[int]:
    assert [i for s in slices for i in s] == list(range(slices[-1].stop))
    return [len(s) for s in slices]


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("1f1b", 0, [[0], [1], [2], [3]]),
        ("interleaved", 3, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
        ("interleaved_zb", 0, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("zbv", 0, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("dualpipev", 0, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_stages_go_around_the_ranks_or_forth_and_back(schedule: str, chunks: int, expected: list[list[int]]) -> None:
    parallel = ParallelConfig(pipeline=4, pipeline_schedule=schedule, pipeline_chunks=chunks)
    assert [stages_of_rank(rank, parallel) for rank in range(4)] == expected


def test_without_a_pipeline_one_stage_is_first_and_last() -> None:
    config = Config()
    config.model.num_layers = 3
    config.parallel.pipeline_schedule = "zbv"
    assert local_specs(config, 0) == [StageSpec(0, (0, 1, 2), True, True)]


def test_layers_as_written() -> None:
    config = Config()
    config.model.num_layers = 10
    config.parallel.pipeline, config.parallel.pipeline_schedule = 2, "zbv"
    config.parallel.pipeline_layers = "2,3,4,1"
    assert stage_specs(config) == [
        StageSpec(0, (0, 1), True, False),
        StageSpec(1, (2, 3, 4), False, False),
        StageSpec(2, (5, 6, 7, 8), False, False),
        StageSpec(3, (9,), False, True),
    ]
    assert [s.index for s in local_specs(config, 0)] == [0, 3]


def test_head_and_loss_take_layers_from_the_last_stage() -> None:
    config = Config()
    config.model.num_layers, config.model.vocab_size = 16, 128_256
    config.model.hidden_size, config.model.ffn_size = 2048, 8192
    config.model.num_heads, config.model.num_kv_heads = 32, 8
    config.parallel.pipeline = 4
    assert [len(s.layers) for s in stage_specs(config)] == [5, 5, 5, 1]


def test_equal_layers_are_spread_evenly_where_they_divide_and_earliest_short_where_not() -> None:
    assert sizes(balance([5] * 12, 0, 0, 4)) == [3, 3, 3, 3]
    assert sizes(balance([5] * 10, 0, 0, 4)) == [2, 2, 3, 3]
    assert sizes(balance([5] * 10, 5, 5, 4)) == [2, 3, 3, 2]


def test_a_cut_is_the_best_of_all() -> None:
    layers = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    costs = {}
    for ends in itertools.combinations(range(1, 10), 3):
        cuts = [range(a, b) for a, b in zip((0, *ends), (*ends, 10), strict=True)]
        cost = [sum(layers[i] for i in cut) for cut in cuts]
        cost[0] += 2
        cost[-1] += 7
        costs[tuple(map(len, cuts))] = (max(cost), sum(c * c for c in cost))
    found = tuple(sizes(balance(layers, 2, 7, 4)))
    assert costs[found] == min(costs.values())
    assert max(costs[found]) > 0


def test_fewer_layers_than_stages() -> None:
    assert sizes(balance([1] * 4, 0, 9, 4)) == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="3 layers cannot fill 4 pipeline stages"):
        balance([1] * 3, 0, 0, 4)


def test_a_line_for_people() -> None:
    config = Config()
    config.model.num_layers, config.parallel.pipeline, config.parallel.pipeline_layers = 8, 2, "6,2"
    assert describe(config) == "pipeline 1f1b over 2 ranks, layers of the stages: 6, 2"


def test_costs_see_windows_experts_and_gates() -> None:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 3, 8, 2
    config.model.num_kv_heads, config.model.ffn_size, config.data.seq_len = 1, 10, 100
    attention, scores = 2 * 8 * 4 * 3, 2 * 2 * 4
    assert layer_costs(config)[0] == [attention + scores * 100 + 3 * 8 * 10] * 3
    config.model.sliding_window, config.model.global_every = 7, 2
    config.model.num_experts, config.model.experts_per_token, config.model.expert_ffn_size = 16, 2, 5
    config.model.shared_expert_ffn_size, config.model.dense_layers = 4, 1
    assert layer_costs(config)[0] == [
        attention + scores * 7 + 3 * 8 * 10,
        attention + scores * 100 + 16 * 8 + 3 * 8 * 14,
        attention + scores * 7 + 16 * 8 + 3 * 8 * 14,
    ]
