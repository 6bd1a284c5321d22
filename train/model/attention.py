"""Self-attention: projections to heads, rotation, attention, projection back.

Shapes: T tokens of the residual stream, D hidden, B rows, S positions of a row on this rank, H query heads, K key/value
heads, E features per head; heads are those of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...conf.schema import QkNorm
from ..linear import project, reduce_linear
from ..params import head_dim
from .forward_pass import ForwardPass
from .parts import Parts


class Attention(nn.Module):
    """Normed stream to attention output: [T, D] to [T, D]. The norm before it is the block's to apply."""

    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.config, self.ops, self.queue = parts.config, parts.ops, parts.queue
        self.axis, self.context = parts.tensor, parts.context
        self.width = head_dim(parts.config)
        self.norm = parts.parameter(f"{name}.norm")
        self.wq = parts.parameter(f"{name}.wq")
        self.wk = parts.parameter(f"{name}.wk")
        self.wv = parts.parameter(f"{name}.wv")
        if self.config.qk_norm is QkNorm.head:
            self.q_norm, self.k_norm = parts.parameter(f"{name}.q_norm"), parts.parameter(f"{name}.k_norm")
        self.wo = parts.parameter(f"{name}.wo")

    def forward(self, x_TD: Tensor, shared: ForwardPass) -> Tensor:
        rows = shared.batch.tokens.shape[0]
        q, k, v = project(x_TD, (self.wq, self.wk, self.wv), self.queue, self.axis)
        q_BSHE, k_BSKE, v_BSKE = (t.view(rows, -1, t.shape[-1] // self.width, self.width) for t in (q, k, v))
        if self.config.qk_norm is QkNorm.head:
            q_BSHE = self.ops.rmsnorm(q_BSHE, self.q_norm, self.config.norm_eps)
            k_BSKE = self.ops.rmsnorm(k_BSKE, self.k_norm, self.config.norm_eps)
        q_BSHE, k_BSKE = self.ops.rope(q_BSHE, k_BSKE, shared.batch.positions, shared.inv_freq, cos_sin=shared.cos_sin)
        out_BSHE = self.context.attention(
            q_BSHE,
            k_BSKE,
            v_BSKE,
            shared.batch,
            window=self.config.sliding_window or None,
            softcap=self.config.attention_softcap or None,
        )
        return reduce_linear(out_BSHE.reshape(q.shape), self.wo, self.queue, self.axis)
