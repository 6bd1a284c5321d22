"""Rules for pipelines: a golden line for every rule, and silence for what fits."""

from __future__ import annotations

from typing import Any

import pytest
from stoker.conf.checks import check
from stoker.conf.schema import Config, DataSource


def lines(global_batch: int = 8, layers: int = 12, **parallel: Any) -> list[str]:
    """Problems of a run on one node with as many processes as stages ranks."""
    config = Config()
    config.data.sources = [DataSource("/data/a")]
    config.model.num_layers = layers
    config.train.micro_batch, config.train.global_batch = 1, global_batch
    for name, value in parallel.items():
        setattr(config.parallel, name, value)
    config.cluster.procs_per_node = max(1, config.parallel.pipeline)
    config.cluster.cpus_per_task = 1
    return [str(p) for p in check(config, files=False) if p.severity == "error"]


def test_schedules_that_fit_are_not_spoken_of() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"):
        assert lines(pipeline=4, pipeline_schedule=schedule) == []
    assert lines(pipeline=4, pipeline_schedule="interleaved", pipeline_chunks=3) == []
    assert lines(pipeline=2, pipeline_layers="5,7") == []
    assert lines(pipeline=2, pipeline_schedule="zbv", pipeline_layers="2,4,4,2") == []


def test_fields_of_a_pipeline_are_not_read_without_one() -> None:
    config = Config()
    config.parallel.pipeline_layers, config.parallel.pipeline_chunks = "nonsense", 7
    assert [(p.severity, str(p)) for p in check(config, files=False) if "pipeline" in p.field] == [
        ("warning", "parallel.pipeline_chunks=7: has no effect with parallel.pipeline=1"),
        ("warning", "parallel.pipeline_layers=nonsense: has no effect with parallel.pipeline=1"),
    ]


def test_a_misspelt_schedule_is_told_beside_sizes_that_do_not_fit() -> None:
    found = lines(pipeline=4, context=3, pipeline_schedule="zvb")
    assert [line.split(":")[0] for line in found] == [
        "parallel.context=3",
        "data.seq_len=256",
        "parallel.pipeline_schedule=zvb",
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"pipeline_schedule": "zb-v"},
            "parallel.pipeline_schedule=zb-v: expected gpipe, 1f1b, interleaved, interleaved_zb, zbv or dualpipev; "
            "nearest: zbv",
        ),
        ({"pipeline_chunks": -1}, "parallel.pipeline_chunks=-1: expected 0 or a positive number"),
        (
            {"pipeline_chunks": 2},
            "parallel.pipeline_chunks=2: 1f1b has 1 per rank; leave it out, or take interleaved",
        ),
        (
            {"pipeline_schedule": "zbv", "pipeline_chunks": 3},
            "parallel.pipeline_chunks=3: zbv has 2 per rank; leave it out, or take interleaved",
        ),
        (
            {"layers": 7, "pipeline_schedule": "zbv"},
            "model.num_layers=7: cannot fill parallel.pipeline=4 x 2 per rank = 8 stages; expected at least a layer "
            "for each",
        ),
        (
            {"pipeline_layers": "3;3;3;3"},
            "parallel.pipeline_layers=3;3;3;3: expected the number of layers of each stage in order, e.g. 7,8,8,7",
        ),
        (
            {"pipeline_layers": "6,6"},
            "parallel.pipeline_layers=6,6: names 2 stages; expected 4, parallel.pipeline x stages per rank",
        ),
        (
            {"pipeline_layers": "6,0,3,3"},
            "parallel.pipeline_layers=6,0,3,3: expected at least one layer in each stage",
        ),
        (
            {"pipeline_layers": "3,3,3,2"},
            "parallel.pipeline_layers=3,3,3,2: has 11 layers in all; expected model.num_layers=12",
        ),
        (
            {"global_batch": 3},
            "parallel.pipeline_schedule=1f1b: a step has train.global_batch / data-parallel ranks / train.micro_batch "
            "= 3 / 1 / 1 = 3 micro-batches per rank, and 1f1b needs at least 4, one for each stage; change one of them",
        ),
        (
            {"global_batch": 7, "pipeline_schedule": "dualpipev"},
            "parallel.pipeline_schedule=dualpipev: a step has train.global_batch / data-parallel ranks / "
            "train.micro_batch = 7 / 1 / 1 = 7 micro-batches per rank, and dualpipev needs at least 8, one for each "
            "stage; change one of them",
        ),
        (
            {"global_batch": 9, "pipeline_schedule": "interleaved"},
            "parallel.pipeline_schedule=interleaved: a step has train.global_batch / data-parallel ranks / "
            "train.micro_batch = 9 / 1 / 1 = 9 micro-batches per rank, and interleaved goes in rounds of 4 or more: "
            "expected a multiple of parallel.pipeline=4; change one of them",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_rule_for_pipelines(fields: dict[str, Any], expected: str) -> None:
    assert lines(**{"pipeline": 4, **fields}) == [expected]
