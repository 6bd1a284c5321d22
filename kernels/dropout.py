"""Dropout whose mask depends on global element addresses only: signature and reference.

The same (seed, step, site, row, column) keeps or drops the same element however the tensor is sharded or the batch
is split, and a backward pass or a recomputation needs no stored mask. The generator is in philox.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import apply, distinct
from .philox import WORD, philox4x32


class Dropout(Protocol):
    """The signature of `dropout`, see there."""

    def __call__(
        self,
        x: Tensor,
        p: float,
        seed: int,
        step: int,
        site: int,
        rows: Tensor,
        col_start: int = 0,
        n_cols: int | None = None,
    ) -> Tensor: ...


def dropout(
    x: Tensor,
    p: float,
    seed: int,
    step: int,
    site: int,
    rows: Tensor,
    col_start: int = 0,
    n_cols: int | None = None,
) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p).

    x: [..., D], any floating dtype and strides. 0 <= p < 1; p = 0 returns x. seed: 0 .. 2^64 - 1, one per run.
    step: 0 .. 2^32 - 1, the optimizer step. site: 0 .. 2^32 - 1, which dropout of the model this is.
    rows: [...] int64, the global number of each row (say sample in the global batch * sequence length + position).
    col_start, n_cols: where x's D columns lie among the global tensor's n_cols; None means x has all of them.
    Returns x's shape and dtype. The address of an element is (row * ceil(n_cols / 4) + column // 4) as the low and
    high word of Philox's counter, then step and site; column % 4 picks the word, kept when word >= round(p * 2^32);
    the key is seed's low and high word. Raises ValueError on shapes and on numbers out of range.
    """
    width = x.shape[-1]
    total = width if n_cols is None else n_cols
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: p={p}, expected 0 <= p < 1")
    for name, value, bits in (("seed", seed, 64), ("step", step, 32), ("site", site, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"dropout: {name}={value}, expected 0 to 2^{bits} - 1")
    if rows.shape != x.shape[:-1] or rows.dtype != torch.int64:
        raise ValueError(f"dropout: rows is {rows.dtype} {tuple(rows.shape)}, expected int64 {tuple(x.shape[:-1])}")
    if not 0 <= col_start <= total - width:
        raise ValueError(f"dropout: columns {col_start} to {col_start + width} do not lie in 0 to {total}")
    if p == 0.0:
        return x
    dropped: Tensor = apply(_Dropout, x, rows, _Address(p, seed, step, site, col_start, width, total))
    return dropped


@dataclass(frozen=True)
class _Address:
    """Everything of an element's address that is one number for the whole tensor."""

    p: float
    seed: int
    step: int
    site: int
    col_start: int
    width: int
    n_cols: int


def _keep(rows: Tensor, address: _Address) -> Tensor:
    """True where an element stays: [..., width]."""
    first = address.col_start // 4
    last = -(-(address.col_start + address.width) // 4)
    blocks = torch.arange(first, last, device=rows.device)
    index = rows.unsqueeze(-1) * -(-address.n_cols // 4) + blocks
    step, site = torch.full_like(index, address.step), torch.full_like(index, address.site)
    counter = (index & WORD, (index >> 32) & WORD, step, site)
    words = torch.stack(philox4x32(counter, (address.seed & WORD, address.seed >> 32)), -1).flatten(-2)
    skip = address.col_start - 4 * first
    return words[..., skip : skip + address.width] >= round(address.p * 2**32)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, address: _Address) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.address = address
        return distinct(_drop(x, rows, address))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _drop(grad, ctx.saved_tensors[0], ctx.address), None, None


def _drop(x: Tensor, rows: Tensor, address: _Address) -> Tensor:
    # masked_fill and not a product with 0: a dropped infinity is 0, not NaN.
    return (x * (1 / (1 - address.p))).masked_fill_(~_keep(rows, address), 0.0)
