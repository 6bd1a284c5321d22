"""`stoker report`: the story from the files, and an archive that holds all but secrets, of damaged runs too."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for the module below

from made_run import add_steps, add_text, end_attempt, finish, make_run, start_attempt
from stoker.launcher import bundle, cli
from stoker.launcher.report_text import summary
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.files import create_json
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause
from stoker.launcher.state import RunState, State

HEX = "f123456789abcdef0123456789abcdef01234567"  # as a W&B key


@pytest.fixture
def run(tmp_path: Path, fake_slurm: Any) -> RunDir:
    """Two attempts: the first lost steps 8 to 10."""
    run = make_run(tmp_path)
    first = start_attempt(run, 1, 10)
    end_attempt(first, Cause.NODE_FAILURE, step=10, node="n2")
    second = start_attempt(run)
    add_steps(second, 8, 20)
    finish(second)
    return run


def report(run: RunDir, *options: str) -> int:
    return cli.main(["report", str(run.path), *options])


def packed(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        names = tar.getnames()
        assert all(n.startswith(f"{path.name.removesuffix('.tar.gz')}/") for n in names)
        return {n.split("/", 1)[1]: tar.extractfile(n).read().decode() for n in names}  # type: ignore[union-attr]


def test_the_story_tells_causes_and_costs(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(run.attempt(1).events("n2"), "n2", 1).write("hung_at", rank=3, at="x.py:9 in read")
    assert report(run) == 0
    text = capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    # Step 10 was through at second 10, and step 11, the next that nobody had done, at second 11 of made-up time.
    assert [(r[1], r[6], r[7], r[8], r[9]) for r in rows[1:]] == [
        ("1", "1-10", "node_failure", "3", "1 s"), ("2", "8-20", "finished", "-", "-"),
    ]  # fmt: skip
    assert "- 1: ended by node_failure" in text
    assert "- done again: 3 steps, 1 s" in text
    assert "steps that count" in text
    assert "hung_at: rank=3, at=x.py:9 in read" in text


def own_script(root: Path) -> RunDir:
    run = make_run(root)
    config = json.loads(run.config_json.read_text())
    config["task"] |= {"cmd": ["python", "mine.py"]}
    run.config_json.write_text(json.dumps(config))
    return run


def test_of_an_own_script_only_what_it_tells_is_told(tmp_path: Path) -> None:
    run = own_script(tmp_path)
    attempt = start_attempt(run)
    working, over = RunState(State.RUNNING), RunState(State.UNKNOWN)
    text = summary(run, working)
    assert "## Time\n\nno step yet, as far as the script tells\n" in text
    assert "- steps:" not in text  # train.steps is the built-in trainer's
    assert "## Checkpoints" not in text
    add_text(attempt, '{"step": 1, "time": 1700000001.0}\n{"step": 2, "time": 1700000002.0}\n')
    text = summary(run, working)
    assert "## Time\n\n- goodput: not known; the metrics do not say" in text
    assert "- from the first start to the last sign of life: 2 s\n" in text
    ends = [
        line.split("|")[7].strip()
        for text in (text, summary(run, over))
        for line in text.splitlines()
        if "| 1 |" in line
    ]
    assert ends == ["running", "no word"]
    add_text(attempt, '{"step": 3, "time": 1700000004.0, "step_seconds": 2.0}\n')
    assert "- goodput: 50.0% of 4 s went into 3 steps that count" in summary(run, working)


def test_only_the_newest_attempt_runs(run: RunDir) -> None:
    start_attempt(run)
    start_attempt(run)
    rows = [line.split("|") for line in summary(run, RunState(State.RUNNING)).splitlines() if line.startswith("| ")]
    assert [row[7].strip() for row in rows[1:]] == ["node_failure", "finished", "no word", "running"]


def test_a_bundle_holds_what_is_needed_and_says_so(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "code.tar.gz").write_bytes(b"code")
    shard = run.checkpoints / "step-00000010-a0001"
    shard.mkdir()
    (shard / "manifest.json").write_text("{}")
    (shard / "shard-00000.safetensors").write_bytes(b"weights")
    target = tmp_path / "b.tar.gz"
    assert report(run, "--bundle", str(target)) == 0
    said = capsys.readouterr().out
    found = packed(target)
    for name in (
        "run/run.json", "run/config.json", "run/submissions/0001.json", "run/attempts/0001/outcome.json",
        "run/attempts/0002/metrics-g0001.jsonl", "run/checkpoints/step-00000010-a0001/manifest.json", "summary.md",
        "files.txt", "versions.txt", "CONTENTS.txt",
    ):  # fmt: skip
        assert name in found
        assert name in said or name == "CONTENTS.txt"
    assert not [n for n in found if n.endswith(("safetensors", "code.tar.gz"))]
    assert "shard-00000.safetensors" in found["files.txt"]
    assert target.stat().st_mode & 0o777 == 0o600
    assert report(run, "--bundle", str(target)) == 2, "never over another file"
    assert report(run, "--bundle", str(tmp_path / "c.tar.gz"), "--with-code") == 0
    assert packed(tmp_path / "c.tar.gz")["code.tar.gz"] == "code"
    assert not list(tmp_path.glob(".tmp-*"))


def test_no_planted_secret_leaves(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_slurm: Any
) -> None:
    secrets = [f"Secret{n:02d}x" for n in range(20)]
    s = iter(secrets)
    monkeypatch.setenv("OUR_API_KEY", next(s))
    create_json(run.submissions / "0001.job.json", {"job_id": "12", "cluster": None})
    fake_slurm.program("scontrol", f"echo 'JobId=12 Comment=--token={next(s)} AdminPassword={next(s)}'")
    fake_slurm.program("squeue", f"echo 'hf_abcdefghijklmnopqrstu {secrets[0]}'")
    fake_slurm.program("sacct", f"echo https://u:{next(s)}@h/")
    fake_slurm.program("sinfo", f"echo slurm 22.05; echo DB_SECRET={next(s)} >&2")
    (run.path / "config.yaml").write_text(
        f"cluster:\n  env:\n    HF_TOKEN: {next(s)}\n    api_keys:\n    - {next(s)}\n"
    )
    (run.path / "overrides.txt").write_text(f"cluster.env.X_TOKEN={next(s)}\n")
    (run.path / "submit.sbatch").write_text(
        f"export A_PASSWORD='{next(s)} {next(s)}'\ncurl -u a:b https://{next(s)}@h\n"
    )
    create_json(run.env, {"variables": {"ONE_KEY": next(s), "LIST_TOKENS": [next(s)], "A_SECRET": {"a": next(s)}}})
    (run.job_logs / "12.log").write_text(f"login x password {next(s)}\nAuthorization: Bearer {next(s)}\n")
    events = EventLog(run.attempt(1).events("n1"), "n1", 1)
    events.write("failed", traceback=f"KeyError\n  client(token='{next(s)}')\nOUR_API_KEY {secrets[0]}")
    # The name of this one is beyond the part that is kept.
    cut = "W_TOKEN=" + "y" * bundle.TEXT + next(s)
    run.attempt(1).log("n1").write_text(f"{cut}\n[0] wandb: {HEX}\n[0] {'x' * 50} {secrets[0]}\n")
    last = next(s)  # its name is told after it was used
    with open(run.attempt(2).metrics(1), "a") as f:
        f.write('{"step": 21, "my_secret": "' + last + '"}\n')
    with open(run.attempt(2).log("n1"), "a") as f:
        f.write(f"connecting with {last}\n")
    (run.attempt(2).path / "health.json").write_text('{"torn": "AKIAIOSFODNN7EXAMPLE", "gpu_token": "' + next(s))
    assert report(run, "--bundle", str(tmp_path / "b.tar.gz")) == 0
    found = packed(tmp_path / "b.tar.gz")
    everything = "\n".join([*found.values(), capsys.readouterr().out])
    assert next(s, None) is None, "all were planted"
    for secret in [*secrets, HEX, "hf_abcdef", "AKIAIOSF", "hunter2"]:
        assert secret not in everything, secret
    assert "abc123" in found["run/run.json"], "what is no secret is there"
    assert len(set(re.findall(r"<secret-\d+>", everything))) >= 15
    assert "slurm/12-scontrol-show-job.txt" in found


def test_a_damaged_run_is_packed_as_far_as_it_goes(tmp_path: Path, run: RunDir) -> None:
    run.config_json.write_text("{torn")
    run.attempt(1).outcome.write_bytes(b"\xff\xfe\x00")
    (run.submissions / "0001.json").write_text("[]")
    (run.attempt(2).path / "start.json").unlink()
    os.mkfifo(run.path / "slurm" / "pipe.log")
    os.symlink("/etc/passwd", run.path / "slurm" / "link.log")
    (run.attempt(2).path / "logs").rmdir()
    (run.attempt(2).path / "metrics-gX.jsonl").mkdir()
    assert report(run, "--bundle", str(tmp_path / "b.tar.gz")) == 0
    found = packed(tmp_path / "b.tar.gz")
    assert found["run/config.json"] == "{torn"
    assert "root:" not in "".join(found.values())
    for note in ("slurm/pipe.log: not a plain file", "run/attempts/0002/start.json: not there", "link.log"):
        assert note in found["CONTENTS.txt"]
    assert report(run) == 0


def test_events_that_cannot_be_read_are_not_told_as_none(
    tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = run.attempt(1).path / "events"
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if os.fspath(path) == str(locked):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # the tests may run as root, whom no mode keeps out
    EventLog(run.attempt(2).events("n2"), "n2", 2).write("ready")
    assert report(run) == 0
    story = capsys.readouterr().out
    assert "\nnone of note in what could be read; see below\n" in story
    assert f"- events of attempt 1: [Errno 13] Permission denied: '{locked}'\n" in story
    EventLog(run.attempt(2).events("n2"), "n2", 2).write("hung_at", rank=3)
    assert report(run, "--bundle", str(tmp_path / "b.tar.gz")) == 0
    found = packed(tmp_path / "b.tar.gz")
    assert "attempt 2, hung_at: rank=3" in found["summary.md"]
    assert "run/attempts/0001/events/: Permission denied" in found["CONTENTS.txt"]


def test_a_name_and_a_home_are_masked_when_asked(tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jdoe")
    monkeypatch.setattr("getpass.getuser", lambda: "jdoe")
    run.attempt(1).log("n1").write_text("read /home/jdoe/data as jdoe, mail jdoe@site.example; jdoesn't\n")
    assert report(run, "--bundle", str(tmp_path / "b.tar.gz"), "--anonymous") == 0
    text = packed(tmp_path / "b.tar.gz")["run/attempts/0001/logs/n1.log"]
    assert text == "read ~/data as <user>, mail <mail>; jdoesn't\n"


def test_a_log_is_cut_to_its_last_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\nsecond\nthird\n")
    assert bundle.tail(log, 14) == ("second\nthird\n", "the last 13 of 19 bytes")
    assert bundle.tail(log, 10) == ("third\n", "the last 6 of 19 bytes")
    assert bundle.tail(log, 100) == ("first\nsecond\nthird\n", "")
    log.write_text("x" * 50)
    assert bundle.tail(log, 10) == ("", "left out: one line of over 10 bytes")
