"""The same on clusters set up otherwise: with accounting, with signals at preemption, at Slurm's defaults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.rehearsal.trial import wait_for
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm


@pytest.fixture
def site(request: pytest.FixtureRequest, short_directory: Path, shared: Path, lab_on: Any) -> Iterator[Any]:
    """A laboratory on a cluster of its own, as the test's parameter says."""
    spec = ClusterSpec(isolate=True, share=(str(shared.parent),), **request.param)
    with Cluster.start(spec, short_directory) as cluster:
        yield lab_on(cluster)


@pytest.mark.parametrize("site", [{"nodes": 3, "database": True, "send_user_signal": True}], indirect=True)
def test_with_accounting_and_a_signal_at_preemption(site: Any, same: Callable[..., None]) -> None:
    """Slurm sends the job's own warning signal when it preempts it: to be told from a time limit."""
    run = site.launch("accounted")
    run.wait_step(12)
    site.cluster.preempt(run.job_id)
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    first = run.outcomes()[0]
    assert first is not None
    assert first.cause is Cause.PREEMPTED
    assert first.saved_step == first.step
    same(run)
    job = run.job_id
    accounted = ["sacct", "-n", "-X", "-D", "-P", "-j", job, "-o", "State"]
    wait_for(
        lambda: site.cluster.run(accounted).stdout.split()[-1:] == ["COMPLETED"],
        lambda: f"the job's end in the accounts: {site.cluster.run(accounted).stdout}",
        30.0,
    )


@pytest.mark.full
@pytest.mark.parametrize("site", [{"nodes": 2, "cred_expire": 120, "kill_wait": 30, "grace_time": 60}], indirect=True)
@pytest.mark.parametrize("how", ["scancel", "scancel-step", "stoker"])
def test_at_slurm_defaults_a_stopped_run_stays_stopped_for_three_minutes(site: Any, how: str) -> None:
    run = site.launch("stays", "train.steps=4000")
    run.wait_step(12)
    commands = {"scancel": ["scancel", run.job_id], "scancel-step": ["scancel", f"{run.job_id}.0"]}
    if how == "stoker":
        site.stoker("cancel", str(run.dir.path))
    else:
        site.cluster.run(commands[how])
    assert run.wait_end().cause is Cause.CANCELLED, run.story()
    site.empty_queue()
    attempts = len(run.dir.all_attempts())
    deadline = time.monotonic() + 180.0
    while time.monotonic() < deadline:
        assert site.queue() == ""
        time.sleep(2.0)
    assert len(run.dir.all_attempts()) == attempts
