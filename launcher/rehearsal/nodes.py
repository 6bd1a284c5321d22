"""The nodes of a cluster: one process each that stands for the machine, with slurmd and everything else below it.

A plain node is a process tree (its root adopts orphans). An isolated node is the first process of a PID namespace with
its own network, host name, mounts and IPC; killing it is a power cut. Forked from the keeper without an exec, so a
node costs a millisecond and almost no memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from . import linux, network, processes
from .spec import ClusterSpec, Layout

_NAMESPACES = linux.NEW_NETWORK | linux.NEW_MOUNT | linux.NEW_HOSTNAME | linux.NEW_PID | linux.NEW_IPC
# Tells a node's process that its slurmd is wanted again.
START_SLURMD = signal.SIGUSR1
_PREFIX = "node:"


@dataclass(frozen=True)
class NodePlan:
    """What a node's process needs to know. `environment` is slurmd's; its PATH is where programs are looked for."""

    name: str
    spec: ClusterSpec
    layout: Layout
    environment: Mapping[str, str]

    @property
    def log(self) -> Path:
        return self.layout.log / f"node-{self.name}.log"


@dataclass(frozen=True)
class Node:
    """A forked node that waits for `go` before it starts its slurmd."""

    name: str
    pid: int
    gate: socket.socket

    def go(self) -> None:
        """Returns when whoever enters the node finds its own mounts there, not the machine's."""
        with self.gate, contextlib.suppress(OSError):  # one that has died already: its end is seen elsewhere
            self.gate.recv(1)
            self.gate.send(b"g")


def fork_node(plan: NodePlan) -> Node:
    """Fork a node's process. Raises OSError when the machine denies the namespaces."""
    waiting, gate = socket.socketpair()
    pid = _in_new_namespaces() if plan.spec.isolate else os.fork()
    if pid == 0:
        _run(plan, _isolated if plan.spec.isolate else _plain, waiting)
    waiting.close()
    return Node(plan.name, pid, gate)


def _in_new_namespaces() -> int:
    """Like fork, but the child is the first process of new namespaces. Raises OSError when that is denied."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            report = answer.read().split()
        os.waitpid(between, 0)
        if report[:1] == [b"pid"]:
            return int(report[1])
        number = int(report[1]) if report else 0
        raise OSError(number, f"new namespaces for a node: {os.strerror(number)}")
    # A PID namespace is for the children of the one who asks for it, so the node is the child of this go-between.
    try:
        linux.unshare(_NAMESPACES)
        if (pid := os.fork()) == 0:
            return 0
        os.write(writing, b"pid %d" % pid)
    except OSError as error:
        os.write(writing, b"error %d" % (error.errno or 0))
    processes.leave(0)


def _run(plan: NodePlan, body: Callable[[NodePlan, socket.socket], None], waiting: socket.socket) -> NoReturn:
    """A node's whole life."""
    try:
        # The keeper's sockets and locks, and other nodes' gates, must not stay open here.
        os.closerange(3, waiting.fileno())
        os.closerange(waiting.fileno() + 1, 1024)
        output = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.set_wakeup_fd(-1)
        processes.reset_signals()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, START_SLURMD])
        linux.set_name(_PREFIX + plan.name)
        body(plan, waiting)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    processes.leave(1)


def _may_start(waiting: socket.socket) -> bool:
    """Say that the node is made, wait for the word to go on; False if nobody is there to give it."""
    with waiting, contextlib.suppress(OSError):
        waiting.send(b"m")
        return bool(waiting.recv(1))
    return False


def _plain(plan: NodePlan, waiting: socket.socket) -> None:
    linux.adopt_orphans()
    if _may_start(waiting):
        linux.die_with_parent()
        _serve(plan)


def _isolated(plan: NodePlan, waiting: socket.socket) -> None:
    socket.sethostname(plan.name)
    linux.make_mounts_private()
    linux.mount_proc()
    linux.mount_tmpfs("/dev/shm")
    _own_tmp(plan)
    # The keeper plugs the network cable in, then lets us go on.
    if _may_start(waiting):
        linux.die_with_parent()
        network.run_ip(network.node_commands(plan.spec, plan.name), plan.environment["PATH"])
        _serve(plan)


