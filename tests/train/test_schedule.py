"""The learning rate at the steps where schedules are usually off by one."""

from __future__ import annotations

import pytest
from stoker.conf.schema import OptimConfig, Schedule
from stoker.train.schedule import LearningRate


@pytest.mark.parametrize(
    ("shape", "warmup", "decay", "expected"),
    [
        # Steps count from 1. Warm-up ends at step 4 with the peak; the last step, 12, has the lowest rate.
        (Schedule.cosine, 4, 0, {1: 0.25, 2: 0.5, 4: 1.0, 8: 0.55, 12: 0.1, 13: 0.1}),
        (Schedule.cosine, 0, 0, {6: 0.55, 12: 0.1}),
        (Schedule.linear, 4, 0, {1: 0.25, 4: 1.0, 5: 0.8875, 8: 0.55, 11: 0.2125, 12: 0.1, 99: 0.1}),
        (Schedule.linear, 0, 0, {3: 0.775, 12: 0.1}),
        (Schedule.wsd, 4, 3, {1: 0.25, 4: 1.0, 5: 1.0, 9: 1.0, 10: 0.7, 11: 0.4, 12: 0.1}),
        (Schedule.wsd, 0, 0, {1: 1.0, 12: 1.0}),
        (Schedule.wsd, 9, 3, {8: 8 / 9, 9: 1.0, 10: 0.7, 12: 0.1}),
        (Schedule.constant, 4, 0, {1: 0.25, 3: 0.75, 4: 1.0, 12: 1.0}),
        (Schedule.constant, 0, 5, {1: 1.0, 12: 1.0}),
        (Schedule.cosine, 12, 0, {11: 11 / 12, 12: 1.0}),
    ],
)
def test_rate_at_warmup_end_decay_start_and_last_step(
    shape: Schedule, warmup: int, decay: int, expected: dict[int, float]
) -> None:
    schedule = LearningRate(shape, peak=1.0, lowest=0.1, steps=12, warmup_steps=warmup, decay_steps=decay)
    assert {step: schedule.rate(step) for step in expected} == pytest.approx(expected, abs=1e-12)


def test_peak_and_lowest_are_met_exactly() -> None:
    schedule = LearningRate(Schedule.cosine, peak=3e-4, lowest=3e-5, steps=1000, warmup_steps=10)
    assert schedule.rate(10) == 3e-4
    assert schedule.rate(1000) == 3e-5


def test_warmup_of_one_step_starts_at_the_peak() -> None:
    assert LearningRate(Schedule.cosine, 1.0, 0.0, steps=10, warmup_steps=1).rate(1) == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": 13}, "optim.warmup_steps = 13"),
        ({"warmup_steps": 8, "decay_steps": 5, "schedule": Schedule.wsd}, "optim.decay_steps = 5"),
        ({"min_lr": 2.0, "lr": 1.0}, "optim.min_lr = 2.0 is above optim.lr = 1.0"),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearningRate.of(OptimConfig(**fields), steps=12)  # type: ignore[arg-type]
