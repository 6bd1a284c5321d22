"""`python -m stoker.train.zygote`: imports torch and the trainer once, then forks workers in milliseconds.

Owns: forking and reaping, on the agent's word over an inherited Unix socket. It runs no torch operation and touches no
device, so that a fork is safe: no thread pool, no CUDA context. It dies with its agent, and its workers die with it.
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

from ..launcher.run.layout import RunDir
from ..launcher.run.stacks import offer
from ..launcher.run.wire import Channel, Closed

FD_VARIABLE = "STOKER_ZYGOTE_FD"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; prctl(2)). `parent`: its pid, known beforehand."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def main() -> int:
    channel = Channel(socket.socket(fileno=int(os.environ[FD_VARIABLE])))
    die_with_parent(int(os.environ["STOKER_AGENT_PID"]))
    if "STOKER_RUN_DIR" in os.environ:
        offer(RunDir(Path(os.environ["STOKER_RUN_DIR"])), int(os.environ["STOKER_ATTEMPT"]), "zygote")
    # Slurm may signal everything in the step. What a signal means is for agent and supervisor to decide.
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(s, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    began = time.monotonic()
    from . import store, worker
    from .state import persist_writer

    worker.preload()
    targets = {"worker": worker.main, "store": store.main, "writer": persist_writer.main}
    channel.send({"kind": "ready", "seconds": round(time.monotonic() - began, 3)})
    while True:
        waitables: list[Any] = [channel, wake_read]
        readable, _, _ = select.select(waitables, [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _reap(channel)
        if channel in readable:
            try:
                messages = channel.receive()
            except Closed:
                return 0
            for message in messages:
                fds, channel.fds = channel.fds, []
                _fork(channel, message, fds, targets, (wake_read, wake_write))


def _reap(channel: Channel) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send({"kind": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _fork(
    channel: Channel, message: dict[str, Any], fds: list[int], targets: dict[str, Any], pipe: tuple[int, int]
) -> None:
    """Descriptors that come along: log, channel to the agent, then (workers) the heartbeat segment, the two state
    segments, and the socket to the writer, if there is one."""
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        channel.send({"kind": "forked", "id": message["id"], "pid": pid})
        return
    code = 1
    try:
        os.setpgid(0, 0)  # with whatever it starts, one group to kill
        die_with_parent(zygote)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        for fd in pipe:
            os.close(fd)
        log, to_agent, *rest = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(message["env"])
        code = targets[message["what"]](message["spec"], Channel(socket.socket(fileno=to_agent)), *rest)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):  # a full disk does not change how a worker ended
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: the child must not run what the zygote registered for its own end.
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
