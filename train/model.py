"""The model: a Llama-style decoder as a list of blocks (Touvron et al. 2023; QK-norm as in Qwen3).

Owns: the mathematics of embedding, blocks and loss. Knows no parallelism, optimizer or run; parameters are named as in
params.decoder_table and get their values from init.py. All fused operations come from the `Ops` it is given.

Shapes: B rows, S positions, D hidden, H query heads, K key/value heads, E features per head, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..conf.schema import ModelConfig, QkNorm
from ..kernels.rope import rope_cos_sin
from .linear import WeightGradients, add_or_copy, embed, gradient_dtype, linear, project
from .params import head_dim

if TYPE_CHECKING:
    from ..kernels.ops import Ops
    from .data.dataset import Batch

IGNORE = -100  # target that counts in no loss


@dataclass(frozen=True)
class Sums:
    """What a forward pass returns: sums over the batch's counted targets, never means."""

    objective: Tensor  # scalar, differentiable: scale x (cross-entropy + z-loss)
    loss: Tensor  # scalar, detached: cross-entropy in nats
    tokens: Tensor  # scalar int64: how many targets count


@dataclass(frozen=True)
class DropoutKey:
    """With the sample's number and the site, all that decides which features are dropped."""

    seed: int
    step: int


@dataclass(frozen=True)
class _Context:
    """What every block of one forward pass shares."""

    batch: Batch
    inv_freq: Tensor  # [E / 2]
    cos_sin: tuple[Tensor, Tensor]
    dropout: DropoutKey | None
    rows_BS: Tensor | None  # number of each token in the whole run, for dropout


class Attention(nn.Module):
    """Normed input to attention output: [B, S, D] to [B, S, D]."""

    def __init__(self, config: ModelConfig, ops: Ops, queue: WeightGradients) -> None:
        super().__init__()
        self.config, self.ops, self.queue = config, ops, queue
        hidden, width = config.hidden_size, head_dim(config)
        self.width = width
        self.norm = _parameter(hidden)
        self.wq = _parameter(config.num_heads * width, hidden)
        self.wk = _parameter(config.num_kv_heads * width, hidden)
        self.wv = _parameter(config.num_kv_heads * width, hidden)
        if config.qk_norm is QkNorm.head:
            self.q_norm, self.k_norm = _parameter(width), _parameter(width)
        self.wo = _parameter(hidden, config.num_heads * width)

    def forward(self, x_BSD: Tensor, context: _Context) -> Tensor:
        q, k, v = project(x_BSD, (self.wq, self.wk, self.wv), self.queue)
        q_BSHE, k_BSKE, v_BSKE = (t.unflatten(-1, (-1, self.width)) for t in (q, k, v))
        if self.config.qk_norm is QkNorm.head:
            q_BSHE = self.ops.rmsnorm(q_BSHE, self.q_norm, self.config.norm_eps)
            k_BSKE = self.ops.rmsnorm(k_BSKE, self.k_norm, self.config.norm_eps)
        q_BSHE, k_BSKE = self.ops.rope(
            q_BSHE, k_BSKE, context.batch.positions, context.inv_freq, cos_sin=context.cos_sin
        )
        out_BSHE = self.ops.attention(
            q_BSHE,
            k_BSKE,
            v_BSKE,
            doc_ids=context.batch.doc_ids,
            window=self.config.sliding_window or None,
            softcap=self.config.attention_softcap or None,
        )
        return linear(out_BSHE.flatten(-2), self.wo, self.queue)