def _own_tmp(plan: NodePlan) -> None:
    """A /tmp of the node's own, empty but for the directories that the nodes share."""
    own = plan.layout.nodes / plan.name / "tmp"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    own.chmod(0o1777)
    for path in shared_below_tmp(plan.spec, plan.layout):
        target = own / path.relative_to("/tmp")
        target.mkdir(parents=True, exist_ok=True)
        linux.bind(str(path), str(target))
    linux.bind(str(own), "/tmp")
    os.chdir("/")


def check_shared(spec: ClusterSpec, layout: Layout) -> None:
    """Raise ValueError for directories that isolated nodes cannot have in common."""
    shared = [Path(share).resolve() for share in spec.share]
    for path in [layout.root, *shared]:
        if path == Path("/tmp") or path == Path("/dev/shm") or Path("/dev/shm") in path.parents:
            raise ValueError(f"{path}: isolated nodes have their own /tmp and /dev/shm; share a directory below /tmp")


def shared_below_tmp(spec: ClusterSpec, layout: Layout) -> list[Path]:
    """Directories below /tmp that isolated nodes see too: the cluster's own, what Python and this package need, the
    home directory and spec.share. Each at most once, none inside another."""
    wanted = [layout.root, Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix), Path.home()]
    resolved = {path.resolve() for path in [*wanted, *map(Path, spec.share)]}
    below = sorted(path for path in resolved if Path("/tmp") in path.parents and os.path.isdir(path))
    return [path for path in below if not any(parent in below for parent in path.parents)]


def _serve(plan: NodePlan) -> NoReturn:
    """Start a slurmd now and when told to, reap what ends, note down a slurmd that gave up; for ever."""
    failure = failure_file(plan.layout, plan.name)
    slurmd = _start_slurmd(plan)
    while True:
        received = signal.sigwait([signal.SIGCHLD, START_SLURMD])
        ended = dict(processes.reap())
        if slurmd in ended:
            if os.WIFEXITED(ended[slurmd]):
                with contextlib.suppress(OSError):
                    failure.write_text(f"slurmd of {plan.name} ended with status {os.WEXITSTATUS(ended[slurmd])}\n")
            slurmd = 0
        if received == START_SLURMD and not slurmd:
            failure.unlink(missing_ok=True)
            slurmd = _start_slurmd(plan)


def _start_slurmd(plan: NodePlan) -> int:
    argv = ["slurmd", "-D", "-N", plan.name]
    return processes.spawn(argv, plan.environment, plan.layout.log / f"slurmd-{plan.name}.out")


def failure_file(layout: Layout, node: str) -> Path:
    """Written when a node's slurmd ended by itself."""
    return layout.run / f"{node}.failed"


def roots(keeper: int) -> dict[str, int]:
    """Which nodes are powered on, and the process that stands for each, for a keeper's pid."""
    found = {}
    for process in processes.everything():
        if process.parent == keeper and process.name.startswith(_PREFIX):
            found[process.name.removeprefix(_PREFIX)] = process.pid
    return found


def members(root: int, isolated: bool) -> list[processes.Process]:
    """Everything that runs on a node, the process that stands for it included."""
    if isolated:
        return processes.in_namespace_of(root, "pid")
    own = processes.find(root)
    return ([own] if own else []) + processes.descendants(root)


def stop(root: int, isolated: bool) -> list[processes.Process]:
    """SIGSTOP everything on the node. Returns what would not stop (in an uninterruptible wait) within two seconds."""

    def moving() -> list[processes.Process]:
        return [process for process in members(root, isolated) if process.state not in "Tt"]

    # Again until nothing moves: what was forked while we looked is stopped in the next round.
    deadline = time.monotonic() + 2
    while (left := moving()) and time.monotonic() < deadline:
        processes.send(signal.SIGSTOP, left)
        time.sleep(0.002)
    return left


def resume(root: int, isolated: bool) -> None:
    processes.send(signal.SIGCONT, members(root, isolated))


def power_off(root: int, isolated: bool) -> list[processes.Process]:
    """Kill everything on the node as nearly at once as can be. Returns what survived (nothing, normally)."""
    if isolated:
        with contextlib.suppress(ProcessLookupError):
            os.kill(root, signal.SIGKILL)
        return [] if processes.wait_until_gone(root, 10) else members(root, isolated)
    # Halt first, so that no process lives to see another one die; the root goes last, it keeps the tree together.
    stop(root, isolated)
    left = processes.kill_until_none(lambda: processes.descendants(root))
    with contextlib.suppress(ProcessLookupError):
        os.kill(root, signal.SIGKILL)
    processes.wait_until_gone(root, 10)
    return left
