"""Trainer tests: one thread, a fixed seed, and `run_ranks` for collective ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for `import harness`, here and in forked ranks


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(2, function, key=value)`: see harness.Ranks."""
    from harness import Ranks

    ranks = Ranks()
    yield ranks.run
    ranks.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small data set over 64 tokens."""
    from harness import make_data

    prefix = tmp_path_factory.mktemp("data") / "tiny"
    make_data(prefix)
    return prefix


@pytest.fixture(scope="session")
def alone(tiny_data: Path) -> Callable[[dict[str, dict[str, Any]]], Any]:
    """The run of a parity case on one process; cases that differ in their layout alone share it."""
    import parity

    known: dict[str, parity.Run] = {}

    def run(other: dict[str, dict[str, Any]]) -> parity.Run:
        if repr(other) not in known:
            known[repr(other)] = parity.run(None, parity.configured(tiny_data, **other))
        return known[repr(other)]

    return run
