"""Rotary position embedding of queries and keys: signature, reference, and the table of cosines and sines.

Does not choose frequencies (theta, NTK, YaRN, llama3 scaling belong to the model); it gets `inv_freq` and `scale`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import accumulate_dtype, apply, distinct


class Rope(Protocol):
    """The signature of `rope`, see there."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        inv_freq: Tensor,
        scale: float = 1.0,
        interleaved: bool = False,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor]: ...


def rope_cos_sin(
    positions: Tensor, inv_freq: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """scale * cos and scale * sin of positions x inv_freq, to be computed once per batch and shared by all layers.

    positions: [B, S] int64. inv_freq: [R / 2]. dtype: of q and k, widened to at least float32.
    Returns (cos, sin), each [B, S, R / 2]. Angles are formed in float64: in float32 an angle at position one
    million is off by a hundredth of a radian.
    """
    angle = positions.unsqueeze(-1).to(torch.float64) * inv_freq.to(torch.float64)
    wide = accumulate_dtype(dtype)
    return (angle.cos() * scale).to(wide), (angle.sin() * scale).to(wide)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    scale: float = 1.0,
    interleaved: bool = False,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of features by positions x inv_freq (Su et al. 2021, arXiv:2104.09864).

    q: [B, S, H, D], k: [B, S, KV, D], any floating dtype and strides. positions: [B, S] int64.
    inv_freq: [R / 2] floating, R <= D; features from R on pass through (partial rotary).
    scale: factor on cos and sin (YaRN's attention factor), 1.0 for plain RoPE.
    interleaved: False pairs feature i with i + R / 2 (GPT-NeoX, Llama in transformers), True pairs 2i with 2i + 1
    (GPT-J, Meta's Llama). cos_sin: the result of `rope_cos_sin` for the same positions, inv_freq and scale, which
    are then not read; None computes it here. inplace: the caller reads neither q nor k again, and they share no memory;
    where no gradient is asked for, an implementation may then turn them where they lie.
    Returns (q, k) in the dtypes given, new tensors unless `inplace`. Gradients reach q and k only. Raises ValueError on
    shapes.
    """
    check_rope(q, k, positions, inv_freq, cos_sin)
    cos, sin = cos_sin if cos_sin is not None else rope_cos_sin(positions, inv_freq, scale, q.dtype)
    rotated: tuple[Tensor, Tensor] = apply(_Rope, q, k, cos, sin, interleaved)
    return rotated


def check_rope(
    q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, cos_sin: tuple[Tensor, Tensor] | None
) -> None:
    """ValueError for shapes that do not fit."""
    if inv_freq.dim() != 1 or 2 * inv_freq.shape[0] > q.shape[-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"rope: inv_freq {tuple(inv_freq.shape)} rotates twice its length of features; "
            f"q has {q.shape[-1]} and k {k.shape[-1]} per head"
        )
    if positions.shape != q.shape[:2] or positions.shape != k.shape[:2]:
        raise ValueError(
            f"rope: positions {tuple(positions.shape)} must be [B, S] of q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    pairs = (*positions.shape, inv_freq.shape[0])
    if cos_sin is not None and not cos_sin[0].shape == cos_sin[1].shape == pairs:
        raise ValueError(
            f"rope: cos_sin is {tuple(cos_sin[0].shape)}, {tuple(cos_sin[1].shape)}; of these positions and "
            f"frequencies it has {pairs} twice"
        )


class _Rope(torch.autograd.Function):
    """The backward of a rotation is the rotation by the opposite angle (with the same scale)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.rotate = _rotate_adjacent if interleaved else _rotate_halves
        return distinct(ctx.rotate(q, cos, sin, 1)), distinct(ctx.rotate(k, cos, sin, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return ctx.rotate(grad_q, cos, sin, -1), ctx.rotate(grad_k, cos, sin, -1), None, None, None


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x: [B, S, N, D]; cos, sin: [B, S, R / 2]. Three passes, no concatenation of x."""
    half = cos.shape[-1]
    wide = x.to(cos.dtype)
    cos_full = torch.cat((cos, cos), -1).unsqueeze(2)
    sin_half = sin.unsqueeze(2)
    if 2 * half == x.shape[-1]:
        out = wide * cos_full
    else:
        out = wide.clone()
        out[..., : 2 * half].mul_(cos_full)
    out[..., :half].addcmul_(wide[..., half : 2 * half], sin_half, value=-sign)
    out[..., half : 2 * half].addcmul_(wide[..., :half], sin_half, value=sign)
    return out.to(x.dtype)


def _rotate_adjacent(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """As `_rotate_halves` with pairs (2i, 2i + 1): a multiplication of complex numbers."""
    rotary = 2 * cos.shape[-1]
    wide = x.to(cos.dtype)
    turn = torch.complex(cos, sin * sign).unsqueeze(2)
    pairs = torch.view_as_complex(wide[..., :rotary].unflatten(-1, (rotary // 2, 2)).contiguous())
    out = torch.view_as_real(pairs * turn).flatten(-2)
    if rotary < x.shape[-1]:
        out = torch.cat((out, wide[..., rotary:]), -1)
    return out.to(x.dtype)
