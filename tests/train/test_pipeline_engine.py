"""What a pipeline tells the heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stoker.conf.pipeline import SCHEDULES
from stoker.launcher.run.heartbeat import Segment
from stoker.train.assemble import build_engine
from stoker.train.pipeline_engine import _numbers
from stoker.train.plan.schedule import order_of
from stoker.train.pulse import Pulse


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_a_hang_the_rank_that_all_wait_for_has_the_smallest_number(schedule: str) -> None:
    pipeline, micro_steps = 3, 6
    chunks = SCHEDULES[schedule].chunks
    order = order_of(schedule, pipeline, chunks, micro_steps)
    numbers = _numbers(schedule, pipeline, chunks, micro_steps)
    assert sorted(numbers.values()) == list(range(sum(map(len, order.ranks))))
    for culprit in range(pipeline):
        for hung in order.ranks[culprit]:
            done: set[str] = set()
            at = [0] * pipeline
            while True:  # all others go on for as long as they can
                before = list(at)
                for rank, actions in enumerate(order.ranks):
                    while at[rank] < len(actions) and actions[at[rank]] != hung:
                        if not needed(str(actions[at[rank]]), pipeline * chunks) <= done | {""}:
                            break
                        done.add(str(actions[at[rank]]).replace("I", "B"))
                        at[rank] += 1
                if at == before:
                    break
            stuck = {r: numbers[str(actions[at[r]])] for r, actions in enumerate(order.ranks) if at[r] < len(actions)}
            assert min(stuck, key=lambda r: stuck[r]) == culprit


def needed(action: str, stages: int) -> set[str]:
    """What must be done before it; backward passes of inputs count as whole ones."""
    kind = next(letter for letter in action if letter.isalpha())
    stage, micro = action.split(kind)
    if kind == "F":
        return {f"{int(stage) - 1}F{micro}" if int(stage) > 0 else ""}
    if kind == "W":
        return {f"{stage}B{micro}"}
    return {f"{int(stage) + 1}B{micro}" if int(stage) < stages - 1 else f"{stage}F{micro}"}


def test_a_pipeline_is_refused_with_a_torch_that_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu130"))
    grid: Any = SimpleNamespace(pipeline=SimpleNamespace(size=2))
    nothing: Any = None
    with pytest.raises(
        ValueError, match=r"^parallel\.pipeline=2 needs torch 2\.12 or newer, here is 2\.11\.0\+cu130; "
    ):
        build_engine(nothing, grid, nothing, nothing, nothing, nothing)


def test_a_number_counts_collectives_on_and_each_step_begins_anew() -> None:
    segment = Segment.create("test")
    pulse = Pulse(segment, 1)

    def sequence() -> int:
        heartbeat = segment.read_heartbeat()
        assert heartbeat is not None
        return heartbeat.sequence

    pulse.boundary(4)
    pulse.reach(1000)
    pulse.collective()
    assert sequence() == 1001
    pulse.reach(1000)  # never back
    assert sequence() == 1001
    pulse.boundary(5)
    assert sequence() == 0
