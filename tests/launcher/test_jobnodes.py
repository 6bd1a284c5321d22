"""Nodes as sinfo prints them: which of them a job could get."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from stoker.launcher import jobnodes

# sinfo --noheader --Node --format="%N %t %P %f %G"
SINFO = """\
a1 idle main* h100,ib gpu:h100:8(S:0-1)
a1 idle long h100,ib gpu:h100:8(S:0-1)
a2 mix main* h100,ib gpu:h100:8(S:0-1),shard:16
a3 drain main* h100,ib gpu:h100:8
a4 alloc main* h100 gpu:H100:4
b1 idle main* (null) gpu:8
b2 down* main* a100 gpu:a100:2,gpu:mig:7
b3 idle main* a100,ib gpu:a100:2(S:0),gpu:mig:7(S:1)
c1 idle main* (null) (null)
"""
PLAIN: dict[str, Any] = {"partition": None, "constraint": None, "gpus_per_node": 0, "gpu_type": None}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    asked = []

    def command(words: list[str]) -> Any:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, SINFO, "")

    monkeypatch.setattr(jobnodes, "command", command)
    return asked


@pytest.mark.parametrize(
    ("wanted", "usable"),
    [
        ({}, 6),
        ({"constraint": "h100"}, 3),
        ({"constraint": "h100&ib"}, 2),
        ({"constraint": "h100,ib"}, 2),
        ({"constraint": "h100|a100"}, 4),
        ({"gpus_per_node": 8}, 4),  # a1, a2, b1, and b3 has nine
        ({"gpus_per_node": 8, "gpu_type": "h100"}, 2),
        ({"gpus_per_node": 4, "gpu_type": "h100"}, 3),
        ({"gpus_per_node": 2, "gpu_type": "a100", "constraint": "ib"}, 1),
        # What only Slurm can tell.
        ({"constraint": "[a100*2&h100]"}, None),
        ({"constraint": "h100&(ib|a100)"}, None),
        ({"constraint": "h100&ib|a100"}, None),
        ({"reservation": "mine"}, None),
        ({"gres": "ssd"}, None),
    ],
)
def test_only_nodes_that_the_job_could_get_are_counted(
    wanted: dict[str, Any], usable: int | None, asked: list[list[str]]
) -> None:
    assert jobnodes.usable_nodes(PLAIN | wanted) == usable


def test_a_named_partition_is_asked_for(asked: list[list[str]]) -> None:
    jobnodes.usable_nodes(PLAIN | {"partition": "long"})
    assert asked[0][3] == "--partition=long"


def test_what_is_down_among_nodes(asked: list[list[str]]) -> None:
    assert jobnodes.down_among("a[1-4],b[1-3],c1") == ("b2",)


@pytest.mark.parametrize(
    ("gres", "kind", "count"),
    [
        ("gpu:(null):8(IDX:N/A)", None, 8),  # a node whose GPUs have no type
        ("gpu:(null):8", "h100", 0),
        ("gpu:no_consume:4", None, 4),
        ("gpu", None, 1),
        ("gpu:8(IDX:0-3,5,7),nvme:1", None, 8),
        ("gpu:H100:4,gpu:h100:2", "h100", 6),
        ("shard:16", None, 0),
        ("gpu:h100:x", None, 0),
    ],
)
def test_gpus_of_a_node_in_each_of_slurm_s_forms(gres: str, kind: str | None, count: int) -> None:
    assert jobnodes.gpus_of(jobnodes.Node("n1", "idle", "main*", gres=gres), kind) == count
