"""The very script of docs/own-scripts.md on a real cluster: disturbed in every way, it ends as under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import once
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm

PAGE = Path(__file__).parents[3] / "docs" / "own-scripts.md"
STEPS = 60
SETTINGS = {"STEPS": str(STEPS), "PAUSE": "0.08"}
Weights = dict[str, torch.Tensor]


def example(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the page tells people to do: the script in a git project."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "train.py").write_text(example("python"))
    subprocess.run(["git", "init", "-q", str(directory)], check=True)
    return directory


@pytest.fixture(scope="session")
def calm(shared: Path) -> Weights:
    """The weights after the last step under torchrun, without stoker, Slurm or fault."""
    directory = shared / "own-script-calm"
    with once(directory) as is_first:
        if is_first:
            (directory / "train.py").write_text(example("python"))
            env = os.environ | {"STEPS": str(STEPS), "STOKER_CHECKPOINTS": str(directory), "STOKER_ATTEMPT": "1"}
            env |= {"STOKER_HEARTBEAT": str(directory / "heartbeat")}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
            subprocess.run(command, check=True, timeout=120, cwd=directory, env=env, stdin=subprocess.DEVNULL)
    return weights(directory)


def weights(directory: Path) -> Weights:
    state = torch.load(directory / "latest.pt", weights_only=True)
    assert state["step"] == STEPS
    return dict(state["model"])


@pytest.fixture
def launch(lab: Any, project: Path) -> Callable[..., Trial]:
    def start(name: str, *overrides: str, cmd: tuple[str, ...] = ("python", "train.py"), nodes: int = 2) -> Trial:
        arguments = [f"name={name}", f"run_root={lab.root}", f"cluster.nodes={nodes}", "cluster.time=60"]
        arguments += ["resilience.lease=8", "resilience.warning=60", *overrides]
        lab.stoker("launch", *arguments, "--", *cmd, env=SETTINGS, cwd=project)
        (path,) = lab.root.glob(f"{name}-*")
        return Trial(path)

    return start


@pytest.fixture
def same(calm: Weights) -> Callable[[Trial], None]:
    """Asserts that the run came to its end with the weights of the undisturbed one, bit by bit."""

    def check(run: Trial) -> None:
        outcome = run.wait_end()
        assert (outcome.cause, outcome.exit_code, outcome.reason) == (Cause.FINISHED, 0, "all ranks exited 0"), (
            run.story()
        )
        found = weights(run.dir.checkpoints)
        assert found.keys() == calm.keys()
        assert all(torch.equal(found[name], calm[name]) for name in calm), run.story()

    return check


def process_of(lab: Any, run: Trial, rank: int) -> int:
    """The pid of a rank's process."""
    (found,) = [p for p in lab.cluster.processes_on(run.nodes()[rank]) if p.command().endswith("train.py")]
    return int(found.pid)


def first_steps(run: Trial, attempt: int) -> list[int]:
    """At which rank 0 began in that attempt, by its own words: once for each start of the processes."""
    texts = [log.read_text() for log in sorted(run.dir.attempt(attempt).path.glob("logs/*.log"))]
    return [int(step) for step in re.findall(r"^\[0\] starting at step (\d+)$", "".join(texts), re.MULTILINE)]


def test_preemption_with_grace_loses_no_step(lab: Any, launch: Any, same: Any) -> None:
    run = launch("own-grace")
    run.wait_step(12)
    lab.cluster.preempt(run.job_id)
    same(run)
    first = run.outcomes()[0]
    assert first.cause is Cause.PREEMPTED, run.story()
    (metrics,) = [path for _, path in run.dir.attempt(1).all_metrics()]
    last = [json.loads(line) for line in metrics.read_text().splitlines()][-1]
    # The first start after it: on a busy machine Slurm may take a node for dead later, and there is one more.
    assert first_steps(run, 2)[0] == last["step"], run.story()


def test_power_cut_of_a_node_goes_on_from_the_last_checkpoint(lab: Any, launch: Any, same: Any) -> None:
    run = launch("own-power")
    run.wait_step(12)
    victim = run.nodes()[0]  # rank 0's, and the batch host
    lab.cluster.crash(victim)
    same(run)
    assert first_steps(run, 2)[0] in range(10, STEPS, 10), run.story()
    assert victim not in run.nodes()
    lab.cluster.restart_node(victim)


def test_a_killed_and_then_a_hung_process_are_replaced_in_place(lab: Any, launch: Any, same: Any) -> None:
    run = launch("own-hang", "resilience.hang_timeout=10")
    run.wait_step(12)
    os.kill(process_of(lab, run, 1), signal.SIGKILL)
    wait_for(lambda: len(run.events("form")) == 2, lambda: f"a second generation of {run.story()}")
    run.wait_step(32)
    os.kill(process_of(lab, run, 1), signal.SIGSTOP)
    same(run)
    assert len(run.outcomes()) == 1
    killed, hung = run.events("trouble")
    assert (killed["cause"], killed["rank"], killed["reason"]) == ("crash", 1, "rank 1 ended by SIGKILL")
    # Stopped between its second heartbeat of a step and the next, it has said no less than rank 0, who waits there.
    assert (hung["cause"], hung["node"]) == ("hang", run.nodes()[hung["rank"]]), run.story()


def test_a_shell_script_asks_to_be_started_again(lab: Any, launch: Any, project: Path) -> None:
    """No torch, no port, no heartbeat. Edited while it waits, it runs as it was submitted."""
    script = project / "task.sh"
    script.write_text("echo attempt $STOKER_ATTEMPT of rank $RANK; [ $STOKER_ATTEMPT = 1 ] && exit 75; exit 0\n")
    run = launch("own-shell", "cluster.sbatch.hold=''", cmd=("bash", "task.sh"))
    script.write_text("exit 1\n")
    lab.cluster.run(["scontrol", "release", run.job_id])
    assert run.wait_end().reason == "all ranks exited 0", run.story()
    first, last = run.outcomes()
    assert (first.cause.value, first.next.value) == ("requested", "requeue")
    assert re.fullmatch(r"rank [01] asked to be started again \(exit code 75\)", first.reason)
    assert last.cause is Cause.FINISHED
    logs = "".join(path.read_text() for path in run.dir.attempt(2).path.glob("logs/*.log"))
    assert {"[0] attempt 2 of rank 0", "[1] attempt 2 of rank 1"} <= set(logs.splitlines())
