"""Drills' verdicts, tables and the pool as pure values; a drill in earnest on this machine."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # for made_run

from made_run import add_steps, end_attempt, finish, make_run, start_attempt
from stoker.launcher import cli
from stoker.launcher.errors import UserError
from stoker.launcher.rehearsal import lab as lab_module
from stoker.launcher.rehearsal import rehearse
from stoker.launcher.rehearsal.drills import DRILLS, Disturbed, Drill, Needs, flip_one_bit, truncate
from stoker.launcher.rehearsal.ground import Ground, temporary_cluster
from stoker.launcher.rehearsal.lab import Lab
from stoker.launcher.rehearsal.measure import Cost
from stoker.launcher.rehearsal.processes import find as find_process
from stoker.launcher.rehearsal.rehearse import Pool, select
from stoker.launcher.rehearsal.report import Result, as_json, markdown, report, table
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.rehearsal.verdict import Calm, Expected, Facts, find, judge
from stoker.launcher.run.outcome import Cause

CALM = Calm({1: 4.0, 2: 2.0, 3: 1.0}, {"shard-00000.safetensors": "abc"})
GOOD = Facts(("node_failure", "finished"), CALM.losses, CALM.weights, (), Cost(2, 3, 30.5))
EXPECTED = Expected(("node_failure",), most_lost=2)


def test_a_run_that_went_as_the_undisturbed_one_passes() -> None:
    assert judge(GOOD, EXPECTED, CALM) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"causes": ("node_failure", "cancelled")}, "it did not finish: node_failure, cancelled"),
        ({"causes": ("node_failure", None)}, "it did not finish: node_failure, (no word)"),
        ({"causes": ("preempted", "finished")}, "attempts ended as preempted, expected node_failure"),
        ({"causes": ("finished",)}, "attempts ended as (none), expected node_failure"),
        (
            {"causes": ("node_failure", "crash", "finished")},
            "attempts ended as node_failure, crash, expected node_failure",
        ),
        ({"cost": Cost(3, 3, 30.5)}, "3 steps lost, expected 2 at most"),
        ({"cost": Cost(2, None, None)}, "no step was done that had not been done before it was disturbed"),
        ({"losses": {1: 4.0, 3: 1.0}}, "1 steps have no loss, the first of them 2"),
        (
            {"losses": {1: 4.0, 2: 2.0000000000000004, 3: 0.0}},
            "2 losses differ, first at step 2: 2.0000000000000004 for 2.0",
        ),
        ({"weights": {"shard-00000.safetensors": "abd"}}, "the final weights differ"),
        ({"weights": {}}, "there is no final checkpoint"),
        (
            {"invalid": ("step-00000002-a0001: no manifest.json",)},
            "invalid checkpoint step-00000002-a0001: no manifest.json",
        ),
    ],
)
def test_each_difference_is_a_reason_of_its_own(change: dict[str, Any], reason: str) -> None:
    assert judge(replace(GOOD, **change), EXPECTED, CALM) == [reason]


def test_an_attempt_that_could_not_say_fits_where_any_cause_does() -> None:
    facts = replace(GOOD, causes=(None, "finished"))
    assert judge(facts, Expected((None,), 2), CALM) == []
    assert judge(GOOD, Expected((None,), 2), CALM) == []
    assert judge(facts, EXPECTED, CALM) == ["attempts ended as (no word), expected node_failure"]


def test_facts_are_read_from_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    end_attempt(start_attempt(run, 1, 3, time=10.0), Cause.PREEMPTED)
    finish(start_attempt(run, 2, 4, time=20.0))
    broken = run.checkpoints / "step-00000004-a0002"
    broken.mkdir()
    (broken / "shard-00000.safetensors").write_bytes(b"weights")
    facts = find(Trial(run.path), steps=4, at=12.0)
    assert facts.causes == ("preempted", "finished")
    assert facts.losses == {1: 4.0, 2: 2.0, 3: 4.0 / 3, 4: 1.0}
    assert facts.cost == Cost(2, 4, 8.0)
    assert list(facts.weights) == ["shard-00000.safetensors"]
    assert facts.invalid == (f"step-00000004-a0002: {broken}: no manifest.json (the save was not finished)",)


RESULTS = [
    Result("node-power", "a node loses its power", (), "", 2, 29.04, 2, 55.0, "/r/node-power-1"),
    Result("warning", "the warning", ("3 steps lost, expected 0 at most",), "", 3, None, 1, 9.0, "/r/warning-1"),
    Result("scancel", "scancel of the job", skipped="needs a private cluster (without --here)"),
    Result("time-limit", "the time limit", skipped="needs a private cluster (without --here)"),
]


def test_the_table_shows_costs_reasons_and_what_was_left_out() -> None:
    assert table(RESULTS) == "\n".join(
        [
            "DRILL       VERDICT  STEPS LOST  SECONDS TO NEXT NEW STEP  ATTEMPTS  WHAT",
            "node-power  PASS              2                      29.0         2  a node loses its power",
            "warning     FAIL              3                         -         1  the warning",
            "warning: 3 steps lost, expected 0 at most",
            "warning: the run is kept in /r/warning-1",
            "left out: scancel, time-limit: needs a private cluster (without --here)",
        ]
    )


def test_markdown_and_json_hold_the_same_rows(tmp_path: Path) -> None:
    assert markdown(RESULTS[:1]).splitlines()[2] == "| node-power | PASS | 2 | 29.0 | 2 | a node loses its power |"
    plain = json.loads(json.dumps(as_json(RESULTS, began=12.5)))
    assert plain["time"] == 12.5
    assert plain["settings"] == {"steps": 40, "checkpoint_interval": 10, "lease": 8, "hang_timeout": 6}
    assert [(d["name"], d["verdict"]) for d in plain["drills"]] == [
        ("node-power", "PASS"),
        ("warning", "FAIL"),
        ("scancel", "SKIP"),
        ("time-limit", "SKIP"),
    ]
    text = report(RESULTS, 1_796_000_000.0, 3, Lab(tmp_path))
    assert text.startswith("# Drills, 2026-11-30\n\n    stoker rehearse --parallel 3 --here\n")
    assert "| warning | FAIL |" in text
    assert "scancel" not in text


def test_every_stop_has_a_drill() -> None:
    names = [d.name for d in DRILLS]
    assert names == [
        *("time-limit", "warning", "preempt-grace", "preempt-now", "node-power", "host-power", "network-cut"),
        *("mid-save", "worker-kill", "worker-hang", "truncated", "flipped-byte", "scancel"),
    ]
    # A warned stop may cost nothing.
    assert {d.name for d in DRILLS if d.expected.most_lost == 0} == {"time-limit", "warning", "preempt-grace"}
    here = {d.name for d in DRILLS if d.needs.value <= Needs.REQUEUE.value}
    assert here == {"warning", "worker-kill", "worker-hang", "truncated", "flipped-byte"}


def test_drills_are_chosen_by_name_in_the_tables_order() -> None:
    assert [d.name for d in select(["scancel", "warning"])] == ["warning", "scancel"]
    assert select([]) == list(DRILLS)
    with pytest.raises(UserError, match=r"no drill warnings; there are time-limit, warning, .*scancel"):
        select(["warnings"])


def test_list_names_the_drills(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rehearse", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(DRILLS)
    assert lines[8] == "worker-kill    kill -9 of a worker"
    assert lines[4] == "node-power     a node loses its power [not with --here]"


def test_without_slurm_it_says_what_to_install_and_what_else_can_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearse, "choose", lambda: (Ground.LOCAL, "not installed: slurmctld"))
    monkeypatch.setattr(rehearse, "short_directory", lambda prefix: pytest.fail("made a directory for nothing"))
    assert cli.main(["rehearse"]) == 1
    assert capsys.readouterr().err == (
        "stoker rehearse: error: not installed: slurmctld; or use --here, which needs no Slurm\n"
    )


def test_a_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()
    assert cli.main(["rehearse", "--here", "--dir", str(tmp_path)]) == 2
    assert "is not empty; name a new directory" in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(rehearse, "short_directory", made.append)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["rehearse", "--here", "--only", "node-power", "scancel"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "stoker rehearse: error: none of these drills can be held here",
        "stoker rehearse: error: node-power: needs a private cluster (without --here)",
        "stoker rehearse: error: scancel: needs a private cluster (without --here)",
    ]
    assert cli.main(["rehearse", "--here", "--json", f"{tmp_path}/no/r.json"]) == 2
    assert f"there is no directory {tmp_path}/no to write it to" in capsys.readouterr().err
    assert cli.main(["rehearse", "--here", "--parallel", "-1"]) == 2
    assert "--parallel -1: expected 1 or more" in capsys.readouterr().err
    assert made == []


class Stub:
    """A lab whose runs are written by hand, done at once, and equal."""

    def __init__(self, root: Path) -> None:
        self.root, self.cluster = root, None
        self.stopped: list[str] = []
        self._lock = threading.Lock()

    def prepare(self) -> None: ...

    def stop(self, name: str) -> None:
        self.stopped.append(name)

    def launch(self, name: str) -> Trial:
        (self.root / name).mkdir()
        with self._lock:
            run = make_run(self.root / name)
        finish(start_attempt(run, 1, 40, time=100.0))
        final = run.checkpoints / "step-00000040-a0001"
        final.mkdir()
        (final / "shard-00000.safetensors").write_bytes(b"weights")
        return Trial(run.path)


def drill(name: str, act: Callable[[Lab, str], Disturbed], needs: Needs = Needs.NOTHING) -> Drill:
    return Drill(name, f"what {name} is", act, Expected((), 0), needs)


def pool(stub: Stub, offer: Needs = Needs.NOTHING, parallel: int = 2) -> Pool:
    return Pool(cast(Lab, stub), offer, parallel)


def test_a_drill_that_cannot_be_held_fails_alone_and_all_is_tidied_up(tmp_path: Path) -> None:
    stub, mended = Stub(tmp_path), []

    def fails(lab: Lab, name: str) -> Disturbed:
        raise TimeoutError("waited 9 s for step 3 of\nits long story")

    def works(lab: Lab, name: str) -> Disturbed:
        return Disturbed(lab.launch(name), 50.0, lambda: mended.append(name), lambda: ["also this"])

    chosen = [drill("bad", fails), drill("good", works), drill("far", works, Needs.SLURM)]
    bad, good, far = pool(stub).run(chosen)
    assert bad.problems == (f"TimeoutError: waited 9 s for step 3 of (all of it: {tmp_path}/bad.failure.txt)",)
    assert (tmp_path / "bad.failure.txt").read_text() == "TimeoutError: waited 9 s for step 3 of\nits long story\n"
    assert (good.verdict, good.attempts, good.steps_lost) == ("FAIL", 1, 0)
    # The weights by hand have no manifest, and nothing new was done after the event.
    assert [p.split(":")[0] for p in good.problems] == ["invalid checkpoint step-00000040-a0001", "also this"]
    assert (far.verdict, far.skipped) == ("SKIP", "needs a private cluster (without --here)")
    assert mended == ["good"]
    assert sorted(stub.stopped) == ["bad", "good"]


def test_drills_run_side_by_side_but_no_more_than_asked_for(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(2, timeout=30)  # breaks unless two are there at once

    def act(lab: Lab, name: str) -> Disturbed:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        time.sleep(0.2)  # a third one would come meanwhile
        with lock:
            running -= 1
        return Disturbed(lab.launch(name), 50.0)

    results = pool(stub).run([drill(f"d{i}", act) for i in range(4)])
    assert [r.name for r in results] == ["d0", "d1", "d2", "d3"]
    assert all("TimeoutError" not in p and "Broken" not in p for r in results for p in r.problems)
    assert most == 2


def test_nothing_is_compared_with_a_run_that_did_not_finish(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    whole = stub.launch

    def cut_short(name: str) -> Trial:
        trial = whole(name)
        trial.dir.attempt(1).metrics(1).unlink()
        add_steps(trial.dir.attempt(1), 1, 39)
        return trial

    stub.launch = cut_short  # type: ignore[method-assign]
    with pytest.raises(UserError, match="the undisturbed run did not finish"):
        pool(stub).run([drill("any", lambda lab, name: Disturbed(lab.launch(name), 50.0))])


def test_damage_is_what_it_says(tmp_path: Path) -> None:
    contents = struct.pack("<1000I", *range(1000))
    for name in ("shard-00000.safetensors", "shard-00001.safetensors"):
        (tmp_path / name).write_bytes(contents)
    flip_one_bit(tmp_path)
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == contents
    flipped = (tmp_path / "shard-00001.safetensors").read_bytes()
    assert [i for i in range(4000) if flipped[i] != contents[i]] == [3936]
    assert bin(flipped[3936] ^ contents[3936]).count("1") == 1
    truncate(tmp_path)
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == contents[:-100]


def stoker(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stoker.launcher.cli", *argv]
    return subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_drill_on_this_machine(tmp_path: Path) -> None:
    process = stoker("rehearse", "--here", "--only", "truncated", "--dir", "runs", "--json", "r.json", cwd=tmp_path)
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 0, text
    (result,) = json.loads((tmp_path / "r.json").read_text())["drills"]
    assert (result["verdict"], result["steps_lost"], result["attempts"]) == ("PASS", 15, 1)
    assert 0 < result["seconds"] < 60


# As `stoker run` before it hears anything: a process in a session of its own below it.
DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.write(1, b"%d\\n" % below.pid)
time.sleep(600)
"""


