"""The tracker as a process: signals, one per run, an environment in which wandb does only what it is told.

Owns: what a tracker needs of the operating system. Knows nothing of metrics. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import environment_error
from .run.layout import RunDir
from .run.outcome import EXIT_FAILED

_MOMENT = 0.2  # seconds

# What of the user's W&B environment counts: who they are and how to reach the server. Everything else (a run id, a
# mode, directories, the address of another process's service) would bend what is sent, or where wandb writes.
_KEPT = {
    f"WANDB_{name}"
    for name in (
        "API_KEY", "BASE_URL", "CONFIG_DIR", "CREDENTIALS_FILE", "ENTITY", "HTTPS_PROXY", "HTTP_PROXY", "HTTP_TIMEOUT",
        "IDENTITY_TOKEN_FILE", "INIT_TIMEOUT", "INSECURE_DISABLE_SSL", "ORGANIZATION", "X_EXTRA_HTTP_HEADERS",
    )
}  # fmt: skip


def say(text: str) -> None:
    """One line for people. A reader that has gone does not matter."""
    with contextlib.suppress(OSError):
        print(f"track: {text}", flush=True)


class Signals:
    """SIGTERM, SIGINT and SIGHUP ask for the end; the second one of a kind acts as usual."""

    def __init__(self, is_child: bool) -> None:
        """`is_child`: the end of the parent process asks for the end too."""
        self._parent = os.getppid() if is_child else None
        self._stop_asked: float | None = None  # monotonic time
        self._read_end, self._write_end = os.pipe()

    def __enter__(self) -> Signals:
        asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._before = {s: signal.signal(s, self._on_signal) for s in asked}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def _on_signal(self, number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        self._stop_asked = self._stop_asked or time.monotonic()
        os.write(self._write_end, b"\0")

    def since_stop(self) -> float | None:
        """Seconds since the end was asked for, None if it was not."""
        if self._stop_asked is None and self._parent is not None and os.getppid() != self._parent:
            self._stop_asked = time.monotonic()
        return None if self._stop_asked is None else time.monotonic() - self._stop_asked

    def wait(self, seconds: float) -> None:
        """Until a signal comes, at most so long; after it, a moment."""
        if self._stop_asked is None:
            select.select([self._read_end], [], [], seconds)
        else:
            time.sleep(min(seconds, _MOMENT))


@contextlib.contextmanager
def only_tracker(run: RunDir, wait: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Hold the run's tracker lock (report/track.lock; gone with the process, however it ends).

    `wait` is called as long as another tracker has it; the body gets False if it says not to go on waiting.

    Raises:
        UserError: another tracker has it, and there is no `wait`.
    """
    with open(run.report / "track.lock", "a+", encoding="utf-8") as f:
        while not _try_lock(f.fileno()):
            if wait is None:
                f.seek(0)
                holder = f.read().strip() or "it has not said which"
                raise environment_error(f"{run.path}: another tracker is at work on this run ({holder})")
            if not wait():
                yield False
                return
        f.truncate(0)
        f.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        f.flush()
        yield True


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        say(f"this file system has no locks ({e.strerror}): take care that only one tracker works on the run")
    return True


def prepare_environment(directory: Path) -> None:
    """Before wandb is imported, which reads these once: quiet, and everything it writes below `directory`."""
    for name in [n for n in os.environ if n.startswith(("WANDB_", "_WANDB_")) and n not in _KEPT]:
        del os.environ[name]
    cache = str(directory / "cache")
    os.environ.update(WANDB_SILENT="true", WANDB_CONSOLE="off", WANDB_ERROR_REPORTING="false")
    os.environ.update(WANDB_CACHE_DIR=cache, WANDB_DATA_DIR=cache, WANDB_ARTIFACT_DIR=cache)
    # Where there is a terminal it would ask for a key, and write down what it is told.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """End the process if the body takes longer: wandb's threads cannot be called off."""
    timer = threading.Timer(seconds, _give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up() -> None:
    say("wandb does not come to an end; giving up. `stoker track` sends the rest later")
    os._exit(EXIT_FAILED)
