"""Break a run on a real cluster; it must finish as if nothing had happened, bit by bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial
from stoker.launcher.run.manifest import INDEX, MANIFEST
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm

Same = Callable[..., None]


def first_causes(run: Trial) -> list[str]:
    return [o.cause.value for o in run.outcomes()[:-1] if o]


def assert_finished(run: Trial) -> None:
    outcome = run.wait_end()
    assert outcome.cause is Cause.FINISHED, run.story()
    assert outcome.exit_code == 0


def test_a_warning_before_the_time_limit_loses_no_step(lab: Any, same: Same) -> None:
    # Slurm looks at time limits every 30 s: the warning comes 60 to 90 s before the end of these two minutes.
    run = lab.launch("limit", "cluster.time=2", failpoints="step@attempt=1:pause-2000")
    assert_finished(run)
    first = run.outcomes()[0]
    assert first.cause is Cause.TIME_LIMIT
    assert first.saved_step == first.step
    assert run.events("restored")[-1]["step"] == first.step
    same(run)


def test_preemption_with_grace_loses_no_step(lab: Any, same: Same) -> None:
    run = lab.launch("grace")
    run.wait_step(12)
    lab.cluster.preempt(run.job_id)
    assert_finished(run)
    first = run.outcomes()[0]
    assert first.cause is Cause.PREEMPTED
    assert first.saved_step == first.step
    same(run)


def test_preemption_without_grace_loses_at_most_an_interval(lab: Any, same: Same) -> None:
    run = lab.launch("nograce", "cluster.partition=grace0")
    run.wait_step(12)
    lab.cluster.preempt(run.job_id)
    assert_finished(run)
    assert first_causes(run) == ["preempted"]
    assert run.events("restored")[-1]["step"] >= 10
    same(run)


def test_power_cut_of_a_node(lab: Any, same: Same) -> None:
    run = lab.launch("power")
    run.wait_step(12)
    victim = run.nodes()[1]
    lab.cluster.crash(victim)
    assert_finished(run)
    first = run.outcomes()[0]
    assert first.cause is Cause.NODE_FAILURE
    assert victim not in run.nodes()
    same(run)
    lab.cluster.restart_node(victim)


def test_power_cut_of_the_batch_host(lab: Any, same: Same) -> None:
    run = lab.launch("host")
    run.wait_step(12)
    victim = run.nodes()[0]
    lab.cluster.crash(victim)
    assert_finished(run)
    assert victim not in run.nodes()
    same(run)
    lab.cluster.restart_node(victim)


@pytest.mark.parametrize("which", [0, 1])
def test_a_cut_network_leaves_two_incarnations_and_harms_nothing(lab: Any, same: Same, which: int) -> None:
    run = lab.launch(f"cut{which}")
    run.wait_step(12)
    victim = run.nodes()[which]
    lab.cluster.cut(victim)
    assert_finished(run)
    assert victim not in run.nodes()
    lab.cluster.heal(victim)
    same(run)


def test_a_killed_worker_is_replaced_in_place(lab: Any, same: Same) -> None:
    run = lab.launch("kill", failpoints="step:pause-60,step@step=15@rank=1@generation=1:kill")
    assert_finished(run)
    assert len(run.outcomes()) == 1
    assert [f["generation"] for f in run.events("form")] == [1, 2]
    assert run.events("trouble")[0]["rank"] == 1
    same(run)


def test_an_agent_that_dies_alone_has_the_run_requeued(lab: Any, same: Same) -> None:
    run = lab.launch("agent")
    run.wait_step(12)
    node = run.nodes()[1]
    (agent,) = [p for p in lab.cluster.processes_on(node) if "stoker.launcher.agent" in p.command()]
    os.kill(agent.pid, signal.SIGKILL)
    assert_finished(run)
    assert first_causes(run) == ["node_failure"]
    same(run)


def test_a_hung_worker_is_named_killed_and_replaced(lab: Any, same: Same) -> None:
    points = "step:pause-60,step@step=15@rank=0@generation=1:hang"
    run = lab.launch("hang", "resilience.hang_timeout=6", failpoints=points)
    assert_finished(run)
    trouble = run.events("trouble")[0]
    assert (trouble["cause"], trouble["rank"], trouble["node"]) == ("hang", 0, run.events("form")[0]["nodes"][0])
    where = {e["rank"]: e["at"] for e in run.events("hung_at")}
    assert where[0].startswith("stoker/launcher/run/failpoints.py:"), "told before it was killed"
    assert where[1].startswith("stoker/train/comm.py:")
    same(run)


@pytest.mark.parametrize("place", ["write@rank=1", "manifest", "publish"])
def test_a_kill_in_the_middle_of_a_save(lab: Any, same: Same, place: str) -> None:
    name, _, condition = place.partition("@")
    point = f"checkpoint.{name}@step=20@attempt=1{'@' + condition if condition else ''}"
    run = lab.launch(f"save-{name}", failpoints=f"step:pause-60,{point}:kill", nodes=2)
    run.wait_step(20)
    # The failpoint strikes again in each generation of this attempt; a requeue is a new attempt.
    lab.cluster.run(["scontrol", "requeue", run.job_id])
    assert_finished(run)
    same(run)
    assert not [p for p in run.dir.checkpoints.iterdir() if p.name.startswith(".tmp")]


def truncate(checkpoint: Path) -> None:
    (shard, *_) = sorted(checkpoint.glob("*.safetensors"))
    with open(shard, "r+b") as f:
        f.truncate(shard.stat().st_size - 100)


def flip_one_bit(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    with open(shard, "r+b") as f:
        f.seek(-64, 2)
        byte = f.read(1)[0]
        f.seek(-64, 2)
        f.write(bytes([byte ^ 0x10]))


def remove_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def damage_index(checkpoint: Path) -> None:
    data = bytearray((checkpoint / INDEX).read_bytes())
    data[10] ^= 1
    (checkpoint / INDEX).write_bytes(data)


@pytest.mark.parametrize(
    "damage", [truncate, flip_one_bit, pytest.param(remove_manifest, marks=pytest.mark.full), damage_index]
)
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(
    lab: Any, same: Same, damage: Callable[[Path], None]
) -> None:
    run = lab.launch(f"damage-{damage.__name__}")
    run.wait_step(13)
    lab.cluster.run(["scancel", "--batch", "--signal=USR1", run.job_id])
    saved = run.wait_outcome(1).saved_step
    assert saved is not None
    newest, before = run.dir.all_checkpoints()[:2]
    assert newest.step == saved
    damage(run.dir.checkpoint(newest))  # the requeued job waits in the queue meanwhile
    assert_finished(run)
    rejected = run.events("checkpoint_rejected")[0]
    assert rejected["name"] == str(newest)
    assert run.events("restored")[-1]["step"] == before.step
    same(run, except_for=newest)


def test_two_faults_in_turn(lab: Any, same: Same) -> None:
    run = lab.launch("two", failpoints="step:pause-60,step@step=25@rank=0@attempt=2@generation=1:kill")
    run.wait_step(12)
    victim = run.nodes()[1]
    lab.cluster.crash(victim)
    assert_finished(run)
    assert first_causes(run) == ["node_failure"]
    assert run.events("trouble")[-1]["rank"] == 0
    same(run)
    lab.cluster.restart_node(victim)