def test_a_lab_that_is_closed_leaves_no_process_and_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_module, "stoker_argv", lambda argv: [sys.executable, "-c", DEAF])
    monkeypatch.setattr(lab_module, "_END_LIMIT", 0.1)
    lab, errors = Lab(tmp_path), list[str]()

    def launch() -> None:
        try:
            lab.launch("a")
        except UserError as e:
            errors.append(str(e))

    drill_thread = threading.Thread(target=launch)
    drill_thread.start()
    wait_for(lambda: (tmp_path / "a.log").exists() and (tmp_path / "a.log").read_text(), lambda: "its start")
    below = int((tmp_path / "a.log").read_text())
    lab.close()
    wait_for(lambda: find_process(below) is None, lambda: "the end of what ran below", 10.0)
    drill_thread.join(30)
    assert ["stoker run did not start" in error for error in errors] == [True]
    for again in (lambda: lab.launch("b"), lambda: lab.stoker("resume", "a")):
        with pytest.raises(UserError, match="the rehearsal is being stopped"):
            again()


def test_an_interrupted_rehearsal_leaves_no_process(tmp_path: Path) -> None:
    process = stoker("rehearse", "--here", "--only", "warning", "--dir", "runs", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/calm-*/submissions/*.local.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert f"stopped; what was done so far is kept in {tmp_path}/runs" in text
    ours = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _bytes(p)]
    assert ours == []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slurm
@pytest.mark.full
def test_the_whole_rehearsal_passes(tmp_path: Path) -> None:
    before = set(os.listdir("/tmp"))
    process = stoker("rehearse", "--report", "report.md", cwd=tmp_path)
    text, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, text
    assert text.count(" PASS ") == 2 * len(DRILLS)
    assert (tmp_path / "report.md").read_text().count("| PASS |") == len(DRILLS)
    assert not {name for name in set(os.listdir("/tmp")) - before if name.startswith("stoker-rehearse")}


@pytest.mark.slurm
@pytest.mark.full
def test_the_rehearsal_in_an_allocation_uses_its_nodes(tmp_path: Path) -> None:
    with temporary_cluster(ClusterSpec(nodes=3, isolate=True, share=(str(tmp_path),))) as cluster:
        command = [sys.executable, "-m", "stoker.launcher.cli", "rehearse", "--here"]
        allocation = ["salloc", "--quiet", "--nodes=3", "--exclusive", "--time=30"]
        done = cluster.run([*allocation, *command], cwd=tmp_path, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 2 * 4
    assert "left out: warning: an interactive allocation is not requeued" in done.stdout
    assert list(tmp_path.iterdir()) == []
