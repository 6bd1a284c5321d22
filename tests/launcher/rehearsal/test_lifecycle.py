"""Bring-up and take-down: side by side, interrupted, failing, orphaned, without rights; and nothing is ever left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import stoker
from stoker.launcher.rehearsal import processes, programs
from stoker.launcher.rehearsal.cluster import Cluster, ClusterError, NotUp, clear, remains, wait_until
from stoker.launcher.rehearsal.spec import ClusterSpec, Layout

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("need_slurm")]
CLI = [sys.executable, "-m", "stoker.launcher.rehearsal.cli"]


def assert_nothing_left(directory: Path) -> None:
    assert remains(Layout(directory)) == []
    assert not directory.exists()
    assert not Path("/run/netns").exists() or not list(Path("/run/netns").iterdir())


@pytest.mark.parametrize("isolate", [False, True])
def test_nothing_is_left_though_jobs_were_running(directory: Path, isolate: bool) -> None:
    directory.parent.chmod(0o755)
    spec = ClusterSpec(nodes=2, isolate=isolate, share=(str(directory.parent),))
    with Cluster.start(spec, directory) as cluster:
        # A task that ignores signals, and a daemon that left its session and its environment behind.
        stubborn = "trap '' TERM INT HUP USR1; env -i setsid sleep 604 & while :; do sleep 0.1; done"
        script = directory.parent / "stubborn.sh"
        script.write_text(f"#!/bin/sh\n{stubborn}\n")
        script.chmod(0o755)
        cluster.submit(["-N2", "--output=/dev/null", f"--wrap=srun {script}"])
        for node in ("n1", "n2"):
            wait_until(
                lambda node=node: "sleep 604" in [process.command() for process in cluster.processes_on(node)],
                20,
                lambda node=node: f"the daemon on {node}",
            )
        cluster.freeze("n2")
        keeper = cluster.keeper
    assert_nothing_left(directory)
    assert processes.find(keeper) is None
    assert not [process for process in processes.everything() if process.command() == "sleep 604"]


def test_two_clusters_side_by_side_do_not_meet(directory: Path) -> None:
    other = directory.with_name("d")
    for isolate in (False, True):
        spec = ClusterSpec(nodes=2, isolate=isolate)
        with Cluster.start(spec, directory) as first, Cluster.start(spec, other) as second:
            job = first.submit(["--output=/dev/null", "--wrap=sleep 600"])
            first.wait_for_job(job, "RUNNING")
            assert second.run(["squeue", "-h"]).stdout == ""
            second.crash("n1")
            assert len(first.processes_on("n1")) >= 2
            second.down()
            assert first.job(job).state == "RUNNING"
            assert set(first.node_states()) == {"n1", "n2"}
    assert_nothing_left(directory)
    assert_nothing_left(other)


def test_a_second_bring_up_in_the_same_directory_is_refused_and_harms_nothing(directory: Path) -> None:
    with Cluster.start(ClusterSpec(nodes=1), directory) as cluster:
        with pytest.raises(ClusterError, match="already up there"):
            Cluster.start(ClusterSpec(nodes=3), directory)
        assert cluster.node_states() == {"n1": "idle"}
        assert Cluster.attach(directory).spec == cluster.spec


@pytest.mark.parametrize(
    ("setting", "daemon", "isolate"),
    [("SelectType=select/nonsense", "slurmctld", False), ("TaskPlugin=task/nonsense", "slurmd", True)],
)
def test_a_daemon_that_fails_is_named_with_its_last_words(
    directory: Path, setting: str, daemon: str, isolate: bool
) -> None:
    with pytest.raises(ClusterError, match=f"{daemon}.* ended with status 1") as failure:
        Cluster.start(ClusterSpec(nodes=2, isolate=isolate, settings=(setting,)), directory)
    assert any("nonsense" in line for line in failure.value.log)
    assert "nonsense" in str(failure.value)
    assert_nothing_left(directory)


def test_an_interrupt_takes_down_what_was_on_its_way_up(directory: Path) -> None:
    # With a database it takes seconds to come up, so the interrupt falls into it.
    child = subprocess.Popen(
        [*CLI, "up", "--db", "--dir", str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    layout = Layout(directory)
    wait_until(layout.munge_socket.exists, 20, lambda: "the first daemon", pause=0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (130, "")
    assert err == "stoker cluster: interrupted; what had been started is taken down again\n"
    assert_nothing_left(directory)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_cluster_ends_with_the_process_that_started_it(directory: Path, isolate: bool) -> None:
    code = (
        "import sys, time; from stoker.launcher.rehearsal.cluster import *\n"
        "cluster = Cluster.start(ClusterSpec(nodes=2, isolate=bool(int(sys.argv[2]))), sys.argv[1])\n"
        "print(cluster.keeper, flush=True); time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", code, str(directory), str(int(isolate))]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    keeper = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert processes.wait_until_gone(keeper, 20)
    assert_nothing_left(directory)


def test_a_detached_cluster_lives_on_and_another_process_ends_it(directory: Path) -> None:
    done = subprocess.run(
        [*CLI, "up", "--nodes", "1", "--dir", str(directory)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "1 plain nodes" in done.stdout
    cluster = Cluster.attach(directory)
    assert cluster.run(["srun", "echo", "alive"]).stdout == "alive\n"
    cluster.down()
    assert_nothing_left(directory)
    with pytest.raises(NotUp, match="no cluster is up"):
        Cluster.attach(directory)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_cluster_whose_keeper_was_killed_is_cleared_away(directory: Path, isolate: bool) -> None:
    cluster = Cluster.start(ClusterSpec(nodes=1, isolate=isolate), directory)
    job = cluster.submit(["--output=/dev/null", "--wrap=sleep 600"])
    cluster.wait_for_job(job, "RUNNING")
    os.kill(cluster.keeper, signal.SIGKILL)
    # Daemons die with it; tasks of plain nodes are orphans, which are found by their environment.
    assert clear(directory)
    cluster.down()
    assert_nothing_left(directory)


def test_bring_up_replaces_what_a_killed_keeper_left(directory: Path) -> None:
    first = Cluster.start(ClusterSpec(nodes=1), directory)
    job = first.submit(["--output=/dev/null", "--wrap=exec sleep 605"])
    first.wait_for_job(job, "RUNNING")

    def orphans() -> list[str]:
        return [process.command() for process in processes.everything() if process.command() == "sleep 605"]

    wait_until(lambda: orphans() == ["sleep 605"], 20, lambda: "the task")
    os.kill(first.keeper, signal.SIGKILL)
    processes.wait_until_gone(first.keeper, 10)
    assert orphans() == ["sleep 605"]
    with Cluster.start(ClusterSpec(nodes=2), directory) as second:
        assert orphans() == []
        assert set(second.node_states()) == {"n1", "n2"}
    first.down()  # what this process still holds of it


def test_logs_can_be_kept_and_do_not_hinder_the_next_bring_up(directory: Path) -> None:
    cluster = Cluster.start(ClusterSpec(nodes=1), directory)
    cluster.down(keep_logs=True)
    assert sorted(path.name for path in directory.iterdir()) == [".stoker-cluster", "log"]
    assert "slurmctld.log" in {path.name for path in (directory / "log").iterdir()}
    with Cluster.start(ClusterSpec(nodes=1), directory):
        pass
    assert_nothing_left(directory)


def test_daemons_do_not_hold_the_callers_pipes(directory: Path) -> None:
    # communicate() returns at the end of the last process that holds the pipe.
    argv = [*CLI, "up", "--nodes", "1", "--dir", str(directory)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    child.communicate(timeout=60)
    assert Cluster.attach(directory).node_states() == {"n1": "idle"}
    Cluster.attach(directory).down()


def test_accounting_answers_with_a_database(directory: Path) -> None:
    if lacking := programs.missing(ClusterSpec(database=True)):
        pytest.skip(programs.how_to_install(ClusterSpec(database=True), lacking))
    with (
        # As another cluster's server has one open: a server that starts deletes those that it finds.
        tempfile.NamedTemporaryFile(prefix="#sql-temptable-", suffix=".MAI", dir="/tmp") as others,
        Cluster.start(ClusterSpec(nodes=2, database=True), directory) as cluster,
    ):
        assert Path(others.name).exists()
        job = cluster.submit(["-N2", "--output=/dev/null", "--wrap=srun true"])

        def states() -> list[str]:
            return cluster.run(["sacct", "-n", "-P", "-j", job, "-o", "jobid,state,nnodes"]).stdout.split()

        wanted = [f"{job}|COMPLETED|2", f"{job}.batch|COMPLETED|1", f"{job}.0|COMPLETED|2"]
        wait_until(lambda: states() == wanted, 30, lambda: f"{wanted}: {states()}")
        # Nothing but the socket in a private directory leads to the database.
        assert (directory / "private").stat().st_mode & 0o777 == 0o700
        assert "password" not in (directory / "etc" / "slurmdbd.conf").read_text().lower()
    assert_nothing_left(directory)


class OrdinaryUser:
    """Runs `stoker cluster` as a user without any rights. Not root, that is who we are anyhow."""

    def __init__(self, base: Path) -> None:
        self.home = base
        self.argv = [sys.executable]
        self.environment = {**os.environ, "HOME": str(base)}
        if os.geteuid() == 0:
            os.chown(base, 65534, 65534)
            base.chmod(0o755)
            (base / "path").mkdir()
            (base / "path" / "stoker").symlink_to(Path(stoker.__file__).resolve().parent)
            self.environment |= {"PYTHONPATH": str(base / "path"), "PYTHONDONTWRITEBYTECODE": "1"}
            self.argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", self._python()]

    def _python(self) -> str:
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        said = "no Python"
        for python in (sys.executable, "/usr/bin/python3"):
            done = subprocess.run(
                # By way of a shell: setpriv's own exec still has root's view of the files.
                [*as_nobody, "sh", "-c", 'exec "$0" -c "import stoker.launcher.rehearsal.cli"', python],
                env=self.environment,
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return python
            said = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"user nobody cannot run this package: {said}")

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.argv, "-m", "stoker.launcher.rehearsal.cli", *arguments],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )


@pytest.fixture
def ordinary_user() -> Iterator[OrdinaryUser]:
    base = Path(tempfile.mkdtemp(prefix="stk-"))
    yield OrdinaryUser(base)
    clear(base / "c")
    shutil.rmtree(base)


def test_a_plain_cluster_needs_no_rights(ordinary_user: OrdinaryUser) -> None:
    directory = ordinary_user.home / "c"
    up = ordinary_user("up", "--nodes", "2", "--dir", str(directory))
    assert up.returncode == 0, up.stderr
    # Whoever submits there runs as the owner, so nobody else may enter.
    assert directory.stat().st_mode & 0o777 == 0o700
    ran = ordinary_user("exec", "--dir", str(directory), "--", "srun", "-N2", "id", "-u")
    assert ran.stdout.split() == [str(directory.stat().st_uid)] * 2, ran.stderr
    assert ordinary_user("crash", "--dir", str(directory), "n1").returncode == 0
    status = ordinary_user("status", "--dir", str(directory)).stdout
    assert [line.split()[3] for line in status.splitlines() if line.startswith(("n1", "n2"))] == ["off", "on"]
    down = ordinary_user("down", "--dir", str(directory))
    assert down.returncode == 0, down.stderr
    assert_nothing_left(directory)


def test_an_isolated_cluster_needs_no_rights_where_user_namespaces_are_allowed(ordinary_user: OrdinaryUser) -> None:
    directory = ordinary_user.home / "c"
    up = ordinary_user("up", "--isolate", "--nodes", "2", "--dir", str(directory))
    if "does not let an ordinary user make namespaces" in up.stderr:
        assert_nothing_left(directory)
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr

    def run(*arguments: str) -> str:
        done = ordinary_user(arguments[0], "--dir", str(directory), *arguments[1:])
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert sorted(run("exec", "--", "srun", "-N2", "hostname").split()) == ["n1", "n2"]
    # The exported settings work from a shell outside, through the scripts in DIR/bin.
    outside = subprocess.run(
        [*ordinary_user.argv[:-1], "sh", "-c", f"{run('env')}\nsrun -N2 hostname"],
        env={**ordinary_user.environment, "PATH": "/usr/bin:/bin"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert sorted(outside.stdout.split()) == ["n1", "n2"], outside.stderr
    assert run("exec", "--node", "n2", "--", "hostname") == "n2\n"
    # A cut node cannot be reached, a healed one can, a crashed one is back after a start.
    port = (directory / "etc" / "slurm.conf").read_text().split("NodeAddr=10.217.0.12 Port=")[1].split()[0]
    connect = ("exec", "--dir", str(directory), "--node", "n1", "--", "python3", "-c")
    connect = (*connect, f"import socket; socket.create_connection(('n2', {port}), 0.5)")
    for verb, reachable in (("cut", False), ("heal", True), ("crash", False), ("start", True)):
        run(verb, "n2")
        wait_until(
            lambda wanted=reachable: (ordinary_user(*connect).returncode == 0) is wanted, 20, lambda did=verb: did
        )
    run("freeze", "n2")
    assert "frozen" in run("status")
    assert run("down").startswith("down: no process, mount or file")
    assert_nothing_left(directory)
