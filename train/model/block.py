"""One residual block: attention and feed-forward layer with their norms, and dropout on what they add.

Shapes: T tokens of the residual stream that this rank holds, D hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...conf.schema import NormOrder
from ..params import has_experts
from .attention import Attention
from .feedforward import FeedForward
from .forward_pass import ForwardPass
from .moe import MixtureOfExperts
from .norm import Branch, stream_norm
from .parts import Parts


class Block(nn.Module):
    """The residual stream travels as a pair: the sum so far, and the last branch's output, which the next norm adds on
    its way (one pass over memory instead of two)."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.config, self.ops, self.layer = parts.config, parts.ops, layer
        self.norm = stream_norm(parts)
        self.norms_before = parts.config.norm_order is not NormOrder.post
        self.norms_behind = parts.config.norm_order is not NormOrder.pre
        self.attention = Attention(parts, layer)
        name = f"blocks.{layer}.ffn"
        self.ffn = MixtureOfExperts(parts, layer) if has_experts(parts.config, layer) else FeedForward(parts, name)

    def forward(self, x_TD: Tensor, branch_TD: Tensor | None, shared: ForwardPass) -> tuple[Tensor, Tensor]:
        h_TD, x_TD = self._enter(x_TD, branch_TD, self.attention)
        branch_TD = self._leave(self.attention(h_TD, shared), self.attention, 0, shared)
        h_TD, x_TD = self._enter(x_TD, branch_TD, self.ffn)
        return x_TD, self._leave(self._feed_forward(h_TD, shared), self.ffn, 1, shared)

    def _feed_forward(self, h_TD: Tensor, shared: ForwardPass) -> Tensor:
        if isinstance(self.ffn, MixtureOfExperts):
            assert shared.rows is not None
            return self.ffn(h_TD, shared.rows, shared.scale)
        return self.ffn(h_TD)

    def _enter(self, x_TD: Tensor, branch_TD: Tensor | None, to: Branch) -> tuple[Tensor, Tensor]:
        """(what a branch sees, the stream)."""
        if self.norms_before:
            return self.norm.of_sum(x_TD, branch_TD, to.norm, to.norm_bias)
        x_TD = x_TD if branch_TD is None else x_TD + branch_TD
        return x_TD, x_TD

    def _leave(self, branch_TD: Tensor, of: Branch, part: int, shared: ForwardPass) -> Tensor:
        """What a branch adds to the stream."""
        if self.norms_behind:
            branch_TD = self.norm.alone(branch_TD, of.post_norm, of.post_norm_bias)
        key, numbers_T = shared.dropout, shared.numbers_T
        if key is None or numbers_T is None:
            return branch_TD
        # The layer's number is read only here: where it is not, one compiled graph serves all layers.
        site = 2 * self.layer + part
        return self.ops.dropout(branch_TD, self.config.dropout, key.seed, key.step, site, numbers_T)
