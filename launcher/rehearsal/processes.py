"""Processes as /proc shows them: who is below whom, who belongs to a cluster directory, starting and killing them.

A zombie counts as dead everywhere here: where pid 1 is slow to reap, dead daemons answer `kill -0` for minutes.
Knows nothing of Slurm but how to recognise what a cluster has left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from . import linux

# In the environment of every daemon of a cluster, with the cluster's directory as its value.
MARKER = "STOKER_REHEARSAL_OF"


@dataclass(frozen=True)
class Process:
    """One live process: its id, its parent's, its short name (15 bytes) and its state letter as in proc(5)."""

    pid: int
    parent: int
    name: str
    state: str

    def command(self) -> str:
        """Its command line in one line; empty when it is gone."""
        return _read(self.pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


def find(pid: int) -> Process | None:
    """The process, or None when there is none or only a zombie."""
    stat = _read(pid, "stat").decode(errors="replace")
    # "pid (name) state parent ...", and the name may hold blanks and parentheses.
    start, end = stat.find("("), stat.rfind(")")
    if start < 0 or end < 0:
        return None
    state, parent = stat[end + 1 :].split()[:2]
    return None if state in "ZX" else Process(pid, int(parent), stat[start + 1 : end], state)


def everything() -> list[Process]:
    """All live processes that this PID namespace shows."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [process for pid in pids if (process := find(pid)) is not None]


def descendants(root: int) -> list[Process]:
    """Live processes below `root`, itself not included."""
    children: dict[int, list[Process]] = {}
    for process in everything():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return found


def in_namespace_of(pid: int, kind: str) -> list[Process]:
    """Live processes in the same namespace ("pid", "net", ...) as `pid`, itself included."""
    namespace = _link(pid, f"ns/{kind}")
    if not namespace:
        return []
    return [process for process in everything() if _link(process.pid, f"ns/{kind}") == namespace]


def ancestors(pid: int) -> set[int]:
    """`pid` and everything above it."""
    line: set[int] = set()
    while (process := find(pid)) is not None and pid not in line:
        line.add(pid)
        pid = process.parent
    return line


def belonging_to(root: Path) -> list[Process]:
    """What runs for the cluster in `root`, however it was orphaned; never this process nor one above it.

    Daemons have our marker in their environment. Tasks have the cluster's SLURM_CONF and a SLURMD_NODENAME (a user's
    shell has at most the first). slurmstepd may write its title over its environment: its working directory or
    open files tell.
    """
    own = ancestors(os.getpid())
    mark = f"{MARKER}={root}".encode()
    conf = f"SLURM_CONF={root}/etc/slurm.conf".encode()

    def belongs(process: Process) -> bool:
        variables = _read(process.pid, "environ").split(b"\0")
        if mark in variables:
            return True
        if conf in variables and any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables):
            return True
        return process.name.startswith("slurmstepd") and _uses(process.pid, root)

    return [process for process in everything() if process.pid not in own and belongs(process)]


def _uses(pid: int, root: Path) -> bool:
    links = [_link(pid, "cwd")]
    with contextlib.suppress(OSError):
        links += [_link(pid, f"fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    return any(link.startswith(f"{root}/") for link in links)


def send(signal_number: signal.Signals, processes: Iterable[Process]) -> None:
    """Signal them all; those already gone do not matter."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)


def kill_until_none(members: Callable[[], list[Process]], timeout: float = 10.0) -> list[Process]:
    """SIGKILL whatever `members` returns until it returns nothing. Returns what is still there at the time limit."""
    deadline = time.monotonic() + timeout
    while left := members():
        send(signal.SIGKILL, left)
        if time.monotonic() > deadline:
            return left
        time.sleep(0.005)
    return []


def wait_until_gone(pid: int, timeout: float) -> bool:
    """Whether the process ended (or became a zombie) in time."""
    deadline = time.monotonic() + timeout
    while find(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def spawn(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Start a program in a session of its own, output to `log`, killed when this process dies. Returns its pid.

    The caller reaps it. Not subprocess: the caller waits for any child at all, which subprocess does not bear.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        linux.die_with_parent()
        reset_signals()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
        os.dup2(1, 2)
        os.chdir("/")
        os.execvpe(argv[0], list(argv), dict(environment))
    except OSError as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def reset_signals() -> None:
    """Every signal as a fresh process has it: Python ignores SIGPIPE, and jobs would inherit that from their slurmd."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def reap() -> list[tuple[int, int]]:
    """(pid, wait status) of each child that ended since the last call. Only for processes that start none by subprocess
    at the same time."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status))
    return ended


def leave(status: int) -> NoReturn:
    """End a forked process without running the parent's exit handlers."""
    os._exit(status)
