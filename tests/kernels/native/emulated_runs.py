"""How a test runs emulated kernels: in one order of threads or in several, some blocks of a grid, tensors past 2^31.

Used by the tests of every op. Building is emulated_build.py's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

ORDERS = ("ascending", "descending", "random:1")
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux; Python 3.10 has no name for it

Result = TypeVar("Result")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def thread_order(order: str) -> AbstractContextManager[None]:
    """Kernels inside run their threads and blocks in this order: ascending, descending or random:<seed>."""
    return _environment("STOKER_EMULATION_ORDER", order)


def only_blocks(*indices: int) -> AbstractContextManager[None]:
    """Launches inside run these blocks alone, each index taken modulo the number of blocks: -1 is the last."""
    return _environment("STOKER_EMULATION_BLOCKS", ",".join(map(str, indices)))


def in_every_order(run: Callable[[], Result]) -> list[Result]:
    """What `run` gives in each of ORDERS. Shared memory that nobody wrote is NaN in the first, 1e36 in the others."""
    results = []
    for order in ORDERS:
        with thread_order(order):
            results.append(run())
    return results


def assert_order_does_not_matter(run: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
    """Same bits in every order of threads: no barrier is missing, nothing unwritten is read."""
    first, *others = [[r] if isinstance(r, torch.Tensor) else list(r) for r in in_every_order(run)]
    for order, other in zip(ORDERS[1:], others, strict=True):
        for k, (a, b) in enumerate(zip(first, other, strict=True)):
            same = torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            assert same, f"result {k} differs between {ORDERS[0]} and {order}: a barrier is missing"


def sparse(rows: int, width: int, dtype: torch.dtype, stride: int | None = None) -> torch.Tensor:
    """Zeros [rows, width] that take memory only where they are written; any size that the address space has.

    stride: elements from one row to the next, `width` if None.
    """
    stride = width if stride is None else stride
    elements = (rows - 1) * stride + width
    size = elements * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    flat = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
    return flat.as_strided((rows, width), (stride, 1))
