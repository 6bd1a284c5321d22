"""`stoker launch`: what is frozen, and that nothing is left of what could not be launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.load import load
from stoker.launcher import cli, code, freeze
from stoker.launcher.run import badnodes

NAME = re.compile(r"t-\d{6}-\d{6}-[a-z2-9]{4}")


@pytest.fixture
def overrides(tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The least that can be launched, from an empty directory that is no git project."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    return ["data=custom", f"data.sources.0.prefix={tokens}", f"run_root={tmp_path}/runs", "name=t", "data.seq_len=64"]


def launched(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "runs").iterdir()
    return found


def test_frozen_run_directory(
    overrides: list[str], tmp_path: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sekret-value-1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert cli.main(["launch", "--no-submit", *overrides, "seed=5"]) == 0
    run = launched(tmp_path)
    assert NAME.fullmatch(run.name)
    assert sorted(p.name for p in run.iterdir()) == [
        "attempts", "bootstrap.py", "checkpoints", "code.tar.gz", "config.json", "config.yaml", "env.json",
        "overrides.txt", "run.json", "slurm", "submissions", "submit.sbatch",
    ]  # fmt: skip
    identity = json.loads((run / "run.json").read_text())
    assert (identity["name"], identity["seed"]) == ("t", 5)
    assert run.name == f"t-{identity['id']}"
    assert identity["wandb_id"] == identity["id"]
    assert len(identity["package_fingerprint"]) == 64
    assert identity["command"].startswith("stoker launch --no-submit data=custom")
    assert load(run / "config.json").seed == 5
    assert (run / "overrides.txt").read_text().splitlines() == [*overrides, "seed=5"]
    env = json.loads((run / "env.json").read_text())
    assert env["variables"]["NCCL_DEBUG"] == "INFO"
    assert env["packages"]["omegaconf"].startswith("2.")
    out = capsys.readouterr().out
    assert f"run directory: {run}\nto start it:   sbatch {run}/submit.sbatch\n" == out
    for path in run.rglob("*"):
        assert path.is_dir() or b"sekret-value-1" not in path.read_bytes(), path


def test_frozen_code_is_what_starts(overrides: list[str], tmp_path: Path, fake_slurm: Any) -> None:
    assert cli.main(["launch", "--no-submit", *overrides]) == 0
    run = launched(tmp_path)
    command = [sys.executable, "bootstrap.py", "stoker.launcher.supervise"]
    done = subprocess.run(command, cwd=run, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2, "supervise says that it wants a run directory"
    assert len(list(tmp_path.glob("stoker-*/*/code/stoker/launcher/supervise.py"))) == 1


def test_dry_run_shows_and_leaves_nothing(overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["launch", "--dry-run", *overrides]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    out = capsys.readouterr().out
    assert "\nname: t\n" in out
    assert "\n#SBATCH --job-name=t\n" in out


def test_all_problems_at_once_and_nothing_made(
    overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any
) -> None:
    before = sorted(tmp_path.rglob("*"))
    bad = ["train.global_batch=3", "cluster.time=soon", "cluster.env={MY_KEY: abc123}", "cluster.nodes=9"]
    fake_slurm.program("sbatch", "exit 1")
    fake_slurm.program("scontrol", partitions("main", total_nodes=4))
    assert cli.main(["launch", *overrides, *bad, "cluster.partition=nope"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("stoker launch: error: ") for line in lines)
    for field in ("train.global_batch=3", "cluster.time=soon", "cluster.env.MY_KEY", "cluster.partition=nope"):
        assert any(field in line for line in lines), (field, lines)
    assert "abc123" not in "".join(lines)
    assert [p for p in sorted(tmp_path.rglob("*")) if "bin" not in p.parts] == [
        p for p in before if "bin" not in p.parts
    ]


def partitions(name: str, total_nodes: int) -> str:
    line = f"PartitionName={name} Default=YES DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP"
    return f'case "$*" in *partition) echo "{line} TotalNodes={total_nodes}";; esac'


def test_secret_in_a_set_up_line_is_refused_without_showing_it(
    overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any
) -> None:
    line = "cluster.setup=['export HF_TOKEN=hf_abcdef']"
    assert cli.main(["launch", "--no-submit", *overrides, line]) == 2
    err = capsys.readouterr().err
    assert "cluster.setup sets HF_TOKEN to a written-out value" in err
    assert "hf_abcdef" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("+cluster.env.PROXY='http://me:S3CR3T@proxy.example:3128'", "cluster.env.PROXY"),
        ("cluster.setup=['true', 'curl -H \\'Authorization: Bearer S3CR3T\\' https://x.example']", "cluster.setup[1]"),
        ("task.cmd=[/bin/true, --api-key, S3CR3T]", "task.cmd"),
        ("task.cmd=[/bin/true, '--password=S3CR3T']", "task.cmd"),
    ],
)
def test_what_looks_like_a_secret_is_warned_of_without_showing_it(
    override: str, field: str, overrides: list[str], fake_slurm: Any, capsys: Any
) -> None:
    assert cli.main(["launch", "--no-submit", *overrides, override]) == 0
    err = capsys.readouterr().err
    assert f"stoker: warning: {field}: holds what looks like a key or password" in err
    assert "S3CR3T" not in err


def test_harmless_words_are_not_warned_of(overrides: list[str], fake_slurm: Any, capsys: Any) -> None:
    more = ["+cluster.env.HTTP_PROXY='http://proxy.example:3128'", "cluster.setup=['export HF_TOKEN=$(cat f)']"]
    assert cli.main(["launch", "--no-submit", *overrides, *more, "task.cmd=[/bin/true, --max-tokens, '2048']"]) == 0
    assert "looks like a key" not in capsys.readouterr().err


def test_no_slurm(overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["launch", *overrides]) == 1
    expected = "stoker launch: error: no Slurm here (sbatch not found): use cluster=local, or run this where"
    assert capsys.readouterr().err.startswith(expected)
    assert not (tmp_path / "runs").exists()


def test_no_slurm_hides_no_other_problem(overrides: list[str], fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["launch", *overrides, "train.global_batch=3"]) == 2
    err = capsys.readouterr().err
    assert "train.global_batch=3" in err
    assert "no Slurm here" in err


def accepting(fake_slurm: Any, sbatch: str) -> None:
    fake_slurm.program("sbatch", sbatch)
    fake_slurm.program("scontrol", partitions("main", total_nodes=4))
    fake_slurm.program("squeue", "true")


def test_submission_is_recorded(overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any) -> None:
    accepting(fake_slurm, "echo '*** be nice ***'; echo 4711")
    assert cli.main(["launch", *overrides]) == 0
    run = launched(tmp_path)
    intention = json.loads((run / "submissions/0001.json").read_text())
    assert intention["mode"] == "sbatch"
    assert json.loads((run / "submissions/0001.job.json").read_text())["job_id"] == "4711"
    (call,) = fake_slurm.calls("sbatch")
    assert call == f"--parsable --comment=stoker:{intention['token']} {run}/submit.sbatch"
    assert f"job:           4711\nnext:          stoker status {run}\n" in capsys.readouterr().out


def test_a_full_standard_output_does_not_keep_a_run_from_being_submitted(
    overrides: list[str], tmp_path: Path, fake_slurm: Any
) -> None:
    fake_slurm.program("sbatch", "echo 42")
    command = [sys.executable, "-m", "stoker.launcher.cli", "launch", *overrides]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(fake_slurm.calls("sbatch")) == 1
    assert json.loads((launched(tmp_path) / "submissions" / "0001.job.json").read_text())["job_id"] == "42"
    assert "standard output: [Errno 28]" in done.stderr
    assert "job:           42" in done.stderr


def test_bad_nodes_are_excluded_and_that_is_shown_and_recorded(
    overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any
) -> None:
    fake_slurm.program("sbatch", "echo 41")
    fake_slurm.program(
        "scontrol", 'case "$*" in *partition) echo "PartitionName=main Default=YES State=UP TotalNodes=4";; esac'
    )
    (tmp_path / "runs").mkdir()
    now = time.time()
    badnodes.note(
        tmp_path / "runs" / ".bad-nodes", badnodes.Finding("n3", "it hung", "hang", "another", 1, now, now + 3600.0)
    )
    assert cli.main(["launch", "--dry-run", *overrides, "cluster.exclude=n9"]) == 0
    assert "# to sbatch, for this submission alone: --exclude=n9,n3\n" in capsys.readouterr().out
    directory = tmp_path / "runs" / "r"
    assert cli.main(["launch", *overrides, "cluster.exclude=n9", f"--run-dir={directory}"]) == 0
    assert json.loads((directory / "submissions/0001.json").read_text())["options"] == ["--exclude=n9,n3"]
    assert " --exclude=n9,n3 " in fake_slurm.calls("sbatch")[-1]
    assert "#SBATCH --exclude=n9\n" in (directory / "submit.sbatch").read_text()
    assert cli.main(["launch", "--no-submit", *overrides, f"--run-dir={tmp_path}/runs/s"]) == 0
    assert f"to start it:   sbatch --exclude=n3 {tmp_path}/runs/s/submit.sbatch\n" in capsys.readouterr().out


def test_a_reader_who_left_does_not_keep_a_run_from_being_submitted(
    overrides: list[str], tmp_path: Path, fake_slurm: Any
) -> None:
    fake_slurm.program("sbatch", "echo 42")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "stoker.launcher.cli", "launch", *overrides, "plugins=[not_there]"]
    assert subprocess.run(command, stdout=write, stderr=write, check=False).returncode == 0
    os.close(write)
    assert (launched(tmp_path) / "submissions" / "0001.job.json").exists()


def test_refused_by_slurm_leaves_nothing(overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any) -> None:
    accepting(fake_slurm, "echo 'sbatch: error: Invalid account' >&2; exit 1")
    assert cli.main(["launch", *overrides]) == 1
    assert "error: sbatch refused the job: sbatch: error: Invalid account (exit code 1)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_refusal_keeps_the_other_runs(overrides: list[str], tmp_path: Path, fake_slurm: Any) -> None:
    (tmp_path / "runs" / "other").mkdir(parents=True)
    accepting(fake_slurm, "echo 'Invalid account' >&2; exit 1")
    assert cli.main(["launch", *overrides]) == 1
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["other"]


def test_lost_answer_keeps_the_run(
    overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may be in the queue: its run directory must be there when it starts."""
    monkeypatch.setattr("stoker.launcher.submit._LOOKUPS", (0.0,))
    monkeypatch.setattr("stoker.launcher.submit._AWAY", (0.0,))
    accepting(fake_slurm, "echo 'Socket timed out' >&2; exit 1")
    fake_slurm.program("squeue", "exit 1")
    assert cli.main(["launch", *overrides]) == 1
    run = launched(tmp_path)
    assert (run / "submit.sbatch").is_file()
    assert f"{run} is kept: if no job of yours shows up" in capsys.readouterr().err


