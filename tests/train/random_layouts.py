"""Configurations at random, for holding what the rules accept against one process.

Owns: what is drawn. Most fit together, some do not: the rules decide (conf/checks.py), the trainer must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Sections = dict[str, dict[str, Any]]

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")
_TWO_STAGES = _SCHEDULES[2:]


def draw(seed: int, worlds: Sequence[int] = (1, 2, 2, 4, 4, 4, 4)) -> tuple[int, Sections]:
    """(number of ranks, sections on top of parity.configured), the same for the same seed."""
    random = Random(seed)
    world = random.choice(worlds)
    parallel, data_ranks = _axes(random, world)
    model = _model(random, parallel, data_ranks)
    batch, micro_steps = random.choice([1, 1, 2, 3]), random.choice([1, 2, 2, 4, 4, 6])
    if parallel["pipeline"] > 1 and random.random() < 0.8:
        micro_steps = parallel["pipeline"] * random.choice([1, 2, 2, 3])
    samples = batch * micro_steps * data_ranks
    train = {
        "micro_batch": batch,
        "global_batch": max(1, samples - _rarely(random, random.randint(0, batch * data_ranks), 0)),
        "eval_batches": random.choice([1, 2, 9]),
    }
    data: dict[str, Any] = {"seq_len": random.choice([8, 16, 24, 40])}
    if random.random() < 0.5:
        data |= {"mask_documents": True, "reset_positions": random.random() < 0.5}
    if model.get("positions") == "learned":
        model["max_positions"] = data["seq_len"] + random.choice([0, 3])
    sections: Sections = {
        "train": train,
        "model": model,
        "data": data,
        "parallel": parallel,
        "memory": _memory(random),
        "optim": _optim(random),
        "precision": {"params": _precision(random)},
    }
    if sections["precision"]["params"] == "bfloat16":
        sections["precision"]["stochastic_rounding"] = random.random() < 0.5
    if parallel["pipeline"] > 1 and random.random() < 0.3:
        parallel["pipeline_layers"] = _layers(random, parallel, model["num_layers"])
    return world, sections


def _rarely(random: Random, value: T, else_: T, chance: float = 0.15) -> T:
    return value if random.random() < chance else else_


def _axes(random: Random, world: int) -> tuple[dict[str, Any], int]:
    """`parallel`, and the data-parallel ranks."""
    sizes = {"tensor": 1, "context": 1, "pipeline": 1, "data": 1}
    left = world
    while left > 1:
        sizes[random.choice(list(sizes))] *= 2 if left % 2 == 0 else left
        left //= 2 if left % 2 == 0 else left
    data = sizes.pop("data")
    parallel: dict[str, Any] = {**sizes, "data": random.choice(["ddp", "zero1", "zero1", "fsdp", "fsdp", "hsdp"])}
    if parallel["data"] == "hsdp":
        shares = data * sizes["context"]
        parallel["data_shard"] = random.choice([n for n in range(1, shares + 1) if shares % n == 0])
    parallel["sequence"] = random.random() < 0.75
    parallel["context_method"] = random.choice(["ring", "ulysses"])
    parallel["reduce_each"] = parallel["data"] in ("fsdp", "hsdp") and random.random() < 0.4
    parallel["bucket_mb"] = random.choice([0.001, 0.01, 1.0])
    if sizes["pipeline"] > 1:
        schedule = random.choice(_SCHEDULES)
        parallel["pipeline_schedule"] = schedule
        parallel["pipeline_chunks"] = random.choice([0, 1, 2, 3]) if schedule.startswith("interleaved") else 0
        parallel["reduce_each"] &= schedule in ("gpipe", "1f1b") or random.random() < 0.2
    return parallel, data


def _model(random: Random, parallel: dict[str, Any], data_ranks: int) -> dict[str, Any]:
    heads = random.choice([2, 4, 4, 4, 6, 8])
    groups = random.choice([n for n in range(1, heads + 1) if heads % n == 0])
    stages = parallel["pipeline"] * (
        parallel.get("pipeline_chunks") or (2 if parallel.get("pipeline_schedule") in _TWO_STAGES else 1)
    )
    model: dict[str, Any] = {
        "vocab_size": random.choice([64, 65, 67, 80]),
        "hidden_size": random.choice([8, 24, 30, 32]),
        "num_layers": max(1, stages + random.choice([0, 0, 1, 2]) - _rarely(random, 1, 0, 0.05)),
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": random.choice([2, 4, 6, 8]),
        "ffn_size": random.choice([5, 9, 32, 50]),
        "tied_embeddings": random.random() < 0.5,
        "dropout": random.choice([0.0, 0.0, 0.2]),
        "z_loss": random.choice([0.0, 1e-2]),
        "activation": random.choice(["swiglu", "swiglu", "geglu", "gelu"]),
        "norm": random.choice(["rmsnorm", "rmsnorm", "layernorm"]),
        "norm_order": random.choice(["pre", "pre", "post", "both"]),
        "qk_norm": random.choice(["none", "head", "full"]),
        "qkv_bias": random.random() < 0.3,
        "linear_bias": random.random() < 0.3,
        "positions": random.choice(["rope", "rope", "rope", "learned"]),
        "attention_softcap": random.choice([0.0, 0.0, 2.0]),
        "logit_softcap": random.choice([0.0, 0.0, 3.0]),
        "embedding_scale": random.choice([1.0, 5.0]),
    }
    if model["norm"] == "rmsnorm":
        model["norm_offset"] = random.choice([0.0, 1.0])
    if random.random() < 0.4:
        model |= {"sliding_window": random.choice([2, 3, 7]), "global_every": random.choice([0, 2])}
        if random.random() < 0.5:
            model["rope_theta_local"] = 100.0
    if model["positions"] == "rope" and random.random() < 0.4:
        model |= {
            "rope_scaling": random.choice(["linear", "llama3", "yarn"]),
            "rope_factor": 4.0,
            "rope_original_length": 16,
        }
    if random.random() < 0.4:
        model |= _experts(random, model)
        stage = data_ranks * parallel["tensor"] * parallel["context"]
        fit = [n for n in (1, 2, 4, 8) if stage % n == 0 and model["num_experts"] % n == 0]
        parallel["expert"] = _rarely(random, 2, random.choice(fit), 0.05)
        parallel["sequence"] = parallel["sequence"] or random.random() < 0.8
    return model


def _experts(random: Random, model: dict[str, Any]) -> dict[str, Any]:
    count = random.choice([2, 4, 4, 8])
    return {
        "linear_bias": False,
        "num_experts": count,
        "experts_per_token": random.randint(1, min(3, count)),
        "expert_ffn_size": random.choice([0, 3, 16]),
        "shared_expert_ffn_size": random.choice([0, 0, 7]),
        "dense_layers": random.choice([0, 0, 1]) if model["num_layers"] > 1 else 0,
        "router": random.choice(["softmax", "sigmoid"]),
        "router_normalize": random.random() < 0.5,
        "router_scale": random.choice([1.0, 2.5]),
        "balance": random.choice(["none", "loss", "bias"]),
        "router_z_loss": random.choice([0.0, 1e-2]),
    }


def _memory(random: Random) -> dict[str, Any]:
    recompute = random.choice(["none", "none", "full", "selective"])
    return {
        "recompute": recompute,
        "recompute_every": 1 if recompute == "none" else random.choice([1, 2]),
        "offload_optimizer": random.random() < 0.1,
    }


def _optim(random: Random) -> dict[str, Any]:
    return {
        "kind": random.choice(["adamw", "adamw", "muon"]),
        "clip_norm": random.choice([0.0, 0.5, 1.0]),
        "decay_embeddings": random.random() < 0.5,
        "lr_factors": random.choice([{}, {"embedding": 0.5, "router": 0.0}]),
    }


def _precision(random: Random) -> str:
    return random.choice(["float64"] * 8 + ["float32", "bfloat16"])


def _layers(random: Random, parallel: dict[str, Any], layers: int) -> str:
    stages = parallel["pipeline"] * (
        parallel["pipeline_chunks"] or (2 if parallel["pipeline_schedule"] in _TWO_STAGES else 1)
    )
    if layers < stages:
        return ",".join(["1"] * stages)
    ends = sorted(random.sample(range(1, layers), stages - 1))
    return ",".join(str(b - a) for a, b in zip([0, *ends], [*ends, layers], strict=True))
