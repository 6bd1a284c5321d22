"""Schedules as values: order, time, bubble, activations in flight, and their pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.conf.pipeline import SCHEDULES, micro_steps_problem
from stoker.train.plan.schedule import (
    Action,
    Durations,
    InFlight,
    Kind,
    Order,
    Timeline,
    order_of,
    peak_in_flight,
    simulate,
)
from stoker.train.plan.schedule_draw import draw_png, draw_text


def timeline(schedule: str, pipeline: int, micro_steps: int, chunks: int = 0) -> Timeline:
    chunks = chunks or SCHEDULES[schedule].chunks
    return simulate(order_of(schedule, pipeline, chunks, micro_steps), Durations.even(pipeline * chunks))


def held(order: Order) -> list[float]:
    return [peak.cost(lambda _: 1.0, lambda _: 1.0) for peak in peak_in_flight(order)]


def fits(schedule: str, pipeline: int, chunks: int, micro_steps: int) -> bool:
    """Whether torch accepts these numbers, and no rank waits for ever."""
    try:
        order = order_of(schedule, pipeline, chunks, micro_steps)
        done = simulate(order, Durations.even(pipeline * chunks))
    except (ValueError, AssertionError):
        return False
    forwards = {span.action for spans in done.ranks for span in spans if span.action.kind is Kind.FORWARD}
    return len(forwards) == pipeline * chunks * micro_steps


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_refused_at_configuration_is_what_does_not_run(schedule: str) -> None:
    facts = SCHEDULES[schedule]
    for pipeline in (2, 3):
        for chunks in range(facts.least_chunks, (facts.most_chunks or 3) + 1):
            for micro_steps in range(1, 2 * pipeline * chunks + 2):
                refused = micro_steps_problem(schedule, pipeline, chunks, micro_steps)
                if schedule == "1f1b":  # our own list of its actions would go with fewer; torch's class would not
                    assert (refused is None) == (micro_steps >= pipeline)
                else:
                    assert (refused is None) == fits(schedule, pipeline, chunks, micro_steps), (chunks, micro_steps)


def test_the_bubbles_of_the_papers() -> None:
    # (p - 1) / (m + p - 1) for GPipe and 1F1B; interleaving divides p - 1 by the stages of a rank.
    assert timeline("gpipe", 4, 8).bubble == pytest.approx(3 / 11)
    assert timeline("1f1b", 4, 8).bubble == pytest.approx(3 / 11)
    assert timeline("interleaved", 4, 8).bubble == pytest.approx(1.5 / (8 + 1.5))
    # Forward, input and weight of equal length: what is left of ZB-V is the way to the last rank.
    assert timeline("zbv", 4, 8).bubble == pytest.approx(3 / 51)


def test_a_slow_stage_and_slow_links_lengthen_the_step() -> None:
    order = order_of("1f1b", 2, 1, 2)
    assert simulate(order, Durations([1, 2], [1, 2], [1, 2])).length == 15  # 1 + 2 x 6 + 2
    assert simulate(order, Durations([1, 1], [1, 1], [1, 1])).length == 9
    assert simulate(order, Durations([1, 1], [1, 1], [1, 1], transfer=0.5)).length == 10
    assert simulate(order, Durations([1, 2], [1, 2], [1, 2])).busy == [6, 12]


def test_transfers_within_a_rank_take_no_time() -> None:
    order = order_of("zbv", 1, 2, 2)
    assert simulate(order, Durations.even(2)).length == simulate(order, Durations([1, 1], [1, 1], [1, 1], 9.0)).length


def test_activations_in_flight() -> None:
    assert held(order_of("gpipe", 4, 1, 8)) == [8, 8, 8, 8]
    assert held(order_of("1f1b", 4, 1, 8)) == [4, 3, 2, 1]
    assert held(order_of("zbv", 4, 2, 8)) == [8, 8, 8, 8]
    assert peak_in_flight(order_of("1f1b", 2, 1, 4)) == [InFlight({0: 2}, {}), InFlight({1: 1}, {})]


def test_the_dearest_moment_depends_on_what_stages_take() -> None:
    # Rank 0 of a V holds many of its cheap first stage, or fewer of a dear last one.
    order = order_of("zbv", 2, 2, 4)
    assert peak_in_flight(order, lambda stage: 1.0)[0].full == {0: 3, 3: 1}
    dear = peak_in_flight(order, lambda stage: 10.0 if stage == 3 else 1.0)[0]
    assert dear.full[3] == 1


def test_split_backward_passes_hold_inputs_until_the_weights_are_done() -> None:
    order = Order("zbv", 1, 2, 1, ((Action(Kind.FORWARD, 0, 0), Action(Kind.INPUT, 0, 0), Action(Kind.WEIGHT, 0, 0)),))
    assert peak_in_flight(order, lambda _: 1.0, lambda _: 2.0) == [InFlight({0: 0}, {0: 1})]


def test_a_drawing_in_text() -> None:
    assert draw_text(timeline("1f1b", 2, 3)) == (
        "1f1b: 2 stages, 3 micro-batches, bubble 25.0 %\n"
        "\n"
        "rank 0  F0 F1 ......B0    F2 B1    ...B2    \n"
        "rank 1  ...F0 B0    F1 B1    F2 B2    ......\n"
        "\n"
        "F forward  B backward  . waits\n"
        "\n"
        "rank 0  waits 25.0 % of the step; holds activations of up to 2 micro-batches\n"
        "rank 1  waits 25.0 % of the step; holds activations of up to 1 micro-batches\n"
    )


def test_a_long_drawing_has_letters_only() -> None:
    lines = draw_text(timeline("zbv", 2, 8), width=60).splitlines()
    assert lines[0] == "zbv: 4 stages on 2 ranks, 8 micro-batches, bubble 2.0 %"
    assert lines[2:4] == [
        "rank 0  FFFfiwfiwFIWfiwFIWfiwFIWfiwFIWfiwFIWfiwIWfiwIWIW.",
        "rank 1  .FfFfiwFIWfiwFIWfiwFIWfiwFIWfiwFIWfiwFIWfiwIiIWwW",
    ]


def test_a_drawing_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedule.png"
    draw_png(path, timeline("dualpipev", 2, 4))
    assert path.read_bytes().startswith(b"\x89PNG")
