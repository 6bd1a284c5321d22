"""Rules for the layout of the processes: a golden line for every rule, and silence for what fits."""

from __future__ import annotations

from typing import Any

import pytest
from stoker.conf.checks import check
from stoker.conf.fields import build, lookup
from stoker.conf.problems import Problem
from stoker.conf.schema import Config, DataSource


def lines(fields: dict[str, Any]) -> list[str]:
    """Problems of a model with 8 heads on one node, where nothing else is wrong."""
    config = Config()
    config.data.sources = [DataSource("/data/a")]
    config.model.num_kv_heads, config.cluster.cpus_per_task = 4, 8
    for field, value in fields.items():
        *path, name = field.split(".")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        found: list[Problem] = []
        setattr(owner, name, build(lookup(field.split(".")), value, (field,), found, complete=False))
        assert found == []
    return [f"{p.severity[0]} {p}" for p in check(config, files=False)]


RULES: list[tuple[dict[str, Any], list[str]]] = [
    ({"parallel.tensor": 0}, ["e parallel.tensor=0: expected a positive number"]),
    ({"parallel.data_shard": -1}, ["e parallel.data_shard=-1: expected 0 or a positive number"]),
    ({"parallel.tensor": 2}, [
        "e parallel.tensor=2: pipeline x context x tensor = 1 x 1 x 2 = 2 does not divide the number of processes, 1; "
        "change one of them",
    ]),
    ({"parallel.expert": 3, "cluster.procs_per_node": 8, "model.num_experts": 3}, [
        "e parallel.expert=3: does not divide data x context x tensor = 8 x 1 x 1 = 8; nearest that work: 2 or 4",
    ]),
    ({"parallel.data": "hsdp", "parallel.data_shard": 5, "cluster.procs_per_node": 8}, [
        "e parallel.data_shard=5: does not divide data x context = 8 x 1 = 8; nearest that work: 4 or 8",
    ]),
    # The batch is cut over the data axis, not over all processes
    ({"train.global_batch": 4, "parallel.tensor": 4, "cluster.procs_per_node": 4}, []),
    ({"train.global_batch": 6, "parallel.tensor": 2, "cluster.procs_per_node": 4}, [
        "e train.global_batch=6: not a multiple of train.micro_batch=4 x 2 data-parallel ranks = 8; nearest that work: "
        "train.global_batch=8, or train.micro_batch=3",
    ]),
    # Sharded weights
    ({"parallel.data": "fsdp", "parallel.reduce_each": True}, []),
    ({"parallel.data": "zero1", "parallel.data_shard": 2}, [
        "e parallel.data_shard=2: is for parallel.data=hsdp; data is zero1",
    ]),
    ({"parallel.data": "zero1", "parallel.reduce_each": True}, [
        "e parallel.reduce_each=true: is for parallel.data=fsdp and hsdp, which shard gradients; data is zero1",
    ]),
    ({"parallel.data": "fsdp", "parallel.reduce_each": True, "parallel.pipeline": 2, "cluster.procs_per_node": 2,
      "train.micro_batch": 1}, []),
    ({"parallel.data": "fsdp", "parallel.reduce_each": True, "parallel.pipeline": 2, "cluster.procs_per_node": 2,
      "train.micro_batch": 1, "parallel.pipeline_schedule": "zbv"}, [
        "e parallel.reduce_each=true: a rank's gradients are complete micro-batch by micro-batch only with one stage "
        "per rank and a backward pass that is not split; set it to false, or take 1f1b or gpipe instead of zbv",
    ]),
    ({"parallel.data": "fsdp", "parallel.pipeline": 2, "parallel.pipeline_schedule": "zbv", "train.micro_batch": 1,
      "model.tied_embeddings": True, "cluster.procs_per_node": 2}, []),
    ({"parallel.data": "fsdp", "parallel.pipeline": 2, "parallel.pipeline_schedule": "zbv", "train.micro_batch": 1,
      "model.tied_embeddings": True, "cluster.procs_per_node": 4}, [
        "e parallel.data=fsdp: parallel.pipeline_schedule=zbv has the first and the last stage on one rank, and with "
        "model.tied_embeddings they share a weight, which sharded ones cannot; zero1, ddp or interleaved_zb can",
    ]),
    # Heads
    ({"parallel.tensor": 8, "cluster.procs_per_node": 8}, []),
    ({"parallel.tensor": 3, "cluster.procs_per_node": 3, "parallel.sequence": False}, [
        "e parallel.tensor=3: does not divide model.num_heads=8; nearest that work: 2 or 4",
    ]),
    ({"model.num_heads": 12, "model.num_kv_heads": 6, "model.head_dim": 32, "parallel.tensor": 4,
      "cluster.procs_per_node": 4}, [
        "e parallel.tensor=4: neither divides model.num_kv_heads=6 nor is a multiple of it; nearest that work: 3 or 6",
    ]),
    # Nodes
    ({"parallel.tensor": 4, "cluster.procs_per_node": 4, "cluster.nodes": 2}, []),
    ({"parallel.tensor": 8, "cluster.procs_per_node": 4, "cluster.nodes": 2}, [
        "w parallel.tensor=8: ranks that share each layer lie on several nodes, as it does not divide "
        "cluster.procs_per_node=4, and wait for the network in every layer; choose a divisor, and parallel.pipeline or "
        "parallel.data=fsdp for the rest",
    ]),
    # Parts of a row
    ({"parallel.context": 4, "cluster.procs_per_node": 4}, []),
    ({"parallel.context": 3, "cluster.procs_per_node": 3}, [
        "e data.seq_len=256: parallel.context=3 cuts it into 6 parts, which do not divide it; nearest that work: "
        "252 or 258",
    ]),
    ({"parallel.context": 3, "parallel.context_method": "ulysses", "cluster.procs_per_node": 3, "data.seq_len": 255}, [
        "e parallel.context=3: ulysses cuts heads over ranks, and it does not divide model.num_heads=8; "
        "context_method=ring has no such limit",
    ]),
    ({"parallel.context": 3, "parallel.context_method": "ulysses", "parallel.tensor": 2, "data.seq_len": 255,
      "cluster.procs_per_node": 6}, [
        "e parallel.context=3: ulysses cuts heads over ranks, and it does not divide model.num_heads=8 / "
        "parallel.tensor=2 = 4; context_method=ring has no such limit",
    ]),
    # Rows for every rank
    ({"parallel.tensor": 4, "cluster.procs_per_node": 4, "model.ffn_size": 3}, [
        "e model.ffn_size=3: is cut over parallel.tensor=4 ranks; expected at least 4",
    ]),
    ({"parallel.tensor": 4, "cluster.procs_per_node": 4, "model.ffn_size": 683}, []),
    # Tokens
    ({"parallel.tensor": 4, "cluster.procs_per_node": 4, "train.micro_batch": 1, "data.seq_len": 254}, [
        "e parallel.sequence=true: cuts the tokens of a micro-batch over parallel.tensor=4 ranks, which does not "
        "divide train.micro_batch x data.seq_len / parallel.context = 1 x 254 / 1 = 254; change one of them, or set "
        "it to false",
    ]),
    ({"parallel.tensor": 4, "cluster.procs_per_node": 4, "train.micro_batch": 1, "data.seq_len": 254,
      "parallel.sequence": False}, []),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), RULES, ids=lambda value: str(value)[:60])
def test_a_rule_for_the_layout(fields: dict[str, Any], expected: list[str]) -> None:
    assert lines(fields) == expected


def test_a_script_of_the_users_own_has_no_layout() -> None:
    found = lines({"parallel.tensor": 3, "task.cmd": ["python", "x.py"]})
    assert not [line for line in found if "tensor" in line]
