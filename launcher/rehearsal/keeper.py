"""The process that owns a cluster: brings it up, has every daemon and node below it, takes it down. One per cluster.

Run as a program by cluster.py. It tells its starter how bring-up went over a socket; until the starter lets go of that
socket, the end of the starter is the end of the cluster, so nothing outlives an interrupted command or a killed test.
Later commands reach it at DIR/run/keeper.sock. Single-threaded; everything it starts dies with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from . import files, linux, network, nodes, processes
from .bringup import CONTROLLER, Abandoned, BringUp, BringUpError, Daemons
from .spec import ClusterSpec, Layout


class Keeper:
    """Answers requests about a cluster that is up, until it is told to end or its starter is gone."""

    def __init__(self, daemons: Daemons, starter: socket.socket, listener: socket.socket) -> None:
        self._daemons = daemons
        self._layout = daemons.layout
        self._spec = daemons.spec
        self._starter: socket.socket | None = starter
        self._listener = listener
        self._ending = False
        self.keep_logs = False
        self.requester: socket.socket | None = None

    def serve(self) -> None:
        """Returns when the cluster is to be taken down. If someone asked for that, they wait at `requester`."""
        wake, wake_sender = socket.socketpair()
        wake.setblocking(False)
        wake_sender.setblocking(False)
        signal.set_wakeup_fd(wake_sender.fileno())
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._end)
        while not self._ending:
            watched = [wake, self._listener, *([self._starter] if self._starter else [])]
            ready = select.select(watched, [], [])[0]
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
            self._daemons.reap()
            if self._starter in ready:
                self._hear_starter()
            elif self._listener in ready:
                self._answer(self._listener.accept()[0])
        signal.set_wakeup_fd(-1)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._ending = True

    def _hear_starter(self) -> None:
        assert self._starter is not None
        word = self._starter.recv(64)
        self._starter.close()
        self._starter = None
        # "detach" lets the cluster live on; the end of the line, which is what a killed starter sends, does not.
        self._ending = self._ending or word != b"detach\n"

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        try:
            request = json.loads(connection.makefile().readline())
            if request["do"] == "down":
                self.keep_logs = bool(request.get("keep_logs"))
                self.requester = connection
                self._ending = True
                return
            reply = self._act(request)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": str(error)}
        _tell(connection, **reply)
        connection.close()

    def _act(self, request: Mapping[str, Any]) -> dict[str, Any]:
        verb = request["do"]
        if verb == "status":
            daemons = [name for name in self._daemons.running.values() if not name.startswith("node-")]
            return {"pid": os.getpid(), "daemons": daemons, "ended": sorted(self._daemons.ended)}
        if verb == "stop_controller":
            return self._stop_controller(signal.SIGKILL if request.get("kill") else signal.SIGTERM)
        if verb == "start_controller":
            self._daemons.start_controller()
            return {}
        name = str(request["node"])
        self._spec.node_number(name)
        if verb == "start":
            self._start_node(name)
        elif verb in ("cut", "heal"):
            network.run_ip(f"link set {name} {'up' if verb == 'heal' else 'down'}\n", self._daemons.path)
        else:
            raise ValueError(f"unknown request {verb!r}")
        return {}

    def _stop_controller(self, how: signal.Signals) -> dict[str, Any]:
        """End slurmctld. Its state directory stays. Raises ValueError if it does not run, or does not end."""
        found = [pid for pid, name in self._daemons.running.items() if name == CONTROLLER]
        if not found:
            raise ValueError("slurmctld does not run")
        os.kill(found[0], how)
        deadline = time.monotonic() + 20
        while found[0] in self._daemons.running:
            if time.monotonic() > deadline:
                raise ValueError(f"slurmctld does not end on {how.name}")
            time.sleep(0.01)
            self._daemons.reap()
        return {}

    def _start_node(self, name: str) -> None:
        """Power a node on, or start slurmd on one that has lost it."""
        root = nodes.roots(os.getpid()).get(name)
        if root is not None:
            os.kill(root, nodes.START_SLURMD)
            return
        deadline = time.monotonic() + 5
        # The kernel takes a dead node's cable away some time after the node.
        while self._spec.isolate and network.has_link(name) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                network.run_ip(f"link del {name}\n", self._daemons.path)
        nodes.failure_file(self._layout, name).unlink(missing_ok=True)
        self._daemons.connect({name: self._daemons.fork_node(name)})


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler at all is what makes the signal wake the select."""


