"""Starts and stops the tracker beside the supervisor, on the batch host.

Owns: its process. It is a process of its own so that nothing of W&B (memory, threads, network, errors) reaches the
supervisor. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from .run.layout import RunDir

PATIENCE = 20.0  # seconds for the last upload; Slurm gives KillWait (30 s by default) after a cancellation


def start_tracker(run: RunDir, config: dict[str, Any], patience: float = PATIENCE) -> subprocess.Popen[bytes] | None:
    """Start `stoker track` in the background; its words go to slurm/track.log.

    Args:
        config: the plain configuration in force.
        patience: seconds that `stop_tracker` will give it.

    Returns:
        The process; None if tracking is disabled, or if it cannot be started (said on standard error): a run does not
        fail for want of tracking.
    """
    if config["tracking"]["mode"] == "disabled":
        return None
    command = [sys.executable, "-m", f"{__package__}.track", str(run.path), "--background", f"--patience={patience}"]
    try:
        run.job_logs.mkdir(exist_ok=True)
        with open(run.job_logs / "track.log", "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
    except OSError as e:
        print(f"supervisor: cannot start the tracker: {e}", file=sys.stderr, flush=True)
        return None


def stop_tracker(process: subprocess.Popen[bytes] | None, patience: float = PATIENCE) -> bool:
    """Let the tracker send what there is, and wait for its end; False if it had to be killed.

    To be called when the attempt's outcome is written: the tracker waits for it, half its patience at most. Takes at
    most `patience` seconds. What a killed tracker had not sent is sent by the next one.
    """
    if process is None:
        return True
    process.terminate()
    try:
        process.wait(patience)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
