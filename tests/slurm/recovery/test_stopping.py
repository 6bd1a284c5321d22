"""What a person stops stays stopped, and goes on only when a person says so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run import views
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm

WATCHED = 30.0  # seconds after a scancel in which nothing may rise again (a requeued job would wait 5 s here)


def at_start_up(run: Trial) -> None:
    wait_for(lambda: run.dir.all_attempts(), lambda: "an attempt")


def mid_step(run: Trial) -> None:
    run.wait_step(12)


def mid_save(run: Trial) -> None:
    run.wait_step(20)
    wait_for(lambda: list(run.dir.checkpoints.glob(".tmp-step-00000020-*")), lambda: "a save under way")


def of_job(lab: Any, run: Trial) -> None:
    lab.cluster.run(["scancel", run.job_id])


def of_step(lab: Any, run: Trial) -> None:
    wait_for(lambda: f"{run.job_id}.0" in lab.cluster.run(["squeue", "-s", "-h", "-o", "%i"]).stdout, lambda: "a step")
    lab.cluster.run(["scancel", f"{run.job_id}.0"])


def by_stoker(lab: Any, run: Trial) -> None:
    lab.stoker("cancel", str(run.dir.path))


OURS = ("stoker.launcher.supervise", "stoker.launcher.agent", "stoker.train")  # as they stand in command lines
CASES = [
    (of_job, at_start_up),
    (of_job, mid_step),
    (of_job, mid_save),
    (of_step, at_start_up),
    (of_step, mid_step),
    (of_step, mid_save),
    (by_stoker, at_start_up),
    (by_stoker, mid_step),
    (by_stoker, mid_save),
]


def stopped(lab: Any, cancel: Callable[..., None], moment: Callable[[Trial], None]) -> tuple[str, Trial]:
    points = "step:pause-100" + (",checkpoint.write@step=20@rank=1:pause-60000" if moment is mid_save else "")
    name = f"{cancel.__name__}-{moment.__name__}".replace("_", "-")
    run = lab.launch(name, "train.steps=400", failpoints=points)
    moment(run)
    cancel(lab, run)
    return name, run


def test_a_stopped_run_stays_stopped(lab: Any) -> None:
    """All cases side by side on one cluster; then nothing may run or wait, and nothing may come back."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        runs = list(pool.map(lambda case: stopped(lab, *case), CASES))
    for name, run in runs:
        outcome = run.wait_end(patience=60.0)
        assert outcome.cause is Cause.CANCELLED, f"{name}: {run.story()}"
        assert outcome.exit_code == 143
    lab.empty_queue()
    attempts = {name: len(run.dir.all_attempts()) for name, run in runs}
    deadline = time.monotonic() + WATCHED
    while time.monotonic() < deadline:
        assert lab.queue() == ""
        time.sleep(1.0)
    assert attempts == {name: len(run.dir.all_attempts()) for name, run in runs}
    for node in lab.cluster.nodes():
        commands = [p.command() for p in lab.cluster.processes_on(node)]
        assert [c for c in commands if any(part in c for part in OURS)] == []


def test_resume_goes_on_where_a_cancelled_run_stood(lab: Any, same: Callable[..., None]) -> None:
    run = lab.launch("resumed")
    run.wait_step(12)
    lab.cluster.run(["scancel", run.job_id])
    assert run.wait_end().cause is Cause.CANCELLED
    lab.stoker("resume", str(run.dir.path))  # also while Slurm is still clearing up after the cancelled job
    wait_for(lambda: len(run.dir.all_attempts()) == 2, lambda: f"a second attempt: {run.story()}")
    assert run.wait_end().cause is Cause.FINISHED
    assert run.events("restored")[-1]["step"] >= 10
    same(run)


@pytest.mark.parametrize("nodes", [4, 1])
def test_a_run_on_two_nodes_resumes_on_another_number(lab: Any, undisturbed: Any, nodes: int) -> None:
    run = lab.launch(f"resize{nodes}")
    run.wait_step(12)
    lab.cluster.run(["scancel", run.job_id])
    run.wait_end()
    lab.stoker("resume", str(run.dir.path), f"cluster.nodes={nodes}")
    wait_for(lambda: len(run.dir.all_attempts()) == 2, lambda: f"a second attempt: {run.story()}")
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    assert run.events("form")[-1]["world_size"] == nodes
    losses = run.losses()
    assert sorted(losses) == list(range(1, 41))
    assert losses == pytest.approx(undisturbed[0], abs=1e-5)


