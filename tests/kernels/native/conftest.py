"""The native ops on the CPU: the library built through the emulation header and loaded into the test process."""

from pathlib import Path

import pytest
from stoker.kernels.native import library
from stoker.kernels.native.build import Target, build


@pytest.fixture(scope="session")
def emulated() -> Path:
    path = build(Target(emulated=True))
    library.load(path)
    return path
