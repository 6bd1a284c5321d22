"""Finding and ending processes: zombies count as dead, orphans are found, signals reach fresh programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stoker.launcher.rehearsal import processes

SLEEP = ["sleep", "60"]


def test_a_zombie_is_not_found() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    os.kill(child.pid, 0)
    assert processes.find(child.pid) is None
    child.wait()


def test_names_with_parentheses_and_blanks_are_read(tmp_path: Path) -> None:
    program = tmp_path / "a) (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "60"])
    try:
        found = processes.find(child.pid)
        assert found is not None
        assert (found.name, found.parent) == ("a) (b", os.getpid())
    finally:
        child.kill()
        child.wait()


def test_descendants_include_grandchildren_and_not_the_root() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
    try:
        # Both are forks of the shell for a moment, under its name.
        deadline, wanted = time.monotonic() + 10, ["sleep", "sleep"]
        while (names := [p.name for p in processes.descendants(child.pid)]) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert names == wanted
        assert child.pid in {process.pid for process in processes.descendants(os.getpid())}
    finally:
        assert processes.kill_until_none(lambda: processes.descendants(child.pid)) == []
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("environment", "belongs"),
    [
        ({processes.MARKER: "/no/cluster"}, True),
        ({processes.MARKER: "/no/cluster2"}, False),
        ({"SLURM_CONF": "/no/cluster/etc/slurm.conf", "SLURMD_NODENAME": "n1"}, True),
        # A user's shell with the cluster's settings, and a job of another cluster.
        ({"SLURM_CONF": "/no/cluster/etc/slurm.conf"}, False),
        ({"SLURM_CONF": "/no/other/etc/slurm.conf", "SLURMD_NODENAME": "n1"}, False),
    ],
)
def test_what_belongs_to_a_cluster(environment: dict[str, str], belongs: bool) -> None:
    child = subprocess.Popen(SLEEP, env={"PATH": os.environ["PATH"], **environment})
    try:
        found = {process.pid for process in processes.belonging_to(Path("/no/cluster"))}
        assert (child.pid in found) is belongs
    finally:
        child.kill()
        child.wait()


def test_a_step_daemon_is_known_by_its_open_files(tmp_path: Path) -> None:
    # Its environment tells nothing: newer ones write their title over it.
    program = tmp_path / "slurmstepd"
    program.symlink_to("/bin/sleep")
    (tmp_path / "c").mkdir()
    child = subprocess.Popen([str(program), "60"], cwd=tmp_path / "c", env={})
    with open(tmp_path / "c" / "log", "w") as output:
        holder = subprocess.Popen([str(program), "60"], stdout=output, env={})
    try:
        found = {process.pid for process in processes.belonging_to(tmp_path)}
        assert {child.pid, holder.pid} <= found
        assert processes.belonging_to(tmp_path / "c2") == []
    finally:
        for process in (child, holder):
            process.kill()
            process.wait()


def test_a_process_never_belongs_when_it_is_the_one_that_asks(tmp_path: Path) -> None:
    code = "import sys; from stoker.launcher.rehearsal.processes import *; print(belonging_to(Path('/no/cluster')))"
    environment = {**os.environ, processes.MARKER: "/no/cluster"}
    done = subprocess.run(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_spawned_programs_start_with_default_signals_and_end_with_us(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; from pathlib import Path; from stoker.launcher.rehearsal import processes\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "argv = ['sh', '-c', 'grep -E \"SigIgn|SigBlk\" /proc/self/status; exec sleep 60']\n"
        "print(processes.spawn(argv, {'PATH': '/usr/bin:/bin'}, Path(sys.argv[1])), flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"
    child = subprocess.Popen([sys.executable, "-c", code, str(log)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    spawned = int(child.stdout.readline())
    deadline = time.monotonic() + 10
    while not (log.exists() and log.read_text().count("\n") == 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    # Signals 1 to 31; those above belong to the C library, and a caller may have left some of them ignored.
    masks = {name: int(value, 16) & 0x7FFFFFFF for name, value in map(str.split, log.read_text().splitlines())}
    assert masks == {"SigBlk:": 0, "SigIgn:": 0}
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert processes.wait_until_gone(spawned, 5)
