"""`stoker watch` on a real cluster: a headless job, one that is lost, one that a person holds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stoker.launcher.rehearsal import processes
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.files import read_json
from stoker.launcher.run.outcome import Cause
from stoker.launcher.run.submissions import submissions
from stoker.launcher.watch_facts import replaced_path

pytestmark = pytest.mark.slurm

SILENCE = "15"  # seconds; the lease is 8


def watch(lab: Any, *argv: str) -> tuple[int, list[str]]:
    # A person may not ask for so little: a job that works may be as silent.
    program = f"from stoker.launcher import cli, watch_runs; watch_runs.LEAST_SILENCE = {SILENCE}; exit(cli.main())"
    command = [sys.executable, "-c", program, "watch", "--once", f"--silence={SILENCE}", *argv, str(lab.root)]
    done = lab.cluster.run(command, cwd=lab.root, check=False, timeout=170)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def supervisor_of(lab: Any, run: Trial) -> int:
    everything = [p for node in lab.cluster.nodes() for p in lab.cluster.processes_on(node)]
    words = ("stoker.launcher.supervise", str(run.dir.path))
    (pid,) = (p.pid for p in everything if all(w in p.command() for w in words))
    return pid


def kill_job_script(lab: Any, run: Trial) -> None:
    """The batch script would have an attempt whose supervisor is gone started again: both have to go, it first."""
    pid = supervisor_of(lab, run)
    supervisor = processes.find(pid)
    assert supervisor is not None
    for victim in (supervisor.parent, pid):
        os.kill(victim, signal.SIGKILL)


def test_headless_and_lost_runs_go_on_once_and_a_held_one_is_told(lab: Any, same: Callable[..., None]) -> None:
    def launch(name: str) -> Trial:
        more = ["cluster.sbatch.hold=''"] if name == "held" else []
        return lab.launch(name, *more, failpoints="step@attempt=1:pause-300")

    with ThreadPoolExecutor(3) as pool:
        headless, lost, held = pool.map(launch, ("headless", "lost", "held"))
    for run in (headless, lost):
        run.wait_step(5)
    assert [line.split(":")[1] for line in watch(lab)[1]] == [" held"]  # nothing else is wrong yet
    # As if its node had died behind --no-kill: Slurm shows a running job, and nothing of it lives.
    os.kill(supervisor_of(lab, headless), signal.SIGSTOP)
    kill_job_script(lab, lost)

    def checks() -> dict[str, str]:
        return {line.split(": ")[0].split("-")[0]: line.split(": ")[1] for line in watch(lab)[1]}

    found = {"headless": "headless", "lost": "lost", "held": "held"}
    wait_for(lambda: checks() == found, lambda: str(checks()), 90.0)
    first = headless.job_id
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: watch(lab, "--fix"), range(2)))
    lines = [line for _, found_lines in both for line in found_lines]
    for run in (headless, lost):  # by one of the two; which may find a job ended that the other has just ended
        assert sum(line.startswith(run.dir.path.name) and "resumed: " in line for line in lines) == 1, lines
    assert read_json(replaced_path(submissions(headless.dir)[0]))["job_id"] == first
    assert any("is held, not by Slurm's own doing" in line for line in lines)
    lab.cluster.run(["scontrol", "release", held.job_id])
    for run, count in ((headless, 2), (lost, 2), (held, 1)):
        wait_for(lambda run=run, count=count: len(run.dir.all_attempts()) == count, lambda run=run: run.story())
        assert run.wait_end().cause is Cause.FINISHED, run.story()
        assert len(submissions(run.dir)) == len(run.dir.all_attempts()) == count, run.story()
        same(run)
    lab.empty_queue()
    assert watch(lab, "--fix") == (0, [])
