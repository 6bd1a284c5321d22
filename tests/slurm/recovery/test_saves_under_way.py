"""Break a run while a checkpoint is being written beside the training; it must finish as if nothing had happened.

The writer is held up, so that the run is some steps further when it is struck.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm

Same = Callable[..., None]
PAUSE = "step:pause-60"


def held(milliseconds: int) -> str:
    """Failpoints: the save of step 20 is not done before that time is over."""
    return f"{PAUSE},checkpoint.sync@step=20@rank=1@attempt=1@generation=1:pause-{milliseconds}"


def wait_under_way(run: Trial) -> None:
    """The run goes on, and step 20 is not saved yet."""
    run.wait_step(22)
    assert list(run.dir.checkpoints.glob(".tmp-step-00000020-*")), run.story()


def assert_finished(run: Trial) -> None:
    outcome = run.wait_end()
    assert outcome.cause is Cause.FINISHED, run.story()
    assert outcome.exit_code == 0
    assert not [p.name for p in run.dir.checkpoints.iterdir() if p.name.startswith(".tmp")]


def test_preemption_with_grace_loses_no_step(lab: Any, same: Same) -> None:
    run = lab.launch("grace", failpoints=held(8_000))
    wait_under_way(run)
    lab.cluster.preempt(run.job_id)
    assert_finished(run)
    first = run.outcomes()[0]
    assert first.cause is Cause.PREEMPTED
    assert first.saved_step == first.step > 20
    assert run.events("restored")[-1]["step"] == first.step
    same(run)


def test_a_killed_worker_is_replaced_in_place(lab: Any, same: Same) -> None:
    run = lab.launch("kill", failpoints=f"{held(4_000)},step@step=23@rank=1@generation=1:kill")
    assert_finished(run)
    assert len(run.outcomes()) == 1
    assert [f["generation"] for f in run.events("form")] == [1, 2]
    assert run.events("restored")[-1]["step"] == 10
    same(run)


@pytest.mark.full
def test_a_power_cut_of_a_node(lab: Any, same: Same) -> None:
    run = lab.launch("power", failpoints=held(60_000))
    wait_under_way(run)
    victim = run.nodes()[1]
    lab.cluster.crash(victim)
    assert_finished(run)
    assert run.outcomes()[0].cause is Cause.NODE_FAILURE
    assert run.events("restored")[-1]["step"] == 10
    same(run)
    lab.cluster.restart_node(victim)


@pytest.mark.full
def test_an_agent_that_dies_alone_has_the_run_requeued(lab: Any, same: Same) -> None:
    run = lab.launch("agent", failpoints=held(60_000))
    wait_under_way(run)
    (agent,) = [p for p in lab.cluster.processes_on(run.nodes()[1]) if "stoker.launcher.agent" in p.command()]
    os.kill(agent.pid, signal.SIGKILL)
    assert_finished(run)
    assert run.outcomes()[0].cause is Cause.NODE_FAILURE
    assert run.events("restored")[-1]["step"] == 10
    same(run)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_writer_costs_one_save_and_no_step(lab: Any, same: Same, rank: int) -> None:
    """Killed while it works for this rank; the ranks of its node go on alone, and nobody is restarted."""
    run = lab.launch(f"writer{rank}", failpoints=f"{PAUSE},checkpoint.sync@step=20@rank={rank}:kill")
    assert_finished(run)
    assert len(run.outcomes()) == 1
    assert [f["generation"] for f in run.events("form")] == [1]
    assert len(run.events("writer_lost")) >= 1
    (failed,) = run.events("checkpoint_failed")
    assert failed["step"] == 20
    assert "the node's writer process was lost" in failed["error"]
    assert [n.step for n in run.dir.all_checkpoints()] == [40, 30, 10]
    same(run)


@pytest.mark.full
def test_a_writer_killed_between_saves_costs_nothing(lab: Any, same: Same) -> None:
    run = lab.launch("idle")
    run.wait_step(13)
    wait_for(lambda: run.events("checkpoint_saved"), lambda: run.story())
    (writer,) = [p for p in lab.cluster.processes_on(run.nodes()[0]) if is_writer(p)]
    os.kill(writer.pid, signal.SIGKILL)
    assert_finished(run)
    assert [f["generation"] for f in run.events("form")] == [1]
    assert run.events("writer_lost")
    assert run.events("checkpoint_failed") == []
    same(run)


def is_writer(process: Any) -> bool:
    """By the memory that it holds for its stacks, which has its role in its name."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{process.pid}/fd"):
            if ":writer:" in os.readlink(f"/proc/{process.pid}/fd/{fd}"):
                return True
    return False
