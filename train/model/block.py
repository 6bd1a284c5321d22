"""One residual block: attention and feed-forward layer with their norms, and dropout on what they add.

Shapes: T tokens of the residual stream that this rank holds, D hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels import Ops
from .attention import Attention
from .feedforward import FeedForward
from .forward_pass import ForwardPass
from .parts import Parts


class Block(nn.Module):
    """Pre-norm residual block. The residual stream travels as a pair: the sum so far, and the last branch's output,
    which the next norm adds on its way (one pass over memory instead of two)."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.config, self.ops, self.layer = parts.config, parts.ops, layer
        self.attention = Attention(parts, f"blocks.{layer}.attention")
        self.ffn = FeedForward(parts, f"blocks.{layer}.ffn")

    def forward(self, x_TD: Tensor, branch_TD: Tensor | None, shared: ForwardPass) -> tuple[Tensor, Tensor]:
        h_TD, x_TD = add_norm(self.ops, x_TD, branch_TD, self.attention.norm, self.config.norm_eps)
        branch_TD = self._drop(self.attention(h_TD, shared), 2 * self.layer, shared)
        h_TD, x_TD = add_norm(self.ops, x_TD, branch_TD, self.ffn.norm, self.config.norm_eps)
        return x_TD, self._drop(self.ffn(h_TD), 2 * self.layer + 1, shared)

    def _drop(self, branch_TD: Tensor, site: int, shared: ForwardPass) -> Tensor:
        key, numbers_T = shared.dropout, shared.numbers_T
        if key is None or numbers_T is None:
            return branch_TD
        return self.ops.dropout(branch_TD, self.config.dropout, key.seed, key.step, site, numbers_T)


def add_norm(ops: Ops, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed x + branch, x + branch); branch None is nothing to add."""
    if branch is None:
        return ops.rmsnorm(x, weight, eps), x
    return ops.rmsnorm(branch, weight, eps, residual=x)
