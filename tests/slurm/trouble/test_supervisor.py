"""The supervisor stands still for longer than the lease; scontrol is slow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm

FROZEN = 20.0  # seconds; the lease is 8


def processes(lab: Any, run: Trial, part: str) -> list[int]:
    """Of this run, on all nodes."""
    words = (part, str(run.dir.path))
    everything = [p for node in lab.cluster.nodes() for p in lab.cluster.processes_on(node)]
    # srun's own command line ends with the agent's.
    return [p.pid for p in everything if all(w in p.command() for w in words) and not p.name.startswith("srun")]


def test_a_supervisor_frozen_for_longer_than_the_lease_doubles_nothing(lab: Any, same: Callable[..., None]) -> None:
    run = lab.launch("frozen", failpoints="step@attempt=1:pause-300")
    run.wait_step(5)
    (supervisor,) = processes(lab, run, "stoker.launcher.supervise")
    os.kill(supervisor, signal.SIGSTOP)
    thaw_at = time.monotonic() + FROZEN
    try:
        # The agents let go and take their workers along, while Slurm sees nothing but a running job.
        wait_for(lambda: not processes(lab, run, "stoker.launcher.agent"), lambda: run.story(), 40.0)
        assert len(run.events("supervisor_lost")) == 2
        step = run.step()
        wait_for(lambda: time.monotonic() > thaw_at, lambda: "the thaw")
        assert run.step() == step
    finally:
        os.kill(supervisor, signal.SIGCONT)
    outcome = run.wait_end()
    assert outcome.cause is Cause.FINISHED, run.story()
    assert [o.cause.value for o in run.outcomes() if o] == ["node_failure", "finished"]
    same(run)
    lab.empty_queue()


@pytest.mark.full
def test_a_slow_controller_keeps_nobody_from_the_agents(lab: Any, same: Callable[..., None], tmp_path: Path) -> None:
    """Each answer of scontrol takes longer than the lease."""
    node = lab.cluster.nodes()[0]
    real = lab.cluster.enter(node, ["which", "scontrol"]).stdout.strip()
    aside, slow = tmp_path / "scontrol.real", tmp_path / "scontrol.slow"
    aside.touch()
    slow.write_text(f'#!/bin/sh\nsleep 9\nexec {aside} "$@"\n')
    slow.chmod(0o755)
    for node in lab.cluster.nodes():
        assert lab.cluster.enter(node, ["mount", "--bind", real, str(aside)]).returncode == 0
        assert lab.cluster.enter(node, ["mount", "--bind", str(slow), real]).returncode == 0
    try:
        run = lab.launch("slow", failpoints="step@attempt=1:pause-300")
        run.wait_step(5)
        lab.cluster.run(["scancel", "--batch", "--signal=USR1", run.job_id])
        assert run.wait_end().cause is Cause.FINISHED, run.story()
    finally:
        for node in lab.cluster.nodes():
            for path in (real, str(aside)):
                lab.cluster.enter(node, ["umount", path])
    first = run.outcomes()[0]
    assert first is not None
    assert (first.cause, first.saved_step) == (Cause.TIME_LIMIT, first.step)
    assert run.events("agent_lost") + run.events("supervisor_lost") == []
    assert len(run.dir.all_attempts()) == 2
    same(run)
