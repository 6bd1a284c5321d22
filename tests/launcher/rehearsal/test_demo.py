"""The demonstration: what it tells and demands, from runs written by hand; and it itself, on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # for made_run

from made_run import add_text, end_attempt, finish, line, make_run
from stoker.launcher.errors import UserError
from stoker.launcher.process import loop_process
from stoker.launcher.rehearsal import ground, programs
from stoker.launcher.rehearsal.demo import disturbance
from stoker.launcher.rehearsal.demo_summary import problems, screen
from stoker.launcher.rehearsal.ground import Ground
from stoker.launcher.rehearsal.narrate import Narrator, Terminal
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.files import append_line, create_json, to_json
from stoker.launcher.run.layout import RunDir, open_run
from stoker.launcher.run.outcome import Cause
from stoker.launcher.run.submissions import submissions


class Made:
    """A run of 20 steps that lost n2 at time 107 after step 7, and went on from step 5. Times: step + 100, + 200."""

    def __init__(self, root: Path) -> None:
        self.run = make_run(root)

    def attempt(self, first: int, last: int, nodes: list[str], base: float) -> None:
        attempt = claim(self.run)
        number = attempt.number
        create_json(attempt.start, {"submission": 1, "time": base, "nodes": ",".join(nodes), "job_id": "7"})
        clock = count(int(base))

        def tell(writer: str, event: str, **fields: Any) -> None:
            record = {"time": float(next(clock)), "writer": writer, "attempt": number, "event": event}
            append_line(attempt.events(writer), to_json(record | fields))

        tell("supervisor", "attempt_started", nodes=",".join(nodes), job_id="7")
        tell("supervisor", "form", generation=1, nodes=nodes)
        if first > 1:
            tell(nodes[0], "restored", rank=0, step=first - 1)
        tell(nodes[0], "first_step", rank=0, step=first)
        for step in range(first, last + 1):
            validation = {"eval_loss": 9.0 / step} if step % 5 == 0 else {}
            add_text(attempt, line(step, loss=8.0 / step, time=base + step, **validation))
        if last == 20:
            tell("supervisor", "attempt_ended", cause="finished", next="nothing", reason="all 20 steps are done")
            finish(attempt)
        else:
            tell(nodes[0], "checkpoint_saved", rank=0, step=5, bytes=12_600_000)
            tell("supervisor", "agent_lost", node="n2", reason="no word for 8 s")
            tell("supervisor", "attempt_ended", cause="node_failure", next="requeue", reason="node n2 is lost")
            end_attempt(attempt, Cause.NODE_FAILURE, time=125.0)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path)
    made.attempt(1, 7, ["n1", "n2"], 100.0)
    return made


def test_the_screen_shows_attempts_losses_and_where_the_time_went(made: Made) -> None:
    made.attempt(6, 20, ["n3", "n4"], 200.0)
    text = screen(made.run, "loss.png", event=107.0)
    assert "loss plot       loss.png\n" in text
    assert "  1  n1,n2  1-7    node_failure: ended by node_failure\n" in text
    assert "  2  n3,n4  6-20   finished: ended by finished\n" in text
    assert "steps lost      2 " in text
    assert "recovery        101 s from the loss" in text
    assert " 18 s until it was noticed, 75 s in the queue, 6 s to start, 2 s for 2 steps once more\n" in text
    assert "loss            2.343 -> 0.535 (first and last 10 steps)\n" in text
    assert "validation      1.800 -> 0.450\n" in text
    # The lines that name the directory are as long as its name.
    assert max(len(line) for line in text.splitlines() if made.run.path.name not in line) <= 120


def test_all_is_well_when_the_run_went_on_elsewhere_and_finished(made: Made) -> None:
    made.attempt(6, 20, ["n3", "n4"], 200.0)
    assert problems(made.run, steps=20, victim="n2", is_on_slurm=True) == []


def test_everything_that_did_not_happen_is_named(made: Made) -> None:
    assert problems(made.run, steps=20, victim="n2", is_on_slurm=True) == [
        "the run did not finish: node_failure: ended by node_failure",
        "the run did not go on from a checkpoint",
        "the loss of n2 did not lead to a second attempt",
        "13 of 20 steps have no metrics, the first of them 8",
        "the loss did not fall: 2.963 -> 2.963",
    ]


def test_a_victim_that_takes_part_again_is_a_problem_on_slurm_only(made: Made) -> None:
    made.attempt(6, 20, ["n2", "n3"], 200.0)
    took_part = "n2, which was lost, took part in a later attempt"
    assert problems(made.run, steps=20, victim="n2", is_on_slurm=True) == [took_part]
    assert problems(made.run, steps=20, victim="n2", is_on_slurm=False) == []


def told(text: str) -> list[str]:
    return [re.sub(r"^ *\d+\.\d s  ", "", line) for line in text.splitlines()]


def test_each_event_is_told_once_in_a_plain_line(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(made.run, Terminal())
    narrator.look()
    narrator.look()
    assert told(capsys.readouterr().out) == [
        "attempt 1 starts on n1,n2",
        "first step of attempt 1: step 1, loss 8.000",
        "step 5, loss 1.600, validation 1.800; checkpoint, 13 MB",
        "the supervisor lost n2: no word for 8 s",
        "Slurm noticed; the run is requeued: node_failure (node n2 is lost)",
    ]
    made.attempt(6, 20, ["n3", "n4"], 200.0)
    narrator.broken_at, narrator.reached = 107.0, 7
    narrator.look()
    assert told(capsys.readouterr().out) == [
        "attempt 2 starts on n3,n4 (95 s after the end of the one before)",
        "restored the checkpoint of step 5",
        "first step of attempt 2: step 6, loss 1.333",
        "finished: all 20 steps are done",
        "first new step: 8, 101 s after",
    ]


@pytest.mark.parametrize(
    ("steps", "interval", "saved", "when"),
    [(200, 40, 80, 100), (24, 8, 8, 12), (250, 50, 100, 125), (10, 5, 5, 7), (3, 1, 1, 2)],
)
def test_the_node_is_lost_near_the_middle_and_after_a_checkpoint(
    steps: int, interval: int, saved: int, when: int
) -> None:
    assert disturbance(steps, interval) == (saved, when)


def test_a_run_too_short_for_an_interruption_is_refused() -> None:
    with pytest.raises(UserError, match=r"train.steps=100 with checkpoint.interval=100 .* at least 151 steps"):
        disturbance(100, 100)


def test_without_slurm_the_ground_is_local_and_the_reason_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "missing", lambda spec: ("slurmctld", "munged"))
    found, reason = ground.choose()
    assert found is Ground.LOCAL
    assert reason.startswith("not installed: slurmctld, munged; as root: apt-get install slurm-wlm")
    assert "\n" not in reason


def test_without_namespaces_the_nodes_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "missing", lambda spec: ())
    monkeypatch.setattr(ground, "namespaces_denied", lambda: "Operation not permitted")
    found, reason = ground.choose()
    assert found is Ground.PLAIN
    assert reason.endswith("make namespaces (Operation not permitted)")


def demo(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stoker.launcher.rehearsal.demo", *argv]
    return subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_of(cwd: Path) -> RunDir:
    """The newest run of the demonstrations held there."""
    return open_run(max((cwd / "demo-out").glob("demo-*"), key=lambda path: path.stat().st_mtime))


SHORT = ["train.steps=24", "checkpoint.interval=8", "train.eval_interval=8", "data.seq_len=64"]
SHORT += ["train.global_batch=4", "train.micro_batch=2", "optim.warmup_steps=5"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations here share the tokenised text."""
    return tmp_path_factory.mktemp("demo")


