"""How a test runs emulated kernels: in one order of threads or in several, some blocks of a grid, tensors past 2^31.

Used by the tests of every op. Building is emulated_build.py's.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
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


def only_blocks(*indices: int, of: str = "") -> AbstractContextManager[None]:
    """Launches inside run these blocks alone, each index taken modulo the number of blocks: -1 is the last.

    of: a part of the names of the kernels that this is for; the others run whole.
    """
    return _environment("STOKER_EMULATION_BLOCKS", f"{of}:" * bool(of) + ",".join(map(str, indices)))


def multiprocessors(count: int) -> AbstractContextManager[None]:
    """Launches inside are for a device with so many: the more, the fewer rounds of a block that walks over its work."""
    return _environment("STOKER_EMULATION_MULTIPROCESSORS", str(count))


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


def outputs_and_grads(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    tensors: Sequence[torch.Tensor],
    upstream: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """What function(*tensors) returns, then the gradient of each tensor; these keep the layouts they have.

    upstream: the gradient of the one output; None: multiples of 1/8, which every dtype has, the same in each call.
    """
    leaves = [t.detach().requires_grad_() for t in tensors]
    result = function(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    generator = torch.Generator().manual_seed(1)
    grads = [
        torch.randint(-16, 17, o.shape, generator=generator) / 8 if upstream is None else upstream for o in outputs
    ]
    found = torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *found]


def sparse(shape: tuple[int, ...], dtype: torch.dtype, stride: int | None = None) -> torch.Tensor:
    """Zeros that take memory only where they are written: of any size that the address space has.

    stride: elements from one place of the first dimension to the next; None: contiguous.
    """
    within = math.prod(shape[1:])
    stride = within if stride is None else stride
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, ((shape[0] - 1) * stride + within) * dtype.itemsize, flags=flags)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided((shape[0], within), (stride, 1)).unflatten(1, shape[1:]) if shape[1:] else flat


class FarRows:
    """Tensors [rows, *row] of which only the rows at both ends are ever touched, and with which offsets pass 2^31.

        far = FarRows((4096,), torch.bfloat16)
        x = far.random()
        with far.launches():
            y = op(x)
        torch.testing.assert_close(far.ends(y), reference(far.ends(x)))

    A kernel whose offsets have 32 bits reads or writes elsewhere: other results, or RuntimeError. There are a little
    more than 2^31 elements, so with 2 bytes each the last rows lie past 2^32 bytes.
    """

    def __init__(self, row: tuple[int, ...], dtype: torch.dtype) -> None:
        self.rows = 2**31 // math.prod(row) + 3
        self.shape = (self.rows, *row)
        self.dtype = dtype
        self._ends = torch.tensor([0, 1, self.rows - 2, self.rows - 1])

    def random(self, scale: float = 1.0) -> torch.Tensor:
        """New, normally distributed at both ends, zero between them."""
        tensor = sparse(self.shape, self.dtype)
        tensor[self._ends] = (scale * torch.randn(4, *self.shape[1:])).to(self.dtype)
        return tensor

    def ends(self, tensor: torch.Tensor) -> torch.Tensor:
        """The two first and the two last rows, copied."""
        return tensor[self._ends]

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Of each launch inside only the blocks at both ends run, on a device with so many multiprocessors that no
        block of a loop over all rows has many of them. Sums over all rows are therefore wrong."""
        # By their own numbers, too: where a grid has fewer blocks than rows, they begin again with the first block.
        blocks = (0, 1, -2, -1, self.rows - 2, self.rows - 1)
        with multiprocessors(2**20), only_blocks(*blocks):
            yield