def test_code_and_config_edited_while_the_job_waits_change_nothing(lab: Any, tmp_path: Path) -> None:
    """The run directory's copies are what runs: the project's own files are changed between submission and start."""
    project = tmp_path / "project"
    project.mkdir()
    lab.cluster.run(["git", "init", "-q"], cwd=project)
    plugin = project / "my_plugin.py"
    plugin.write_text("print('plugin as submitted', flush=True)\n")
    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    settings = own / "mine.yaml"
    settings.write_text("# @package _global_\noptim:\n  lr: 1.0e-3\n")
    configured = ["--config-dir", str(own.parent), "experiment=mine"]
    run = lab.launch("pending", *configured, "plugins=[my_plugin]", "cluster.sbatch.hold=''", cwd=project)
    plugin.write_text("raise SystemExit('plugin edited while the job was waiting')\n")
    settings.write_text("# @package _global_\noptim:\n  lr: 9.0e-3\n")
    lab.cluster.run(["scontrol", "release", run.job_id])
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    assert any("plugin as submitted" in log.read_text() for log in run.dir.path.glob("attempts/*/logs/*.log"))
    assert max(m["lr"] for m in views.metrics(run.dir)) == pytest.approx(1.0e-3)


def test_a_writer_frozen_before_its_rename_harms_nothing(lab: Any, same: Callable[..., None]) -> None:
    """A writer stops between the last check and the rename; the run is requeued elsewhere; the old writer wakes up."""
    run = lab.launch("frozen", failpoints="step:pause-60,checkpoint.publish@step=20@attempt=1:freeze")
    run.wait_step(20)
    wait_for(lambda: list(run.dir.checkpoints.glob(".tmp-step-00000020-a0001*")), lambda: "a save under way")
    old = run.nodes()[0]
    wait_for(lambda: "T" in {p.state for p in lab.cluster.processes_on(old)}, lambda: "a frozen writer")
    # The node is cut off and frozen: Slurm can neither reach nor kill what runs there.
    lab.cluster.cut(old)
    lab.cluster.freeze(old)
    wait_for(lambda: len(run.dir.all_attempts()) == 2, lambda: f"a second attempt: {run.story()}")
    run.wait_step(25)
    lab.cluster.thaw(old)
    lab.cluster.heal(old)
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    same(run)


def test_jobs_by_hand_are_adopted(lab: Any, same: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch submit.sbatch` works as it is and belongs to the run; a second one leaves it to the first."""
    monkeypatch.setenv("STOKER_FAILPOINTS", "step:pause-250")  # the first works on until the second has looked
    run = lab.launch("hand", no_submit=True)
    job = lab.cluster.submit([str(run.dir.script)], cwd=run.dir.path)
    wait_for(run.dir.attempt(1).start.exists, lambda: run.story())
    second = lab.cluster.submit([str(run.dir.script)], cwd=run.dir.path)
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    assert json.loads(run.dir.attempt(1).start.read_text())["job_id"] == job
    lab.empty_queue()
    assert f"job {job} works on {run.dir.path}; nothing to do" in (run.dir.job_logs / f"{second}.log").read_text()
    assert len(run.dir.all_attempts()) == 1
    assert run.job_id == job
    same(run)


def test_packages_that_changed_since_the_launch_are_told(lab: Any) -> None:
    run = lab.launch("packages", no_submit=True)
    env, identity = json.loads(run.dir.env.read_text()), json.loads(run.dir.run.read_text())
    env["packages"]["torch"] = "1.0"
    run.dir.env.write_text(json.dumps(env))
    run.dir.run.write_text(json.dumps(identity | {"package_fingerprint": "of another day"}))
    lab.cluster.submit([str(run.dir.script)], cwd=run.dir.path)
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    (event,) = run.events("packages_changed")
    assert any(change.startswith("torch 1.0 -> ") for change in event["changes"])