def test_run_dir_is_taken_as_given_and_never_twice(
    overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any
) -> None:
    target = tmp_path / "exactly here"
    assert cli.main(["launch", "--no-submit", *overrides, "--run-dir", str(target)]) == 0
    assert (target / "run.json").is_file()
    before = (target / "run.json").read_bytes()
    assert cli.main(["launch", "--no-submit", *overrides, "--run-dir", str(target)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (target / "run.json").read_bytes() == before


def test_run_root_that_cannot_be_made(overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    root = f"run_root={tmp_path}/file/runs"
    assert cli.main(["launch", "--no-submit", *overrides, root]) == 1
    assert (
        f"run_root={tmp_path}/file/runs: cannot make a run directory there: Not a directory" in capsys.readouterr().err
    )


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_run_root_without_permission(overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any) -> None:
    (tmp_path / "runs").mkdir(mode=0o555)
    assert cli.main(["launch", "--no-submit", *overrides]) == 1
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("at", ["code.tar.gz", "config.yaml", "run.json"])
def test_full_disk_leaves_nothing(
    at: str, overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    def pack(snapshot: code.Snapshot, path: Path) -> code.Packed:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    if at == "code.tar.gz":
        monkeypatch.setattr(code, "pack", pack)
    else:
        monkeypatch.setattr(freeze, "write_atomic" if at == "config.yaml" else "write_json", full)
    assert cli.main(["launch", "--no-submit", *overrides, f"run_root={tmp_path}/new/deep"]) == 1
    err = capsys.readouterr().err
    assert f"run_root={tmp_path}/new/deep: cannot make a run directory there: No space left on device" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "new").exists(), "folders that were made for it go, too"


def test_plugin_that_is_not_frozen_is_warned_of(overrides: list[str], fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["launch", "--dry-run", *overrides, "plugins=[my.models]"]) == 0
    assert "warning: plugins: my.models is not in any git project" in capsys.readouterr().err


def test_help_lists_the_options(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    out = capsys.readouterr().out
    for option in ("--dry-run", "--no-submit", "--wait", "--follow", "--config-dir", "--run-dir"):
        assert option in out


def test_ids_sort_by_time() -> None:
    ids = [freeze.new_id(t) for t in (1_796_000_000, 1_796_000_001, 1_900_000_000, 3_000_000_000)]
    assert sorted(ids) == ids
    assert len({freeze.new_id(0) for _ in range(50)}) > 40


def test_run_without_an_allocation(overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["run", *overrides]) == 1
    assert "this is not inside an allocation (SLURM_JOB_ID is not set)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
