"""Sizes, places and groups of a layout, as tables."""

from __future__ import annotations

import itertools

import pytest
from stoker.conf.layout import Layout, LayoutError
from stoker.conf.schema import Config, DataParallel

AXES = tuple(Layout().sizes)
EXAMPLES = [
    Layout(data=2, tensor=2, pipeline=2, expert=4, data_shard=2),
    Layout(data=2, tensor=4, pipeline=3, context=2, expert=2, data_shard=2, kv_replicas=2),
    Layout(data=4, context=2, expert=8, data_shard=8),
]


def test_groups_of_a_layout_with_every_axis() -> None:
    layout = Layout(data=2, context=2, tensor=2, pipeline=2, expert=4, data_shard=2)
    found = {axis: layout.group(axis, 13) for axis in AXES}
    assert found == {
        "tensor": [12, 13],
        "context": [13, 15],
        "data": [9, 13],
        "pipeline": [5, 13],
        "dense": [9, 11, 13, 15],
        "stage": [8, 9, 10, 11, 12, 13, 14, 15],
        "expert": [12, 13, 14, 15],
        "expert_data": [9, 13],
        "shard": [13, 15],
        "replicate": [9, 13],
        "kv": [13],
        "tied": [5, 13],
        "world": list(range(16)),
    }


def test_key_value_heads_are_shared_by_neighbours_on_the_tensor_axis() -> None:
    layout = Layout(tensor=4, data=2, data_shard=2, kv_replicas=2)
    assert [layout.group("kv", rank) for rank in (0, 3, 4, 6)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_only_first_and_last_stage_tie_their_embeddings() -> None:
    layout = Layout(pipeline=3, tensor=2)
    assert [layout.group("tied", rank) for rank in range(6)] == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]


@pytest.mark.parametrize("layout", EXAMPLES)
@pytest.mark.parametrize("axis", AXES)
def test_groups_partition_the_ranks(layout: Layout, axis: str) -> None:
    groups = {tuple(layout.group(axis, rank)) for rank in range(layout.world)}
    assert sorted(itertools.chain(*groups)) == list(range(layout.world))
    assert all(rank in layout.group(axis, rank) for rank in range(layout.world))
    if axis != "tied":
        assert {len(group) for group in groups} == {layout.sizes[axis]}


@pytest.mark.parametrize("layout", [*EXAMPLES, Layout(pipeline=2, data=2, data_shard=2)])
def test_axes_that_coincide_for_rank_0_coincide_for_all(layout: Layout) -> None:
    for a, b in itertools.combinations(AXES, 2):
        everywhere = all(layout.group(a, rank) == layout.group(b, rank) for rank in range(layout.world))
        assert everywhere == (layout.group(a, 0) == layout.group(b, 0)), (a, b)


def configured(**parallel: object) -> Config:
    config = Config()
    for name, value in parallel.items():
        setattr(config.parallel, name, value)
    return config


def test_the_data_axis_is_what_the_others_leave() -> None:
    layout = Layout.of(configured(tensor=2, pipeline=2, context=2), 16)
    assert (layout.data, layout.dense, layout.stage, layout.world) == (2, 4, 8, 16)


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        ({"tensor": 3}, 8, "= 3 does not divide the number of processes, 8"),
        ({"expert": 3}, 8, "parallel.expert=3: does not divide data x context x tensor = 8 x 1 x 1 = 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(parallel: dict[str, object], world: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.of(configured(**parallel), world)


@pytest.mark.parametrize(
    ("procs_per_node", "pipeline", "tensor", "shard"),
    [(8, 1, 1, 8), (8, 4, 1, 4), (8, 1, 2, 4), (6, 4, 1, 3), (4, 1, 8, 1)],
)
def test_hsdp_shards_within_a_node_if_nothing_else_is_said(
    procs_per_node: int, pipeline: int, tensor: int, shard: int
) -> None:
    """On two nodes; a node may hold several stages, or ranks of one and a half."""
    config = Config()
    config.parallel.data, config.parallel.pipeline, config.parallel.tensor = DataParallel.hsdp, pipeline, tensor
    config.cluster.nodes, config.cluster.procs_per_node = 2, procs_per_node
    assert Layout.of(config, 2 * procs_per_node).data_shard == shard
