"""The check for processes that outlive the script that started them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def find(repository: Path, mark: str) -> subprocess.CompletedProcess[str]:
    script = repository / "tools" / "leftovers.sh"
    return subprocess.run([script, mark, "0"], capture_output=True, text=True, timeout=60)


def test_nothing_left_is_silent(repository: Path) -> None:
    done = find(repository, "mark-that-nothing-carries")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_detached_process_is_named_and_ended_and_others_are_not(repository: Path) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    ours = subprocess.Popen(["sleep", "300"], env=dict(os.environ, A_MARK=mark), start_new_session=True)
    other = subprocess.Popen(["sleep", "300"])
    try:
        done = find(repository, mark)
        assert done.returncode == 1
        assert f"{ours.pid} sleep 300" in done.stderr
        assert ours.wait(timeout=10) == -9
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
