"""Self-attention: projections to heads, their norms, rotation, attention, projection back.

Shapes: T tokens of the residual stream, D hidden, B rows, S positions of a row on this rank, H query heads, K key/value
heads, E features per head; heads are those of this rank.
"""

from __future__ import annotations

from torch import Tensor

from ...conf.schema import QkNorm
from ..linear import project, reduce_linear
from ..params import head_dim, layer_window
from .forward_pass import ForwardPass
from .norm import Branch, HeadsNorm
from .parts import Parts
from .rotary import kind_of


class Attention(Branch):
    """Normed stream to attention output: [T, D] to [T, D]. The norms around it are the block's to apply."""

    def __init__(self, parts: Parts, layer: int) -> None:
        name, config = f"blocks.{layer}.attention", parts.config
        super().__init__(parts, name)
        self.ops, self.queue = parts.ops, parts.queue
        self.axis, self.context = parts.tensor, parts.context
        self.width = head_dim(config)
        self.window, self.rotation = layer_window(config, layer), kind_of(config, layer)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap or None
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.wq = parts.parameter(f"{name}.wq")
        self.wk = parts.parameter(f"{name}.wk")
        self.wv = parts.parameter(f"{name}.wv")
        if config.qkv_bias:
            self.wq_bias = parts.parameter(f"{name}.wq_bias")
            self.wk_bias = parts.parameter(f"{name}.wk_bias")
            self.wv_bias = parts.parameter(f"{name}.wv_bias")
        if config.qk_norm is not QkNorm.none:
            self.q_norm, self.k_norm = parts.parameter(f"{name}.q_norm"), parts.parameter(f"{name}.k_norm")
        self.wo = parts.parameter(f"{name}.wo")
        self.wo_bias = parts.optional(f"{name}.wo_bias")
        self.has_bias, self.norms_each_head = config.qkv_bias, config.qk_norm is QkNorm.head
        self.norm_heads = HeadsNorm(parts) if config.qk_norm is QkNorm.full else None

    def forward(self, x_TD: Tensor, shared: ForwardPass) -> Tensor:
        rows = shared.batch.tokens.shape[0]
        biases = (self.wq_bias, self.wk_bias, self.wv_bias) if self.has_bias else ()
        q, k, v = project(x_TD, (self.wq, self.wk, self.wv), self.queue, self.axis, biases)
        if self.norm_heads is not None:
            q, k = self.norm_heads(q, self.q_norm), self.norm_heads(k, self.k_norm)
        q_BSHE, k_BSKE, v_BSKE = (t.view(rows, -1, t.shape[-1] // self.width, self.width) for t in (q, k, v))
        if self.norms_each_head:
            q_BSHE = self.ops.rmsnorm(q_BSHE, self.q_norm, self.eps, offset=self.offset)
            k_BSKE = self.ops.rmsnorm(k_BSKE, self.k_norm, self.eps, offset=self.offset)
        if self.rotation is not None:
            frequencies, factor, cos_sin = shared.rotations[self.rotation]
            positions_BS = shared.batch.positions
            q_BSHE, k_BSKE = self.ops.rope(
                q_BSHE, k_BSKE, positions_BS, frequencies, factor, cos_sin=cos_sin, inplace=True
            )
        out_BSHE = self.context.attention(
            q_BSHE,
            k_BSKE,
            v_BSKE,
            shared.batch,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
        )
        return reduce_linear(out_BSHE.reshape(q.shape), self.wo, self.queue, self.axis, self.wo_bias)
