"""What `stoker cluster` prints and returns. Behaviour of the cluster itself is tested elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from stoker.launcher.rehearsal import cli, programs
from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.spec import ClusterSpec


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_without_slurm_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "_SYSTEM_PATH", ())
    directory = Path("/tmp/stk-never-made")
    status, out, err = run(capsys, "up", "--db", "--dir", str(directory))
    assert (status, out) == (1, "")
    assert err.startswith("stoker cluster up: not installed: slurmctld, slurmd, ")
    assert err.endswith(
        "as root: apt-get install slurm-wlm munge iproute2 procps && apt-get install mariadb-server slurmdbd\n"
    )
    assert not directory.exists()


@pytest.mark.parametrize(
    "verb", [("status",), ("env",), ("exec", "true"), ("crash", "n1"), ("stop-controller",), ("preempt", "7")]
)
def test_commands_without_a_cluster_say_so(capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]) -> None:
    status, out, err = run(capsys, verb[0], "--dir", "/tmp/stk-never-made", *verb[1:])
    assert (status, out) == (1, "")
    assert err == f"stoker cluster {verb[0]}: no cluster is up in /tmp/stk-never-made: `stoker cluster up` first\n"


def test_down_without_a_cluster_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "down", "--dir", "/tmp/stk-never-made") == (0, "no cluster in /tmp/stk-never-made\n", "")


def test_impossible_sizes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "stoker cluster up: nodes = 0: expected 1 to 120\n"
    assert run(capsys, "up", "--nodes", "0", "--dir", "/tmp/stk-never-made") == (1, "", expected)


def test_the_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CLUSTER", "/tmp/elsewhere")
    assert cli.default_directory() == "/tmp/elsewhere"
    monkeypatch.delenv("STOKER_CLUSTER")
    monkeypatch.setenv("HOME", "/home/alice")
    assert cli.default_directory() == "/home/alice/.cache/stoker/cluster"


@pytest.mark.slurm
def test_status_env_and_preempt_of_a_cluster_that_is_up(
    need_slurm: None, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--dir", str(directory))
    with Cluster.start(ClusterSpec(nodes=2), directory) as cluster:
        cluster.crash("n2")
        status, out, _ = run(capsys, "status", *where)
        assert status == 0
        assert out.splitlines()[1] == "daemons: munged slurmctld"
        assert [line.split()[:4] for line in out.splitlines() if line.startswith("n")] == [
            ["n1", "idle", "power", "on"],
            ["n2", "idle", "power", "off"],
        ]
        job = cluster.submit(["-w", "n1", "--output=/dev/null", "--wrap=sleep 600"])
        cluster.wait_for_job(job, "RUNNING")
        status, out, _ = run(capsys, "preempt", *where, job, "--seconds", "1")
        assert (status, out.strip()) == (0, str(int(job) + 1))
        _, out, _ = run(capsys, "env", *where)
        script = f"{out}\nsqueue -h -o %i"
        shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=20, check=True)
        assert job in shell.stdout.split()
        assert run(capsys, "start", *where, "n1")[0] == 1
        assert run(capsys, "start", *where, "n2")[0] == 0
    assert not directory.exists()