@pytest.mark.xdist_group("demo")
def test_the_local_demonstration_loses_an_agent_goes_on_and_finishes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The save is still being written at the step of the disturbance, and the run is long enough for it to end.
    slow = "step@attempt=1:pause-50,checkpoint.write@step=96@rank=0@attempt=1:pause-1500"
    monkeypatch.setenv("STOKER_FAILPOINTS", slow)
    process = demo("--local", *SHORT, "train.steps=200", "train.eval_interval=100", cwd=place)
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    lines = told(text)
    assert lines[1].startswith("text: Python's own standard library, ")
    assert any(re.fullmatch(r"\$ kill -9 \d+", line) for line in lines)
    (restored,) = [m for line in lines if (m := re.fullmatch(r"restored the checkpoint of step (\d+)", line))]
    assert int(restored[1]) >= 96
    assert "finished: all 200 steps are done" in lines
    run = run_of(place)
    picture = run.report / "loss.png"
    assert f"loss plot       {picture.relative_to(place)}" in lines
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_an_interrupted_demonstration_leaves_nothing_running(place: Path, number: signal.Signals) -> None:
    process = demo("--local", *SHORT, "train.steps=100000", cwd=place)
    assert process.stdout is not None
    seen = []
    for said in process.stdout:
        seen.append(said)
        if "first step of attempt 1" in said:
            break
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(seen) + rest
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"stoker demo: stopped by {name}; nothing that it started runs any more" in rest
    loop = loop_process(submissions(run_of(place))[-1])
    assert loop is not None
    assert loop.is_alive() is False


@pytest.mark.xdist_group("demo")
def test_what_fails_on_the_way_ends_it_with_the_reason(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_FAILPOINTS", "step@step=3@rank=1:exit")
    process = demo("--local", *SHORT, "resilience.max_restarts=0", cwd=place)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 1, text
    (error,) = [line for line in text.splitlines() if line.startswith("stoker demo: error:")]
    run = run_of(place).path.relative_to(place)
    there = "step 12 and the checkpoint of step 8"
    assert error.startswith(f"stoker demo: error: the run ended before {there}: crash: rank 1 exited with code 66")
    assert error.endswith(f"; `stoker logs {run}` shows more")


@pytest.mark.xdist_group("demo")
def test_a_refused_launch_ends_it_with_the_reason(place: Path) -> None:
    process = demo("--local", *SHORT, "train.step=24", cwd=place)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 1, text
    assert "stoker demo: error: the launch failed (exit code 2):\nstoker demo: error: stoker launch: error: " in text


@pytest.mark.slurm
@pytest.mark.full
@pytest.mark.parametrize("is_isolated", [True, False])
def test_the_whole_demonstration_on_slurm(tmp_path: Path, is_isolated: bool) -> None:
    before = set(os.listdir("/tmp"))
    program = "from stoker.launcher.rehearsal import demo, ground; import sys; "
    program += "" if is_isolated else "ground.namespaces_denied = lambda: 'denied'; "
    command = [sys.executable, "-c", f"{program}sys.exit(demo.main([]))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    lines = told(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line.startswith("n2 is switched off at step 1") for line in lines)
    assert any(re.match(r"Slurm noticed after \d+ s; the run is requeued: node_failure", line) for line in lines)
    assert "restored the checkpoint of step 80" in lines
    assert "finished: all 200 steps are done" in lines
    assert lines[-1] == "the cluster is gone without a trace"
    assert not {name for name in set(os.listdir("/tmp")) - before if name.startswith("stoker-demo")}
