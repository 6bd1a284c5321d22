"""Tokens' rows in the order of the experts they go to, and back: signatures and references.

`moe_sort` plans, `moe_permute` and `moe_unpermute` move rows. Copies of a token always lie and are added in one order,
so the same inputs give the same bits. Does not know ranks: which rows travel where is the caller's (experts over
several ranks exchange rows between the two moves).

Shapes: T tokens, k experts of each, E experts, D features, N copies that are moved (T x k less those of no expert).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import accumulate_dtype, apply, distinct


class MoeSort(Protocol):
    """The signature of `moe_sort`, see there."""

    def __call__(self, choice: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]: ...


class MoePermute(Protocol):
    """The signature of `moe_permute`, see there."""

    def __call__(self, x: Tensor, copies: Tensor, places: Tensor) -> Tensor: ...


class MoeUnpermute(Protocol):
    """The signature of `moe_unpermute`, see there."""

    def __call__(self, rows: Tensor, copies: Tensor, places: Tensor, weights: Tensor) -> Tensor: ...


def moe_sort(choice: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The T x k choices by expert; those of one expert by token, and by k within a token.

    choice: [T, k] int64, 0 to num_experts; num_experts itself stands for none (tokens that only fill up): such copies
    come last and are counted nowhere.
    Returns (copies [T x k]: which choice, of choice.reshape(-1), each row is of; places [T, k]: at which row each
    choice is, its inverse; counts [E]: rows per expert), all int64. Raises ValueError for other shapes or dtypes.
    """
    check_moe_sort(choice, num_experts)
    flat = choice.reshape(-1)
    copies = torch.argsort(flat, stable=True)
    places = torch.empty_like(copies)
    places[copies] = torch.arange(len(copies), device=copies.device)
    # Not torch.bincount, which waits for the device.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=choice.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return copies, places.view(choice.shape), counts[:num_experts]


def moe_permute(x: Tensor, copies: Tensor, places: Tensor) -> Tensor:
    """A row for each copy, in the order of the experts.

    x: [T, D], any dtype. copies: [N], the first N that `moe_sort` returned; places: [T, k] as it returned them.
    Returns [N, D], row i being x[copies[i] // k].
    The gradient of x is the sum over a token's copies, in accumulate_dtype of x, in the order of k; a place of N or
    more adds nothing. Raises ValueError for shapes or dtypes that do not fit.
    """
    check_moe_permute(x, copies, places)
    rows: Tensor = apply(_Permute, x, copies, places)
    return rows


def moe_unpermute(rows: Tensor, copies: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """For each token the weighted sum of its copies.

    rows: [N, D], float. copies, places: as for `moe_permute`. weights: [T, k] in accumulate_dtype of rows, in which the
    sum is formed. Returns y [T, D]: y[t] is the sum of weights[t, k] rows[places[t, k]] in the order of k, rounded
    once, to rows' dtype. A place of N or more adds nothing, and the gradient of its weight is 0. Differentiable in rows
    and weights. Raises ValueError for what does not fit.
    """
    check_moe_unpermute(rows, copies, places, weights)
    y: Tensor = apply(_Unpermute, rows, copies, places, weights)
    return y


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[copies // places.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_copies(grad_rows, places, None), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, copies, places, weights)
        return distinct(_sum_copies(rows, places, weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        rows, copies, places, weights = ctx.saved_tensors
        grad_y = grad_y.to(weights.dtype)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[3]:
            grad_weights = torch.zeros_like(weights)
            for k in range(places.shape[1] if len(rows) else 0):
                grad_weights[:, k] = (grad_y * _copies(rows, places[:, k], places.numel())).sum(-1)
        if ctx.needs_input_grad[0]:
            grad_rows = (grad_y[copies // places.shape[1]] * weights.reshape(-1)[copies, None]).to(rows.dtype)
        return grad_rows, None, None, grad_weights


def _sum_copies(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Each token's copies, times their weights, summed in the order of k: [T, D] in the rows' dtype."""
    total = torch.zeros(len(places), rows.shape[1], dtype=accumulate_dtype(rows.dtype), device=rows.device)
    for k in range(places.shape[1] if len(rows) else 0):
        copy = _copies(rows, places[:, k], places.numel())
        total += copy if weights is None else copy * weights[:, k, None]
    return total.to(rows.dtype)


def _copies(rows: Tensor, places: Tensor, choices: int) -> Tensor:
    """The rows at `places`, zeros where there is none. With a row for each of the `choices` nothing is missing."""
    if len(rows) == choices:
        return rows[places]
    return rows[places.clamp(max=len(rows) - 1)].masked_fill_((places >= len(rows))[:, None], 0)


def check_moe_sort(choice: Tensor, num_experts: int) -> None:
    """ValueError unless the arguments fit together."""
    if choice.dim() != 2 or choice.dtype != torch.int64:
        raise ValueError(f"moe_sort: choice is {choice.dtype} {tuple(choice.shape)}, expected int64 [tokens, k]")
    if num_experts < 1:
        raise ValueError(f"moe_sort: num_experts={num_experts}, expected at least 1")


def check_moe_permute(x: Tensor, copies: Tensor, places: Tensor) -> None:
    """ValueError unless the arguments fit together."""
    if x.dim() != 2 or places.dim() != 2 or places.shape[0] != x.shape[0]:
        shapes = f"x is {tuple(x.shape)}, places {tuple(places.shape)}"
        raise ValueError(f"moe_permute: {shapes}; expected [tokens, features] and [tokens, k]")
    _check_indices("moe_permute", copies, places)


def check_moe_unpermute(rows: Tensor, copies: Tensor, places: Tensor, weights: Tensor) -> None:
    """ValueError unless the arguments fit together."""
    if rows.dim() != 2 or places.dim() != 2 or copies.shape != rows.shape[:1]:
        shapes = f"rows are {tuple(rows.shape)}, copies {tuple(copies.shape)}, places {tuple(places.shape)}"
        raise ValueError(f"moe_unpermute: {shapes}; expected [rows, features], [rows] and [tokens, k]")
    wide = accumulate_dtype(rows.dtype)
    if weights.shape != places.shape or weights.dtype != wide:
        raise ValueError(
            f"moe_unpermute: weights are {weights.dtype} {tuple(weights.shape)}, expected {wide} {tuple(places.shape)}"
        )
    _check_indices("moe_unpermute", copies, places)


def _check_indices(op: str, copies: Tensor, places: Tensor) -> None:
    if copies.dim() != 1 or copies.dtype != torch.int64 or places.dtype != torch.int64:
        raise ValueError(
            f"{op}: copies are {copies.dtype} {tuple(copies.shape)}, places {places.dtype}; "
            "expected what moe_sort returns"
        )
    if copies.shape[0] > places.numel():
        raise ValueError(f"{op}: {copies.shape[0]} copies of {places.numel()} choices")
