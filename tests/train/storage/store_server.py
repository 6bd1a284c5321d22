"""A real S3 server on this machine (moto's), in a process of its own; nothing leaves the machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Yields its address."""
    log = directory / "moto.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with open(log, "wb") as f:
        server = subprocess.Popen(command, stdout=f, stderr=f, stdin=subprocess.DEVNULL, env=os.environ | CREDENTIALS)
    try:
        yield _address(server, log)
    finally:
        server.terminate()
        server.wait(30)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """It says where it listens once it does."""
    while server.poll() is None:
        if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        try:
            server.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(log.read_text())
