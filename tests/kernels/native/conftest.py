"""The native ops on the CPU: the library built through the emulation header and loaded into the test process.

In a process that test_sanitizers.py started it is the one with the sanitizers in it.
"""

import os
import sys
from pathlib import Path

import pytest
from stoker.kernels.native import library
from stoker.kernels.native.build import Target

sys.path.append(str(Path(__file__).parent))  # for the modules that several tests of this folder use

from emulated_build import built
from sanitized import UNITS, WANTED


@pytest.fixture(scope="session")
def emulated() -> Path:
    sanitizers, units = (tuple(filter(None, os.environ.get(name, "").split(","))) for name in (WANTED, UNITS))
    path = built(Target(emulated=True, sanitizers=sanitizers, only=units))
    library.load(path)
    return path