class FeedForward(nn.Module):
    """SwiGLU: [B, S, D] to [B, S, D]."""

    def __init__(self, config: ModelConfig, ops: Ops, queue: WeightGradients) -> None:
        super().__init__()
        self.ops, self.queue = ops, queue
        self.norm = _parameter(config.hidden_size)
        self.gate = _parameter(config.ffn_size, config.hidden_size)
        self.up = _parameter(config.ffn_size, config.hidden_size)
        self.down = _parameter(config.hidden_size, config.ffn_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = project(x_BSD, (self.gate, self.up), self.queue)
        return linear(self.ops.swiglu(gate_BSF, up_BSF), self.down, self.queue)


class Block(nn.Module):
    """Pre-norm residual block. The residual stream travels as a pair: the sum so far, and the last branch's output,
    which the next norm adds on its way (one pass over memory instead of two)."""

    def __init__(self, config: ModelConfig, ops: Ops, queue: WeightGradients, layer: int) -> None:
        super().__init__()
        self.config, self.ops, self.layer = config, ops, layer
        self.attention = Attention(config, ops, queue)
        self.ffn = FeedForward(config, ops, queue)

    def forward(self, x_BSD: Tensor, branch_BSD: Tensor | None, context: _Context) -> tuple[Tensor, Tensor]:
        h_BSD, x_BSD = add_norm(self.ops, x_BSD, branch_BSD, self.attention.norm, self.config.norm_eps)
        branch_BSD = self._drop(self.attention(h_BSD, context), 2 * self.layer, context)
        h_BSD, x_BSD = add_norm(self.ops, x_BSD, branch_BSD, self.ffn.norm, self.config.norm_eps)
        return x_BSD, self._drop(self.ffn(h_BSD), 2 * self.layer + 1, context)

    def _drop(self, branch_BSD: Tensor, site: int, context: _Context) -> Tensor:
        key, rows_BS = context.dropout, context.rows_BS
        if key is None or rows_BS is None:
            return branch_BSD
        return self.ops.dropout(branch_BSD, self.config.dropout, key.seed, key.step, site, rows_BS)


class Decoder(nn.Module):
    """Embedding, blocks, loss. `layers` picks a slice of the blocks, which keep their global names."""

    def __init__(
        self, config: ModelConfig, ops: Ops, queue: WeightGradients, layers: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.config, self.ops, self.queue = config, ops, queue
        self.embedding = _parameter(config.vocab_size, config.hidden_size)
        layers = range(config.num_layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(i): Block(config, ops, queue, i) for i in layers})
        self.norm = _parameter(config.hidden_size)
        if not config.tied_embeddings:
            self.head = _parameter(config.vocab_size, config.hidden_size)

    @property
    def output_weight(self) -> nn.Parameter:
        """[V, D]"""
        return self.embedding if self.config.tied_embeddings else self.head

    def forward(self, batch: Batch, scale: float = 1.0, dropout: DropoutKey | None = None) -> Sums:
        """One pass over a micro-batch; dropout=None is evaluation. `scale` multiplies the objective."""
        return self.sums(self.hidden(batch, dropout), batch.targets, scale)

    def hidden(self, batch: Batch, dropout: DropoutKey | None = None) -> Tensor:
        """The normed hidden states before the output projection, [B, S, D]."""
        x_BSD, branch_BSD = embed(batch.tokens, self.embedding, self.queue), None
        inv_freq = inverse_frequencies(head_dim(self.config), self.config.rope_theta, batch.positions.device)
        cos_sin = rope_cos_sin(batch.positions, inv_freq, dtype=x_BSD.dtype)
        rows_BS = _token_numbers(batch) if dropout is not None and self.config.dropout > 0.0 else None
        context = _Context(batch, inv_freq, cos_sin, dropout, rows_BS)
        for block in self.blocks.values():
            x_BSD, branch_BSD = block(x_BSD, branch_BSD, context)
        return add_norm(self.ops, x_BSD, branch_BSD, self.norm, self.config.norm_eps)[0]

    def logits(self, batch: Batch) -> Tensor:
        """[B, S, V], without dropout."""
        return linear(self.hidden(batch), self.output_weight, self.queue)

    def sums(self, h_BSD: Tensor, targets_BS: Tensor, scale: float) -> Sums:
        """Loss of hidden states against targets; IGNORE counts nowhere."""
        losses_BS, lse_BS = self._losses(h_BSD, targets_BS, scale)
        total = losses_BS.sum()
        counted_BS = targets_BS != IGNORE
        loss = total.detach()
        if self.config.z_loss:
            loss = loss - self.config.z_loss * lse_BS.square().masked_fill(~counted_BS, 0.0).sum()
        return Sums(total * scale, loss, counted_BS.sum())

    def _losses(self, h_BSD: Tensor, targets_BS: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(losses, log-sum-exps), [B, S] each."""
        weight, z_loss = self.output_weight, self.config.z_loss
        if weight.dtype != gradient_dtype(weight.dtype):
            # Half precision: the joint op forms logits in float32, which takes longer than all logits at once.
            logits_BSV = linear(h_BSD, weight, self.queue)
            return self.ops.cross_entropy(logits_BSV, targets_BS, IGNORE, z_loss, return_lse=True)
        # `scale` is promised, so gradients are formed while a chunk's logits exist: 0.8 of the time of all logits.
        return self.ops.linear_cross_entropy(
            h_BSD,
            weight,
            targets_BS,
            IGNORE,
            z_loss,
            return_lse=True,
            token_grad=scale,
            grad_weight_out=lambda gradient: self.queue.push(weight, partial(add_or_copy, gradient)),
        )


def add_norm(ops: Ops, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed x + branch, x + branch); branch None is nothing to add."""
    if branch is None:
        return ops.rmsnorm(x, weight, eps), x
    return ops.rmsnorm(branch, weight, eps, residual=x)


def inverse_frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-2i / E), float32 [E / 2] (Su et al. 2021, section 3.2.2)."""
    return theta ** -(torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)


def _token_numbers(batch: Batch) -> Tensor:
    """[B, S] int64: the same token has the same number however batches are split over ranks and micro-steps."""
    length = batch.tokens.shape[1]
    return batch.samples.unsqueeze(1) * length + torch.arange(length, device=batch.tokens.device)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))
