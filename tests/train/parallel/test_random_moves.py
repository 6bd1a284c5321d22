"""From any layout to any other and back: every tensor of the persistent state is the same, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import parity
import pytest
from random_layouts import Sections, draw
from stoker.conf.checks import check, errors
from stoker.conf.schema import Config

TRIES = 300  # layouts drawn until one fits the model of the first
Drawn = tuple[int, Sections]


def configured(prefix: Path, drawn: Drawn) -> Config:
    world, sections = drawn
    config = parity.configured(prefix, **sections)
    config.cluster = replace(config.cluster, nodes=1, procs_per_node=world)
    return config


def pair(prefix: Path, seed: int) -> tuple[Drawn, Drawn]:
    """Two layouts of one model, on other numbers of ranks or with other axes."""
    random = Random(seed)
    for _ in range(TRIES):
        world, sections = draw(random.randrange(10**6), worlds=(2, 4))
        sections["precision"] = {"params": random.choice(["float32", "bfloat16"])}
        if errors(check(configured(prefix, (world, sections)), files=False)):
            continue
        for _ in range(TRIES):
            other, drawn = draw(random.randrange(10**6), worlds=(1, 2, 4))
            # Everything but the layout is the first one's: also the batch, or it would be another run.
            moved = sections | {"parallel": drawn["parallel"] | _experts(random, sections, other)}
            differs = (other, moved["parallel"]) != (world, sections["parallel"])
            if differs and not errors(check(configured(prefix, (other, moved)), files=False)):
                return (world, sections), (other, moved)
    raise AssertionError(f"no pair for seed {seed}")


def _experts(random: Random, sections: Sections, world: int) -> dict[str, int]:
    if "num_experts" not in sections["model"]:
        return {"expert": 1}
    return {"expert": random.choice([n for n in (1, 2, 4) if world % n == 0])}


# Of the twenty below: pipeline and ZeRO-1 to FSDP, and tensor, expert and hybrid sharding to ZeRO-1.
QUICK = (9, 13)


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in range(20) if n not in QUICK)]
)
def test_state_goes_there_and_back_bit_by_bit(run_ranks: Any, tiny_data: Path, tmp_path: Path, seed: int) -> None:
    there, other = pair(tiny_data, seed)
    for number, drawn in enumerate((there, other, there), 1):
        config = configured(tiny_data, drawn)
        config.train = replace(config.train, steps=4, eval_interval=0)
        parity.leg(run_ranks, config, drawn[0], tmp_path, number, stop=number)
    for number in (2, 3):
        before, after = parity.state(tmp_path, "end", number - 1), parity.state(tmp_path, "begin", number)
        assert {name: before[name].tobytes() == v.tobytes() for name, v in after.items()} == dict.fromkeys(before, True)
