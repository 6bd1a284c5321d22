"""The experts of each token by the router's scores, and their weights: signature and reference.

Does not own scores (softmax or sigmoid of logits), terms that balance the load, or what happens to the tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

SMALLEST_SUM = 1e-20  # added to the sum of weights: sigmoids may all be next to 0


class MoeTopk(Protocol):
    """The signature of `moe_topk`, see there."""

    def __call__(
        self, scores: Tensor, k: int, bias: Tensor | None = None, normalize: bool = False, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]: ...


def moe_topk(
    scores: Tensor, k: int, bias: Tensor | None = None, normalize: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The k highest scores of each token. Of equal ones the lower expert comes first; NaN is higher than any number.

    scores: [T, E], float32 or float64. bias: None or [E], float32 or of scores' dtype; added to the scores where
    experts are chosen, and nowhere else (Wang et al. 2024, arXiv:2408.15664). normalize: weights of a token are divided
    by their sum. scale: then multiplies them.
    Returns (choice [T, k] int64, highest first, distinct within a row; weights [T, k] in scores' dtype). Weights have a
    derivative with respect to the scores that were chosen; the choice has none. Raises ValueError for misfits.
    """
    check_moe_topk(scores, k, bias)
    with torch.no_grad():
        ranking = scores if bias is None else scores + bias
        # Not topk: which of equal scores it takes is not defined.
        choice = ranking.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    weights = scores.gather(-1, choice)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return choice, weights * scale


def check_moe_topk(scores: Tensor, k: int, bias: Tensor | None) -> None:
    """ValueError unless the arguments fit together."""
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"moe_topk: scores are {scores.dtype} {tuple(scores.shape)}, expected float32 or float64 [tokens, experts]"
        )
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"moe_topk: k={k} of {scores.shape[1]} experts, expected 1 to {scores.shape[1]}")
    if bias is not None and (bias.shape != scores.shape[1:] or bias.dtype not in (torch.float32, scores.dtype)):
        raise ValueError(
            f"moe_topk: bias is {bias.dtype} {tuple(bias.shape)}, expected {scores.dtype} or float32 "
            f"{tuple(scores.shape[1:])}, one per expert"
        )
