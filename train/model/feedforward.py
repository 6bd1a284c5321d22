"""The dense feed-forward layer.

Shapes: T tokens of the residual stream, D hidden, F inner features of this rank.
"""

from __future__ import annotations

from torch import Tensor

from ...conf.schema import Activation
from ..linear import project, reduce_linear
from .norm import Branch
from .parts import Parts


class FeedForward(Branch):
    """Normed stream [T, D] to [T, D]. The norms around it are the block's to apply."""

    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__(parts, name)
        activation = parts.config.activation
        self.ops, self.queue, self.axis = parts.ops, parts.queue, parts.tensor
        self.has_gate, self.has_bias = activation is not Activation.gelu, parts.config.linear_bias
        if self.has_gate:
            self.gate = parts.parameter(f"{name}.gate")
            self.activate = parts.ops.swiglu if activation is Activation.swiglu else parts.ops.geglu
        self.up = parts.parameter(f"{name}.up")
        self.down = parts.parameter(f"{name}.down")
        if self.has_bias:
            self.up_bias = parts.parameter(f"{name}.up_bias")
            if self.has_gate:
                self.gate_bias = parts.parameter(f"{name}.gate_bias")
        self.down_bias = parts.optional(f"{name}.down_bias")

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.has_gate:
            gate_and_up = (self.gate_bias, self.up_bias) if self.has_bias else ()
            gate_TF, up_TF = project(x_TD, (self.gate, self.up), self.queue, self.axis, gate_and_up)
            inner_TF = self.activate(gate_TF, up_TF)
        else:
            up = (self.up_bias,) if self.has_bias else ()
            inner_TF = self.ops.gelu(project(x_TD, (self.up,), self.queue, self.axis, up)[0])
        return reduce_linear(inner_TF, self.down, self.queue, self.axis, self.down_bias)
