"""slurmctld goes away for a while: during a submission, in the middle of a run, at its warning and at its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.outcome import Cause, Outcome
from stoker.launcher.run.submissions import submissions

pytestmark = pytest.mark.slurm

# Longer than all that waits for an answer here: Slurm's commands give up after 4 to 8 s (MessageTimeout=5), the
# supervisor asks twice, a submission looks three times. With Slurm's default of 10 s a minute would be that.
AWAY = 25.0


def supervisor_of(lab: Any, run: Trial) -> int:
    found = [
        p.pid
        for node in lab.cluster.nodes()
        for p in lab.cluster.processes_on(node)
        if "stoker.launcher.supervise" in p.command() and str(run.dir.path) in p.command()
    ]
    assert len(found) == 1, found
    return found[0]


def jobs_of(lab: Any, name: str) -> set[str]:
    """Every job of this name that Slurm remembers, ended ones included."""
    return set(lab.cluster.run(["squeue", "-h", "--states=all", f"--name={name}", "-o", "%A"]).stdout.split())


def assert_exactly_once(lab: Any, same: Callable[..., None], run: Trial, name: str, attempts: int) -> None:
    outcome = run.wait_end()
    assert outcome.cause is Cause.FINISHED, run.story()
    assert len(run.dir.all_attempts()) == attempts, run.story()
    assert len(list(lab.root.glob(f"{name}-*"))) == 1
    assert [s.job_id for s in submissions(run.dir)] == [run.job_id]
    assert jobs_of(lab, run.dir.path.name) | jobs_of(lab, name) == {run.job_id}
    same(run)


@pytest.mark.parametrize(
    ("kill", "away"), [(True, AWAY), pytest.param(False, 70.0, marks=pytest.mark.full, id="a-minute")]
)
def test_a_controller_that_is_away_costs_nothing(lab: Any, same: Callable[..., None], kill: bool, away: float) -> None:
    pauses = {"running": 1000, "warned": 1000, "finishing": 300}  # milliseconds: a run lasts 40 s, or 12 s
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda name: lab.launch(name, failpoints=f"step@attempt=1:pause-{pauses[name]}"), pauses))
    running, warned, finishing = runs
    for run in runs:
        run.wait_step(2)
    lab.cluster.stop_controller(kill=kill)
    try:
        since = time.monotonic()
        os.kill(supervisor_of(lab, warned), signal.SIGUSR1)
        with ThreadPoolExecutor(1) as pool:
            submitting = pool.submit(lab.launch, "submitted")
            assert "Slurm does not answer" in lab.stoker("status", str(running.dir.path))
            # The end of a run and a stop need no controller: outcome and checkpoint are there before it is back.
            assert finishing.wait_end().cause is Cause.FINISHED, finishing.story()
            wait_for(lambda: warned.events("stop_committed"), lambda: warned.story())
            stop = warned.events("stop_committed")[0]["step"]
            wait_for(lambda: warned.weights(stop), lambda: warned.story())
            wait_for(lambda: time.monotonic() - since > away, lambda: "the outage's end")
            assert Outcome.read(warned.dir.attempt(1)) is None  # it is still asking for its requeue
            lab.cluster.start_controller()
            submitted = submitting.result()
    finally:
        if "slurmctld" not in lab.cluster.status()["daemons"]:
            lab.cluster.start_controller()
    assert_exactly_once(lab, same, running, "running", attempts=1)
    assert_exactly_once(lab, same, warned, "warned", attempts=2)
    assert_exactly_once(lab, same, finishing, "finishing", attempts=1)
    assert_exactly_once(lab, same, submitted, "submitted", attempts=1)
    first = warned.outcomes()[0]
    assert first is not None
    assert (first.cause, first.step, first.saved_step) == (Cause.TIME_LIMIT, stop, stop)
    assert warned.events("restored")[-1]["step"] == stop
    lab.empty_queue()
