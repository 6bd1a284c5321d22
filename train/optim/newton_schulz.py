"""The orthogonal factor of matrices by Newton-Schulz iteration: the arithmetic of Muon, on whole matrices.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; its coefficients make the slope
at zero large, so that after five steps singular values lie between about 0.7 and 1.2 instead of at 1.
"""

from __future__ import annotations

from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximately U V^T of each matrix U S V^T; zeros stay zeros.

    matrices: [..., R, C], any floating dtype, in which it is computed (bfloat16 suffices). Returns that shape and
    dtype. FLOPs per matrix and step: about 4 min(R, C)^2 max(R, C) + 2 min(R, C)^3.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # The Frobenius norm bounds the spectral norm, inside which the iteration converges.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x.mT if is_tall else x


def flops(rows: int, columns: int, steps: int) -> int:
    """Of `orthogonalize` for one matrix."""
    low, high = min(rows, columns), max(rows, columns)
    return steps * (4 * low * low * high + 2 * low**3)
