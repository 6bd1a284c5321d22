"""Where Slurm may not requeue (JobRequeue=0, PreemptMode=CANCEL) a chain of jobs carries the run, bitwise the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stoker.launcher.avoid import run_id
from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.lab import PAUSE
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.badnodes import known
from stoker.launcher.run.files import read_json
from stoker.launcher.run.outcome import Cause
from stoker.launcher.run.submissions import submissions

pytestmark = pytest.mark.slurm

CHAIN = "resilience.continuation=chain"


@pytest.fixture
def site(short_directory: Any, shared: Any, lab_on: Any) -> Iterator[Any]:
    spec = ClusterSpec(nodes=12, isolate=True, share=(str(shared.parent),), job_requeue=False, preempt_mode="CANCEL")
    with Cluster.start(spec, short_directory) as cluster:
        yield lab_on(cluster)


def attempt_job(run: Trial) -> str:
    """The job of the newest attempt."""
    wait_for(lambda: run.dir.all_attempts() and run.dir.all_attempts()[-1].start.exists(), lambda: run.story())
    return str(read_json(run.dir.all_attempts()[-1].start)["job_id"])


def time_limit(lab: Any, run: Trial) -> str:
    run.wait_outcome(1)
    return "time_limit"


def preempted_with_grace(lab: Any, run: Trial) -> str:
    run.wait_step(12)
    lab.cluster.preempt(attempt_job(run))
    return "preempted"


preempted_at_once = preempted_with_grace


def node_power(lab: Any, run: Trial) -> str:
    run.wait_step(12)
    lab.cluster.crash(run.nodes()[1])
    return "node_failure"


def killed_supervisor(lab: Any, run: Trial) -> str:
    run.wait_step(12)
    kill(lab, run, "stoker.launcher.supervise")
    return "crash"


def killed_batch_script(lab: Any, run: Trial) -> str | None:
    """The shell around the supervisor, and then itself, if it is still there: it may or may not have a last word."""
    run.wait_step(12)
    kill(lab, run, "slurm_script", "stoker.launcher.supervise")
    return None


def left_alone(lab: Any, run: Trial) -> str:
    return ""


def cancelled_and_resumed(lab: Any, run: Trial) -> str:
    """Running, with a successor behind it, it is RUNNING; cancelled, both are gone; resumed, it goes on as a chain."""
    run.wait_step(12)
    jobs = [str(s.job_id) for s in submissions(run.dir)]
    assert len(jobs) == 2, run.story()
    (shown,) = json.loads(lab.stoker("status", "--json", str(run.dir.path)))
    assert (shown["state"], shown["job_id"]) == ("RUNNING", jobs[0])
    lab.stoker("cancel", str(run.dir.path))
    left = lab.cluster.run(["squeue", "-h", "-o", "%A"]).stdout.split()
    assert not set(jobs) & set(left)
    lab.stoker("resume", str(run.dir.path))
    wait_for(lambda: len(run.dir.all_attempts()) > 1, lambda: f"a second attempt of {run.story()}")
    return "cancelled"


def kill(lab: Any, run: Trial, *commands: str) -> None:
    for command in commands:
        for process in lab.cluster.processes_on(run.nodes()[0]):
            if command in process.command():
                os.kill(process.pid, signal.SIGKILL)


CASES: list[tuple[Callable[..., str | None], list[str], str]] = [
    (time_limit, ["cluster.time=2"], "step@attempt=1:pause-2000"),
    (preempted_with_grace, [], PAUSE),
    (preempted_at_once, ["cluster.partition=grace0"], PAUSE),
    (node_power, [], PAUSE),
    (killed_supervisor, [], PAUSE),
    (killed_batch_script, [], PAUSE),
    (cancelled_and_resumed, [], "step@attempt=1:pause-1000"),
    (left_alone, [], PAUSE),
]


def test_a_chain_carries_the_run_through_everything_and_leaves_nothing_in_the_queue(
    site: Any, same: Callable[..., None]
) -> None:
    """Side by side on one cluster. While a run goes its successor waits; when it is finished nothing waits any more."""

    def disturbed(number: int) -> tuple[Trial, str | None]:
        disturb, overrides, failpoints = CASES[number]
        run = site.launch(f"case{number}", CHAIN, "cluster.exclusive=true", *overrides, failpoints=failpoints)
        return run, disturb(site, run)

    with ThreadPoolExecutor(len(CASES)) as pool:
        runs = list(pool.map(disturbed, range(len(CASES))))
    for run, cause in runs:
        outcome = run.wait_end()
        assert outcome.cause is Cause.FINISHED, run.story()
        causes = [o.cause.value if o else None for o in run.outcomes()]
        expected = ([] if cause == "" else [cause]) + ["finished"]
        assert causes == expected or (cause is None and causes == ["crash", "finished"]), run.story()
        modes = [s.mode for s in submissions(run.dir)]
        again = ["sbatch", "chain"] if cause == "cancelled" else ["chain"]
        assert modes == ["sbatch", "chain"] + again * (len(causes) - 1), run.story()
        same(run)
    site.empty_queue()


def test_a_batch_host_that_cannot_start_anything_is_replaced_in_a_chain(site: Any, same: Callable[..., None]) -> None:
    """Its job has no successor yet: the batch script itself submits one that leaves the node out."""
    with site.without_python("n1"):
        run = site.launch("unusable", CHAIN)
        wait_for(run.dir.all_attempts, run.story)
        assert run.wait_end().cause is Cause.FINISHED, run.story()
    assert [o.cause for o in run.outcomes() if o] == [Cause.FINISHED]
    assert "n1" not in run.nodes()
    assert list(known(run.dir.path.parent / ".bad-nodes", run_id(run.dir))) == ["n1"]
    assert [s.intention.get("after") for s in submissions(run.dir)[:2]] == [None, submissions(run.dir)[0].job_id]
    same(run)
    site.empty_queue()
