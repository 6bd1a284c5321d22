"""Working on a run without sbatch: the loop that starts the supervisor, and starts it again when it asks for that.

Owns: the loop, in the foreground (`stoker run`) or detached (`cluster=local`). It runs the very script that Slurm would
get. Standard library only; the detached one runs from the frozen code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import procfs
from .environment import without_outer_job
from .errors import environment_error
from .process import ProcessId, loop_path, loop_process
from .run.effective import effective_script
from .run.files import create_json
from .run.layout import RunDir
from .run.outcome import EXIT_CANCELLED, EXIT_REQUEUE
from .run.submissions import Submission
from .run.views import last_outcome

_PAUSE = 1.0  # seconds between two attempts
_START_LIMIT = 60.0  # seconds a detached loop may take to report
# Passed on: the supervisor is in a session of its own, so the terminal's Ctrl-C does not reach it. A first SIGINT lets
# it save, SIGTERM ends it at once; both are the run's end.
_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def local_log(run: RunDir) -> Path:
    return run.job_logs / "local.log"


class Loop:
    """Runs the submission's script until it ends with anything but EXIT_REQUEUE."""

    def __init__(self, submission: Submission, inside_slurm: bool) -> None:
        """`inside_slurm`: use the Slurm job around us (salloc); else there is no Slurm for this run."""
        self.submission = submission
        self.arguments = [] if inside_slurm else ["--local"]
        self.env = dict(os.environ) if inside_slurm else without_outer_job(os.environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._ended_by: int | None = None
        self._unsent: int | None = None  # came while there was no child to send it to
        self._unheard = False  # a warning came before the child had its handler, without which it would kill it

    def run(self) -> int:
        """The run's exit code. Signals go to the supervisor; a signal that means the end is noted as a cancellation."""
        run = self.submission.run
        create_json(loop_path(run, self.submission.number), ProcessId.own().record())
        before = {s: signal.signal(s, self._on_signal) for s in (*_END, signal.SIGUSR1)}
        try:
            while True:
                code = self._attempt()
                if self._ended_by is not None or self.submission.is_cancelled:
                    return EXIT_CANCELLED if code == EXIT_REQUEUE else code
                if code != EXIT_REQUEUE:
                    return code
                self._pause()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pause(self) -> None:
        """Until the next attempt, as long as the last one says (back-off), or until a signal means the end."""
        last = last_outcome(self.submission.run)
        delay = last[1].delay if last is not None and last[1] is not None else 0.0
        until = time.monotonic() + max(delay, _PAUSE)
        while time.monotonic() < until and self._ended_by is None and not self.submission.is_cancelled:
            time.sleep(min(_PAUSE, max(0.0, until - time.monotonic())))

    def _attempt(self) -> int:
        if self._ended_by is not None or self.submission.is_cancelled:
            return EXIT_CANCELLED
        self._unheard = False  # between two attempts there is nobody to warn
        run = self.submission.run
        script = effective_script(run, self.submission.number)
        with open(local_log(run), "ab") as log:
            self._child = subprocess.Popen(
                ["bash", str(script), *self.arguments],
                cwd=run.path,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self._unsent is not None:  # arrived while the child was being made
            self._send(self._unsent)
        while not _hears(self._child.pid, signal.SIGUSR1) and self._child.poll() is None:
            time.sleep(0.005)
        if self._unheard:
            self._send(signal.SIGUSR1)
        code = self._child.wait()
        self._child = None
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            if self._child is not None and _hears(self._child.pid, signal.SIGUSR1):
                self._send(signal.SIGUSR1)
            else:
                self._unheard = True
            return
        self._ended_by = number
        self.submission.cancel(signal.Signals(number).name)
        passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if self._child is None:
            self._unsent = passed_on
        self._send(passed_on)

    def _send(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


def _hears(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False if it is gone."""
    return procfs.has_signal(procfs.status(pid).get("SigCgt"), number)


def start_detached(submission: Submission) -> ProcessId:
    """Start the loop in the background, in a session of its own; returns when it has reported.

    Raises:
        UserError: it ended before that; its last words are in the message.
    """
    run = submission.run
    command = [sys.executable, str(run.path / "bootstrap.py"), "stoker.launcher.local", str(run.path)]
    with open(local_log(run), "ab") as log:
        child = subprocess.Popen(
            [*command, str(submission.number)],
            cwd=run.path,
            env=without_outer_job(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if not _poll(lambda: loop_process(submission) is not None or child.poll() is not None, _START_LIMIT):
        child.kill()
        raise environment_error(
            f"the background process did not start within {_START_LIMIT:.0f} s; see {local_log(run)}"
        )
    found = loop_process(submission)
    if found is None:
        words = local_log(run).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise environment_error(f"the background process ended at once: {words[-1] if words else 'it printed nothing'}")
    child.returncode = 0  # it outlives us on purpose: no warning about that at exit
    return found


def _poll(condition: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def main(argv: list[str]) -> int:
    """`python RUN_DIR/bootstrap.py stoker.launcher.local RUN_DIR SUBMISSION`: the detached loop."""
    directory, number = argv
    return Loop(Submission(RunDir(Path(directory)), int(number)), inside_slurm=False).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
