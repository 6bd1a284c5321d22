"""A run that hangs, looked into from the login node: stacks, shell and report, while it goes on."""

from __future__ import annotations

import os
import signal
import sys
import tarfile
from typing import Any

import pytest
from stoker.launcher import procfs
from stoker.launcher.rehearsal.trial import wait_for
from stoker.launcher.run.stacks import Offer

pytestmark = pytest.mark.slurm


def test_a_hung_run_is_looked_into_while_it_goes_on(lab: Any) -> None:
    run = lab.launch("look", "resilience.hang_timeout=300", failpoints="step:pause-60,step@step=12@rank=1:hang")
    run.wait_step(12)
    path, (first, second) = str(run.dir.path), run.nodes()
    text = wait_for(lambda: behind(lab.stoker("stacks", path)), lambda: "a rank that is behind")
    waiting, hung = text.split("\n\n")[1:3]
    assert waiting.startswith(f"[0] on {first}, pid ")
    assert "stoker/train/comm.py:" in waiting
    assert hung.startswith(f"[1] on {second}, pid ")
    assert "  phase step, 12 steps done, micro-batch 0, " in hung
    assert "    stoker/launcher/run/failpoints.py:" in hung
    assert text.endswith(f"rank 1 ({second}) behind the others: fewest steps, then collectives\n")

    # A shell on the node that was named, with the environment of the workers there; the exit code is the command's.
    command = 'echo "$SLURMD_NODENAME $PWD ${PYTHONPATH%%:*} $OMP_NUM_THREADS $STOKER_TOKEN."; exit 7'
    done = lab.cluster.run(
        [sys.executable, "-m", "stoker.launcher.cli", "shell", path, second, "--", "bash", "-c", command],
        check=False,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    seen_node, directory, code, threads, token = done.stdout.split(" ")
    assert (seen_node, directory, threads, token) == (second, path, "1", ".\n")
    assert code.endswith("/code")
    refused = lab.cluster.run([sys.executable, "-m", "stoker.launcher.cli", "shell", path, "n9"], check=False)
    assert refused.returncode == 2
    assert f"n9: not a node of attempt 1; there are {first}, {second}" in refused.stderr

    # All for a bug report, with the stacks and Slurm's word, while it runs.
    lab.stoker("report", path, "--bundle", "look.tar.gz")
    with tarfile.open(lab.root / "look.tar.gz") as tar:
        stacks, job = (
            tar.extractfile(f"look/{n}") for n in ("stacks.txt", f"slurm/{run.job_id}-scontrol-show-job.txt")
        )
        assert stacks is not None
        assert job is not None
        assert f"rank 1 ({second}) behind the others" in stacks.read().decode()
        assert "JobState=RUNNING" in job.read().decode()

    worker = worker_on(lab, first)
    os.kill(worker, signal.SIGSTOP)
    try:
        stopped = lab.stoker("stacks", path, "--rank", "0")
    finally:
        os.kill(worker, signal.SIGCONT)
    assert "\n  stopped" in stopped
    assert "[1]" not in stopped
    assert run.events("worker_exited") == []


def behind(text: str) -> str:
    return text if "behind the others" in text else ""


def worker_on(lab: Any, node: str) -> int:
    """The process that has made a rank's offer, and not one that inherited it."""
    for p in lab.cluster.processes_on(node):
        for _, link in procfs.links(p.pid):
            offer = Offer.parse(link)
            if offer is not None and offer.rank is not None and procfs.own_pid(p.pid) == offer.pid:
                return int(p.pid)
    raise AssertionError(f"no worker on {node}")
