"""The tracker against wandb itself: what its log files and a server hold after kills, rewinds, torn lines and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for the two modules below

from made_run import WANDB_ID, add_steps, add_text, end_attempt, finish, line, make_run, start_attempt
from stoker.launcher.run.effective import effective_config
from stoker.launcher.run.files import read_lines
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next
from stoker.launcher.track import step_of
from stoker.launcher.track_log import log_files, recorded_step, records, writers
from stoker.launcher.track_process import only_tracker
from stoker.launcher.track_start import start_tracker, stop_tracker
from wandb_server import Server, StoredRun, running

KEY = "0123456789abcdef" * 2 + "deadbeef"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A user without W&B settings, whose home stays empty; with leftovers of another W&B run that must not matter."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_RUN_ID", "another")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/nowhere")
    return dict(os.environ)


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def command(run: RunDir, *options: str) -> list[str]:
    return [sys.executable, "-m", "stoker.launcher.track", str(run.path), *options]


def track(run: RunDir, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the tracker to its end."""
    environment = os.environ | variables
    return subprocess.run(command(run, *options), env=environment, capture_output=True, text=True, timeout=120)


def tracking(run: RunDir, **variables: str) -> subprocess.Popen[str]:
    """A tracker that goes on until the run ends."""
    return subprocess.Popen(command(run), env=os.environ | variables, stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def recorded(run: RunDir) -> int:
    return recorded_step(run.report / "wandb", WANDB_ID, step_of)


def sessions(run: RunDir) -> list[list[Any]]:
    """All records of wandb's log files, one list per session, oldest first."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in log_files(run.report / "wandb", WANDB_ID):
        found.append([wandb_internal_pb2.Record.FromString(data) for _, data in records(path.read_bytes())])
    return found


def history(run: RunDir) -> list[dict[str, Any]]:
    """The rows of all sessions, in the order in which they were recorded."""
    rows = [r.history for session in sessions(run) for r in session if r.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def steps(run: RunDir) -> list[int]:
    return [row["_step"] for row in history(run)]


def of_kind(session: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in session if record.WhichOneof("record_type") == kind]


def files_with(folder: Path, text: str) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


@pytest.mark.usefixtures("environment")
def test_each_step_is_recorded_once_over_a_killed_tracker_a_rewind_a_torn_line_and_a_stop(
    tmp_path: Path, server: Server
) -> None:
    run = make_run(tmp_path)
    first = start_attempt(run, 1, 30)
    killed = tracking(run)
    wait_for(lambda: recorded(run) > 0, "the first steps")
    add_steps(first, 31, 60)
    time.sleep(0.3)  # the tracker has handed them to wandb, which has not written them: any other moment is easier
    killed.kill()
    killed.communicate()
    end_attempt(first, Cause.NODE_FAILURE)

    second = start_attempt(run, 41, 50)
    add_text(second, line(51)[:40])
    stopped = tracking(run)
    lock = run.report / "track.lock"
    wait_for(
        lambda: f"process {stopped.pid} " in lock.read_text() and recorded(run) >= 50, "the second attempt's steps"
    )
    stopped.terminate()
    stopped.communicate(timeout=60)
    assert stopped.returncode == 0
    assert 50 <= recorded(run) <= 60  # how much of 31 to 60 the killed one had recorded is chance

    add_text(second, line(51)[40:])
    add_steps(second, 52, 80)
    finish(second)
    last = track(run)
    assert (last.returncode, last.stderr) == (0, "")
    assert last.stdout.splitlines()[-1] == "track: steps up to 80 recorded"

    assert steps(run) == list(range(1, 81))
    rows = {row["_step"]: row for row in history(run)}
    assert [s for s in rows if "rewind/count" in rows[s]] == [61]
    assert [rows[61][f"rewind/{name}"] for name in ("count", "steps", "to_step")] == [1, 20, 40]
    assert (rows[30]["attempt"], rows[61]["attempt"], rows[80]["loss"]) == (1, 2, 0.05)
    every = sessions(run)
    assert {of_kind(session, "run")[0].run_id for session in every} == {WANDB_ID}
    assert all("optim" in {item.key for item in of_kind(session, "run")[0].config.update} for session in every)
    assert [of_kind(every[-1], "exit")[0].exit_code, len(of_kind(every[-1], "preempting"))] == [0, 0]
    assert list((tmp_path / "home").iterdir()) == []

    # wandb's own reader, and what it makes of the segments.
    sync = [sys.executable, "-m", "wandb", "sync", str(run.report / "wandb")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    synced = subprocess.run(sync, env=environment, capture_output=True, text=True, timeout=120)
    assert synced.returncode == 0, synced.stderr
    assert server.runs[WANDB_ID].steps == list(range(1, 81))


@pytest.mark.usefixtures("environment")
def test_a_stopped_tracker_sends_what_there_is_and_marks_the_run_as_preempted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run, 1, 5)
    tracker = start_tracker(run, effective_config(run))
    wait_for(lambda: (run.report / "track.jsonl").exists(), "the first session")
    end_attempt(attempt, Cause.TIME_LIMIT)
    assert stop_tracker(tracker, 60.0)
    assert steps(run) == [1, 2, 3, 4, 5]
    (session,) = sessions(run)
    assert [of_kind(session, "exit")[0].exit_code, len(of_kind(session, "preempting"))] == [1, 1]
    assert "steps up to 5 recorded" in (run.job_logs / "track.log").read_text()


@pytest.mark.usefixtures("environment")
def test_a_tracker_signalled_together_with_the_supervisor_waits_for_its_last_word(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run, 1, 5)
    tracker = start_tracker(run, effective_config(run), patience=120.0)
    assert tracker is not None
    wait_for(lambda: (run.report / "track.jsonl").exists(), "the first session")
    tracker.terminate()
    time.sleep(0.5)
    assert tracker.poll() is None
    add_steps(attempt, 6, 7)
    end_attempt(attempt, Cause.CANCELLED, Next.NOTHING, 143)
    assert tracker.wait(60) == 0
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]
    (session,) = sessions(run)
    assert [of_kind(session, "exit")[0].exit_code, len(of_kind(session, "preempting"))] == [143, 0]


@pytest.mark.usefixtures("environment")
def test_steps_survive_the_death_of_wandbs_service(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run, 1, 20)
    tracker = tracking(run)
    wait_for(lambda: recorded(run) > 0, "the first steps")
    (service,) = writers(run.report / "wandb")
    os.kill(service, signal.SIGKILL)
    done = 20
    while sum(note["event"] == "opened" for note in read_lines(run.report / "track.jsonl")) < 2:
        done += 1  # the run goes on: what wandb takes without a word and loses is sent again
        assert done < 1000, "no second session"
        add_steps(attempt, done, done)
        time.sleep(0.1)
    finish(attempt)
    out, _ = tracker.communicate(timeout=90)
    assert tracker.returncode == 0, out
    assert "trying again" in out
    assert steps(run) == list(range(1, done + 1))


@pytest.mark.usefixtures("environment")
def test_online_a_killed_tracker_goes_on_behind_the_last_step_that_the_server_has(
    tmp_path: Path, server: Server
) -> None:
    server.runs[WANDB_ID] = StoredRun(lines={n: {"_step": n + 1, "loss": 1.0} for n in range(20)})
    run = make_run(tmp_path, "online", project="small", tags=["a"])
    first = start_attempt(run, 1, 25)
    reach = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    killed = tracking(run, **reach)
    wait_for(lambda: recorded(run) >= 25, "steps in wandb's hands")
    killed.kill()
    killed.communicate()
    end_attempt(first, Cause.PREEMPTED)
    finish(start_attempt(run, 22, 30))

    done = track(run, **reach)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("track: online, from step 21 on, to ")
    stored = server.runs[WANDB_ID]
    assert stored.steps == list(range(1, 31))
    assert stored.history[29]["attempt"] == 2
    assert stored.exit_codes == [0]
    assert (stored.name, stored.config["stoker"]["git"]) == (run.path.name, {"sha": "abc123"})
    assert files_with(run.path, KEY) == []
    assert [r for r in server.requests if "hunter2" in r] == []


@pytest.mark.usefixtures("environment")
def test_without_a_connection_it_records_offline_and_says_so_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "online")
    finish(start_attempt(run, 1, 5))
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY, "WANDB_INIT_TIMEOUT": "1"}
    done = track(run, **unreachable)
    assert (done.returncode, done.stderr) == (0, "")
    assert [text for text in done.stdout.splitlines() if "no connection to W&B" in text] == done.stdout.splitlines()[:1]
    assert steps(run) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("environment")
def test_online_without_a_key_is_one_clear_error(tmp_path: Path, server: Server) -> None:
    run = make_run(tmp_path, "online")
    start_attempt(run, 1, 5)
    done = track(run, "--once", WANDB_BASE_URL=server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert "stoker track: error: online tracking needs a W&B key: run `wandb login` once" in done.stderr
    assert "Traceback" not in done.stderr
    server.refuses = True
    done = track(run, "--once", WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    assert (done.returncode, done.stdout) == (1, "")
    assert "stoker track: error: W&B refuses: " in done.stderr


def test_a_second_tracker_refuses_and_names_the_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.report.mkdir()
    with only_tracker(run):
        done = track(run, "--once")
    assert done.returncode == 1
    assert f"another tracker is at work on this run (process {os.getpid()} on " in done.stderr


def test_the_supervisors_tracker_waits_for_the_first_and_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.report.mkdir()
    attempt = start_attempt(run, 1, 5)
    with only_tracker(run):
        tracker = start_tracker(run, effective_config(run))
        assert tracker is not None
        time.sleep(0.5)
        assert tracker.poll() is None
        finish(attempt)
        assert tracker.wait(30) == 0
    assert (run.job_logs / "track.log").read_text() == ""
    assert list(read_lines(run.report / "track.jsonl")) == []


def test_a_disabled_tracker_is_not_started(tmp_path: Path) -> None:
    run = make_run(tmp_path, "disabled")
    assert start_tracker(run, effective_config(run)) is None
    assert stop_tracker(None)


def test_a_tracker_that_does_not_end_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert not stop_tracker(process, 0.2)
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
