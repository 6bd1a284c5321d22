"""Kernels built for tests, once per machine and content of the sources, whatever number of pytest processes asks.

Not here: what a test does with them (emulated_runs.py). Compiling is stoker.kernels.native.build's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from stoker.kernels.native.build import Target, build

_KEPT = 7 * 24 * 3600  # seconds


def built(target: Target) -> Path:
    """The shared object of a target. Processes that want the same one wait for the first of them."""
    # Not the session's own cache: that one is another for each process and each run.
    cache = Path(tempfile.gettempdir()) / f"stoker-test-kernels-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    name = hashlib.sha256(repr(target).encode()).hexdigest()[:16]
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = build(target, cache)
    os.utime(path.parent)
    _forget(cache)
    return path


def _forget(cache: Path) -> None:
    for entry in cache.iterdir():
        if entry.is_dir() and time.time() - entry.stat().st_mtime > _KEPT:
            shutil.rmtree(entry, ignore_errors=True)
