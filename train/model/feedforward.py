"""The dense feed-forward layer.

Shapes: T tokens of the residual stream, D hidden, F inner features of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..linear import project, reduce_linear
from .parts import Parts


class FeedForward(nn.Module):
    """SwiGLU: normed stream [T, D] to [T, D]. The norm before it is the block's to apply."""

    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.ops, self.queue, self.axis = parts.ops, parts.queue, parts.tensor
        self.norm = parts.parameter(f"{name}.norm")
        self.gate = parts.parameter(f"{name}.gate")
        self.up = parts.parameter(f"{name}.up")
        self.down = parts.parameter(f"{name}.down")

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = project(x_TD, (self.gate, self.up), self.queue, self.axis)
        return reduce_linear(self.ops.swiglu(gate_TF, up_TF), self.down, self.queue, self.axis)
