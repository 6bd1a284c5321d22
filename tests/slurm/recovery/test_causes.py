"""What ended an attempt is told from what Slurm shows: requeues by hand, nodes set down, a killed supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial
from stoker.launcher.run.outcome import Cause, Outcome

pytestmark = pytest.mark.slurm


def requeued_by_hand(lab: Any, run: Trial) -> None:
    lab.cluster.run(["scontrol", "requeue", run.job_id])


def node_set_down(lab: Any, run: Trial) -> None:
    lab.cluster.run(["scontrol", "update", f"nodename={run.nodes()[1]}", "state=down", "reason=test"])


def supervisor_killed(lab: Any, run: Trial) -> None:
    """The batch script outlives it and has the job started again."""
    for process in lab.cluster.processes_on(run.nodes()[0]):
        if "stoker.launcher.supervise" in process.command() and "slurm_script" not in process.command():
            os.kill(process.pid, signal.SIGKILL)


CASES: list[tuple[Callable[[Any, Trial], None], Cause]] = [
    (requeued_by_hand, Cause.REQUEUED),
    (node_set_down, Cause.NODE_FAILURE),
    (supervisor_killed, Cause.CRASH),
]


def test_causes_are_what_slurm_shows(lab: Any, same: Callable[..., None]) -> None:
    def disturbed(number: int) -> tuple[Trial, str]:
        run = lab.launch(f"cause{number}", "cluster.exclusive=true")
        run.wait_step(12)
        second = run.nodes()[1]
        CASES[number][0](lab, run)
        return run, second

    with ThreadPoolExecutor(len(CASES)) as pool:
        runs = list(pool.map(disturbed, range(len(CASES))))
    first: list[Outcome] = []
    for (run, _), (_, cause) in zip(runs, CASES, strict=True):
        assert run.wait_end().cause is Cause.FINISHED, run.story()
        assert [o.cause for o in run.outcomes() if o] == [cause, Cause.FINISHED], run.story()
        first += [o for o in run.outcomes()[:1] if o]
        same(run)
    assert first[1].node == runs[1][1]
    assert first[2].reason == "the supervisor was ended by SIGKILL"