def _abandon(_number: int, _frame: FrameType | None) -> None:
    raise Abandoned


def lock_directory(layout: Layout) -> int:
    """Take the directory for as long as we live. Raises BringUpError when another keeper has it."""
    layout.root.mkdir(parents=True, exist_ok=True)
    while True:
        lock = os.open(layout.marker, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == layout.marker.stat().st_ino:
                return lock
        except BlockingIOError:
            raise BringUpError(f"{layout.root}: a cluster is already up there, or on its way up or down") from None
        except FileNotFoundError:
            pass
        # Locked, but a file that the former keeper was about to remove.
        os.close(lock)


def take_down(layout: Layout, machine_network: str, keep_logs: bool = False, spare: int = 0) -> None:
    """Kill everything of the cluster below and around this process and remove its files. Raises OSError if something
    survives. `spare` is the process that asked for it: it may be inside the cluster's namespaces, with the shells above
    it. `machine_network` names the machine's network namespace: what is there is none of ours by that alone."""
    spared = {os.getpid()} | (processes.ancestors(spare) if spare else set())

    def below() -> list[processes.Process]:
        processes.reap()
        return [process for process in processes.descendants(os.getpid()) if process.pid not in spared]

    def ours() -> list[processes.Process]:
        found = below() + processes.belonging_to(layout.root)
        if network_namespace() != machine_network:
            found += processes.in_namespace_of(os.getpid(), "net")
        return [process for process in found if process.pid not in spared]

    # Nearly all is below us; the look at every process of the machine, which is slow, comes once nothing is.
    processes.kill_until_none(below)
    if left := processes.kill_until_none(ours):
        raise OSError("will not die: " + "; ".join(f"{process.pid} {process.command()}" for process in left))
    if network_namespace() != machine_network:
        with contextlib.suppress(OSError):
            linux.unbind(str(layout.bin))
    files.remove(layout, keep_logs)


def network_namespace() -> str:
    return os.readlink("/proc/self/ns/net")


def _listen(layout: Layout) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(layout.control))
    layout.control.chmod(0o600)
    listener.listen(16)
    return listener


def _log_to(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _peer(connection: socket.socket) -> int:
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def keep(layout: Layout, spec: ClusterSpec, starter: socket.socket) -> None:
    """A cluster's whole life. Tells the starter, in one line of JSON, that it is up or why it is not."""
    began = time.monotonic()
    machine_network = network_namespace()
    try:
        lock = lock_directory(layout)
        # A keeper that died with the machine, or was killed, has left files and perhaps processes.
        take_down(layout, machine_network)
    except (BringUpError, OSError) as error:
        return _tell(starter, error=str(error), log=[])
    files.make_directories(layout, shared_machine=os.geteuid() == 0 and not spec.isolate)
    _log_to(layout.log / "keeper.log")
    listener = _listen(layout)
    daemons = Daemons(layout, spec)
    signal.signal(signal.SIGTERM, _abandon)
    try:
        claim = BringUp(daemons, starter).run()
    except (Abandoned, BringUpError, OSError, ValueError, subprocess.SubprocessError) as error:
        why = str(error) or "stopped before it was up"
        _end(layout, machine_network)
        return _tell(starter, error=why, log=getattr(error, "log", []))
    _tell(starter, pid=os.getpid(), seconds=time.monotonic() - began)
    keeper = Keeper(daemons, starter, listener)
    keeper.serve()
    listener.close()
    asked = keeper.requester
    try:
        _end(layout, machine_network, keeper.keep_logs, _peer(asked) if asked else 0)
        answer = {}
    except OSError as error:
        answer = {"error": str(error)}
    if asked:
        _tell(asked, **answer)
    claim.lock.close()
    os.close(lock)
    return None


def _end(layout: Layout, machine_network: str, keep_logs: bool = False, spare: int = 0) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    take_down(layout, machine_network, keep_logs, spare)
    if not keep_logs:
        files.remove_marker(layout)


def _tell(connection: socket.socket, **report: object) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(report).encode() + b"\n")


def main(argv: list[str]) -> int:
    """Arguments: the directory and the number of the inherited socket, on which the spec comes in one line."""
    starter = socket.socket(fileno=int(argv[1]))
    starter.set_inheritable(False)
    os.chdir("/")
    os.umask(0o022)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with starter.makefile() as line:
        spec = ClusterSpec.from_json(line.readline())
    keep(Layout(Path(argv[0])), spec, starter)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
