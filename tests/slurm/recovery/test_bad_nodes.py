"""A node that fails every launch: the run finishes on others, and for a while the node is avoided, with a reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.avoid import run_id
from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.badnodes import known
from stoker.launcher.run.outcome import Cause, Next

pytestmark = pytest.mark.slurm


def test_a_node_that_fails_every_launch_is_left_out(lab: Any, same: Callable[..., None]) -> None:
    """n1 fails as batch host; with n1 excluded n3 fails as second node; then the run gets two good ones."""
    with lab.without_python("n1", "n3"):
        options = ["cluster.exclusive=true", "cluster.exclude=n6", "resilience.backoff=1"]
        run = lab.launch("bad", *options)
        assert run.wait_end().cause is Cause.FINISHED, run.story()
        job = lab.cluster.run(["scontrol", "-o", "show", "job", run.job_id]).stdout
        excluded = lab.cluster.run(["scontrol", "show", "hostnames", job.split("ExcNodeList=")[1].split()[0]]).stdout
        assert sorted(excluded.split()) == ["n1", "n3", "n6"]
        assert [o.cause for o in run.outcomes() if o] == [Cause.LAUNCH_FAILED, Cause.FINISHED], run.story()
        found = known(run.dir.path.parent / ".bad-nodes", run_id(run.dir))
        assert sorted(found) == ["n1", "n3"]
        assert "interpreter" in found["n1"].reason
        assert "failed at start" in found["n3"].reason
        assert all(23 * 3600 < f.until - time.time() < 24 * 3600 for f in found.values())
        assert not {"n1", "n3"} & set(run.nodes())
        same(run)
        # Another run of the same root is kept away from n3 from the start; its own interpreter may well work on n1.
        other = lab.launch("other", "cluster.exclude=n6")
        assert other.wait_end().cause is Cause.FINISHED, other.story()
        assert len(other.outcomes()) == 1
        assert not {"n1", "n3"} & set(other.nodes())


def test_a_node_that_is_dead_before_slurm_knows_is_to_blame_and_no_other(
    slurm_available: None, isolated_spec: ClusterSpec, short_directory: Path, lab_on: Callable[[Cluster], Any]
) -> None:
    """srun ends seconds after it could not reach n2, long before Slurm sets n2 down, and kills n1's agent for it."""
    short_directory.parent.chmod(0o755)
    with Cluster.start(replace(isolated_spec, nodes=3, slurmd_timeout=300), short_directory) as cluster:
        cluster.crash("n2")
        run = lab_on(cluster).launch("dead")
        first = run.wait_outcome(1)
        assert (first.cause, first.next, first.node) == (Cause.LAUNCH_FAILED, Next.REQUEUE, "n2"), run.story()
        assert list(known(run.dir.path.parent / ".bad-nodes", run_id(run.dir))) == ["n2"]
        # Slurm starts it once n2 is down, or answers, so that the job is not on it any more.
        job = cluster.run(["scontrol", "-o", "show", "job", run.job_id]).stdout
        assert " Restarts=1 " in job
        assert " ExcNodeList=n2 " in job


def test_a_mistake_in_the_set_up_ends_soon_and_says_so(lab: Any) -> None:
    """What fails on n1 alone is tried elsewhere; what fails on every node is over after three, with the reason."""

    def shown(run: Trial) -> dict[str, Any]:
        return dict(json.loads(lab.stoker("status", "--json", str(run.dir.path)))[0])

    here = lab.launch("here", "cluster.setup=['test $SLURMD_NODENAME != n1']", "cluster.nodelist=null")
    typo = lab.launch("typo", "cluster.setup=['cat /nonexistent/typo']", "resilience.backoff=1")
    wait_for(lambda: shown(typo)["state"] == "FAILED", typo.story)
    assert (
        "could not start it: cluster.setup failed with exit code 1 at: cat /nonexistent/typo" in shown(typo)["detail"]
    )
    assert (typo.dir.job_logs / f"{typo.job_id}.log").read_text().count("cannot start this run") == 3
    assert here.wait_end().cause is Cause.FINISHED, here.story()
    assert "n1" not in here.nodes()
    assert typo.dir.all_attempts() == []
