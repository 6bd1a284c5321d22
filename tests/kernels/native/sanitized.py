"""A Python process in which objects built with AddressSanitizer and UndefinedBehaviorSanitizer can be loaded.

Not here: building them (emulated_build.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SANITIZERS = ("address", "undefined")
WANTED = "STOKER_TEST_SANITIZERS"  # names with commas between them: what the ops of this process are built with
UNITS = "STOKER_TEST_UNITS"  # translation units with commas between them: what this process has of the ops; none: all
# Objects are not freed at the end of Python, and an allocation of many GB that torch asks for may be refused.
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_segv=1:abort_on_error=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
}
FOUND = 99  # exit status after a finding


def python(*arguments: str, timeout: float = 300, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` with the sanitizers' runtimes loaded first; their report is in stderr."""
    runtimes = [_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    environment = os.environ | _OPTIONS | environ
    environment["LD_PRELOAD"] = ":".join(runtimes)
    environment["LD_LIBRARY_PATH"] = str(Path(torch.__file__).parent / "lib")
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def _runtime(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
