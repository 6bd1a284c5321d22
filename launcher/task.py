"""`python -m stoker.launcher.task RUN_DIR`: stands where train/zygote.py stands, for a script of the user's own.

Owns: the zygote's protocol with the agent (docs/architecture.md, "Messages"), in which a worker is not forked but the
user's command is started; signals, children, and that nothing of them stays behind. Decides nothing. Standard library
only, and it knows nothing of torch: the command may be any program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ..conf.checks_task import stop_signal
from .run.heartbeat import Segment
from .run.layout import RunDir
from .run.stacks import offer
from .run.wire import Channel, Closed
from .task_output import Writer
from .task_place import Place, variables, words
from .task_ports import Ports
from .task_rank import Files, Rank

FD_VARIABLE = "STOKER_ZYGOTE_FD"  # as the zygote has it
LOOK_EVERY = 0.1  # seconds between looks at heartbeats and stops
SWEEP_LIMIT = 5.0  # seconds that killed orphans may take
_PR_SET_CHILD_SUBREAPER = 36
# Slurm may send these to everything in the step; what they mean is for agent and supervisor to decide.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: list[str]) -> int:
    began = time.monotonic()
    fd = int(os.environ[FD_VARIABLE])
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    wake = _catch_signals()
    # Whoever a script leaves behind becomes our child, and is found and killed.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    place = Place.make(RunDir(Path(argv[0])))
    if "STOKER_ATTEMPT" in os.environ:
        offer(RunDir(Path(argv[0])), int(os.environ["STOKER_ATTEMPT"]), "zygote")
    try:
        channel.send({"kind": "ready", "seconds": round(time.monotonic() - began, 3)})
        Task(channel, wake, place).serve()
    except Closed:
        pass  # the agent is gone, and so are all processes
    finally:
        place.remove()
    return 0


def _catch_signals() -> int:
    """A descriptor with a byte for each signal. Handlers, not SIG_IGN: children must not inherit that."""
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for s in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(s, lambda *_: None)
    return wake_read


class Task:
    """The loop: agent, signals, processes and what they print."""

    def __init__(self, channel: Channel, wake: int, place: Place) -> None:
        self._channel, self._wake, self._place = channel, wake, place
        self._ranks: dict[int, Rank] = {}  # by pid
        self._ports: Ports | None = None
        self._store: Channel | None = None
        self._writer = Writer()
        self._writer.start()

    def serve(self) -> None:
        """Until the agent is gone; then no process is left."""
        try:
            while True:
                self._turn()
        finally:
            for rank in self._ranks.values():
                rank.kill()
            _sweep()
            self._writer.flush(1.0)

    def _turn(self) -> None:
        pipes = {} if self._writer.is_full else {r.pipe: r for r in self._ranks.values() if not r.has_closed_output}
        waitables: list[Any] = [self._channel, self._wake, *pipes]
        readable, _, _ = select.select(waitables, [], [], LOOK_EVERY)
        for fd in readable:
            if fd in pipes:
                pipes[fd].read()
        if self._wake in readable:
            for number in os.read(self._wake, 4096):
                self._signalled(signal.Signals(number))
            self._reap()
        if self._channel in readable:
            for message in self._channel.receive():
                fds, self._channel.fds = self._channel.fds, []
                for fd in fds:
                    os.set_inheritable(fd, False)  # one that came over a socket is
                self._obey(message, fds)
        for rank in self._ranks.values():
            rank.look()

    def _signalled(self, s: signal.Signals) -> None:
        if s in _ENDING:
            for rank in self._ranks.values():
                rank.signalled(s)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                code = os.waitstatus_to_exitcode(status)
                rank.ended(code)
                if not self._ranks:
                    _sweep()  # before the agent hears that this node is clear
                self._channel.send({"kind": "exited", "pid": pid, "status": code})

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        log, to_agent, *rest = fds
        channel = Channel(socket.socket(fileno=to_agent))
        if message["what"] == "store":
            os.close(log)
            self._ports = Ports.reserve()
            self._store = channel  # open as long as we live
            channel.send({"kind": "store", "port": self._ports.first})
            return
        rank = self._start(message, log, channel, Segment(rest[0]))
        self._ranks[rank.pid] = rank
        self._channel.send({"kind": "forked", "id": message["id"], "pid": rank.pid})

    def _start(self, message: dict[str, Any], log: int, channel: Channel, segment: Segment) -> Rank:
        spec = message["spec"]
        run, task, env = RunDir(Path(spec["run"])), spec["config"]["task"], message["env"]
        asked = stop_signal(task["stop_signal"])
        assert asked is not None
        spec |= {"local_world_size": env["LOCAL_WORLD_SIZE"], "stop_signal": asked.name, "stop_number": asked.value}
        beside = self._place.root / f"rank-{spec['rank']}-g{spec['generation']}"
        beside.mkdir(exist_ok=True)
        metrics = run.attempt(spec["attempt"]).metrics(spec["generation"]) if spec["rank"] == 0 else None
        files = Files(log, beside / "heartbeat", beside / "metrics.jsonl", metrics)
        environ = variables(os.environ | env, spec, self._place, beside)
        return Rank(spec, environ, words(task["cmd"]), self._place.cwd, files, segment, channel, self._writer)


def _sweep() -> None:
    """Kill and reap every child that is left: what the processes started and did not wait for."""
    deadline = time.monotonic() + SWEEP_LIMIT
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.01)


def _children() -> list[int]:
    found, own = [], str(os.getpid())
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as f:
                fields = f.read().rpartition(")")[2].split()
                if fields[1] == own:
                    found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
