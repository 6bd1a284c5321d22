"""What every contender saves and loads, and what runs beside it: a rank's state, raw copies of it, a training step.

Needs nothing but torch: it runs in the environments of other trainers too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

WIDTH = 1024
LAYER = 4 * WIDTH * WIDTH * 14  # bytes of four matrices: weights in bfloat16; two moments and a master copy in float32
KINDS = {
    "model": torch.bfloat16,
    "optim/exp_avg": torch.float32,
    "optim/exp_avg_sq": torch.float32,
    "optim/master": torch.float32,
}
PIECE = 16 * 1024 * 1024  # bytes per call of a raw write or read
STEP_SECONDS = 0.03


class Contender(Protocol):
    """One way to save and load; all ranks make every call together, but for `before_update`."""

    def prepare(self) -> None:
        """What may be done before the first save, while training goes on."""
        ...

    def wake(self) -> None:
        """Write to the memory that is kept between saves."""

    def begin(self, directory: Path) -> None:
        """Save into `directory`, which is there and empty. The state may be used when this returns."""
        ...

    def before_update(self) -> None:
        """The state is about to change."""
        ...

    def numbers(self) -> list[float]:
        """Two numbers that a step's reduction sums over all ranks beside its own."""
        ...

    def is_over(self, sums: list[float]) -> bool:
        """At a step's end, the same on all ranks: whether the checkpoint is complete and on stable storage."""
        ...

    def wait(self) -> None:
        """For the end of the save."""
        ...

    def load(self, directory: Path) -> None:
        """Into the tensors of the state."""
        ...

    def close(self) -> None: ...


def make_state(rank: int, size: int, total: int) -> dict[str, torch.Tensor]:
    """This rank's rows of a model's matrices and their optimizer state: `total / size` bytes, rounded up to layers."""
    rows = WIDTH // size
    layers = max(1, round(total / LAYER))
    generator = torch.Generator().manual_seed(rank)
    # One tensor's values for all: what they are plays no part.
    values = torch.randn(rows, WIDTH, generator=generator)
    return {
        f"{kind}/blocks.{layer:02d}.w{number}": values.to(dtype, copy=True)
        for kind, dtype in KINDS.items()
        for layer in range(layers)
        for number in range(4)
    }


def nbytes(state: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in state.values())


def touch(tensor: torch.Tensor) -> None:
    """Write to all of it what is there, but for a few bytes at its end."""
    data = tensor.view(-1).view(torch.uint8)
    data[: data.numel() // 8 * 8].view(torch.int64).add_(0)


class Raw:
    """The same bytes in one piece of memory, written to and read from one file per rank by plain calls."""

    def __init__(self, state: dict[str, torch.Tensor], rank: int) -> None:
        self._state, self._rank, self.size = state, rank, nbytes(state)
        self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self.copy()

    def copy(self) -> None:
        """The least that a snapshot costs."""
        at = self._address
        for tensor in self._state.values():
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes

    def write(self, directory: Path, flags: int = 0) -> None:
        """`flags`: more of open(2)."""
        fd = os.open(directory / f"raw-{self._rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o644)
        at = 0
        while at < self.size:
            at += os.write(fd, self._view[at : at + PIECE])
        os.fsync(fd)
        os.close(fd)
        sync_directory(directory)

    def read(self, directory: Path) -> None:
        with open(directory / f"raw-{self._rank}", "rb", buffering=0) as file:
            at = 0
            while at < self.size:
                got = file.readinto(self._view[at : at + PIECE])
                assert got
                at += got


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def calibrate() -> int:
    """How many products take STEP_SECONDS."""
    training = Training(4)
    torch.set_num_threads(1)
    counts = []
    for _ in range(9):
        began = time.perf_counter()
        training.compute()
        counts.append(4 * STEP_SECONDS / (time.perf_counter() - began))
    return max(1, round(sorted(counts)[len(counts) // 2]))


@dataclass
class Training:
    """Steps of matrix products on one thread, each as long as the slowest rank's, as in data-parallel training.

    The state itself does not change: on a GPU it would not be in this memory either, and a forked writer's copies on
    write cost nothing here.
    """

    products: int
    _a: torch.Tensor = field(default_factory=lambda: torch.randn(512, 512))
    _out: torch.Tensor = field(default_factory=lambda: torch.empty(512, 512))

    def compute(self) -> None:
        for _ in range(self.products):
            torch.mm(self._a, self._a, out=self._out)

    def step(self, numbers: Callable[[], list[float]], before_update: Callable[[], None]) -> list[float]:
        """Returns the sums of `numbers` over all ranks."""
        self.compute()
        sums = torch.tensor(numbers(), dtype=torch.float64)
        dist.all_reduce(sums)
        before_update()
        return sums.tolist()
