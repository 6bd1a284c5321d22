"""The model: a decoder as a list of blocks, or a slice of it.

Owns: embedding, the order of blocks, and the loss. Parameters are named as in params.decoder_table and get their
values from init.py. All fused operations come from the `Ops` it is given.

Shapes: B rows, S positions, T tokens of the residual stream that this rank holds, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...conf.schema import ModelConfig
from ...kernels import Ops
from ...kernels.softcap import softcap
from ..linear import WeightGradients, add_or_copy, embed, gradient_dtype, linear, project
from ..parallel.stages import StageSpec, whole
from ..parallel.tensor import TensorAxis
from ..parallel.vocabulary import VocabularyLoss, embed_tokens, vocabulary_loss
from .block import Block
from .forward_pass import IGNORE, DropoutKey, ForwardPass, Sums, TokenRows
from .norm import stream_norm
from .parts import Parts
from .rotary import Rotary

if TYPE_CHECKING:
    from ..data.dataset import Batch


class Decoder(nn.Module):
    """One pipeline stage: the first has the embedding, the last has norm, output projection and loss."""

    def __init__(self, parts: Parts, stage: StageSpec) -> None:
        super().__init__()
        self.config, self.ops, self.queue, self.stage = parts.config, parts.ops, parts.queue, stage
        self.recompute, self.axis = parts.recompute, parts.tensor
        vocabulary = [name for name in ("embedding", "head") if name in parts.table]
        self._vocab_start = parts.first_row(vocabulary[0]) if vocabulary else 0
        if stage.is_first or (stage.is_last and parts.config.tied_embeddings):
            self.embedding = parts.parameter("embedding")
        if stage.is_first:
            self.positions = parts.optional("positions")
        self.blocks = nn.ModuleDict({str(i): Block(parts, i) for i in stage.layers})
        self.rotary, self.stream_norm = Rotary(parts.config), stream_norm(parts)
        if stage.is_last:
            self.norm, self.norm_bias = parts.parameter("norm"), parts.optional("norm_bias")
            if not parts.config.tied_embeddings:
                self.head = parts.parameter("head")

    @property
    def output_weight(self) -> nn.Parameter:
        """[V, D]"""
        return self.embedding if self.config.tied_embeddings else self.head

    def forward(
        self, batch: Batch, scale: float = 1.0, dropout: DropoutKey | None = None, x_TD: Tensor | None = None
    ) -> Sums | Tensor:
        """One pass of a micro-batch through this stage; dropout=None is evaluation.

        x_TD: the stream from the stage before; None in the first. Returns the stream for the next stage, or in the last
        one Sums, whose objective is multiplied by `scale`.
        """
        if self.stage.is_last:
            return self._sums(self.hidden(batch, dropout, x_TD, scale), batch.targets.reshape(-1), scale)
        x_TD, branch_TD = self._blocks(batch, dropout, x_TD, scale)
        return x_TD if branch_TD is None else x_TD + branch_TD

    def hidden(
        self, batch: Batch, dropout: DropoutKey | None = None, x_TD: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """The last stage's normed hidden states before the output projection, [T, D]. `scale` as for `forward`."""
        x_TD, branch_TD = self._blocks(batch, dropout, x_TD, scale)
        return self.stream_norm.of_sum(x_TD, branch_TD, self.norm, self.norm_bias)[0]

    def logits(self, batch: Batch) -> Tensor:
        """[B, S, V] with this rank's part of the vocabulary, of a model in one stage, without dropout."""
        (logits_TV,) = project(self.hidden(batch), (self.output_weight,), self.queue, self.axis)
        return self._capped(logits_TV).view(*batch.tokens.shape, -1)

    def _blocks(
        self, batch: Batch, dropout: DropoutKey | None, x_TD: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after the last block, as the sum so far and what the last branch adds to it."""
        if x_TD is None:
            x_TD = self._embed(batch)
        rotations = self.rotary.rotations(batch.positions, x_TD.dtype)
        numbers_T = None
        if dropout is not None and self.config.dropout > 0.0:
            numbers_T = self.axis.own(batch.token_numbers.reshape(-1))
        rows = _token_rows(batch, self.axis) if self.config.num_experts else None
        shared = ForwardPass(batch, rotations, dropout, numbers_T, rows, scale)
        branch_TD = None
        for layer, block in self.blocks.items():
            x_TD, branch_TD = self.recompute(int(layer), block, x_TD, branch_TD, shared)
        return x_TD, branch_TD

    def _embed(self, batch: Batch) -> Tensor:
        """Where the stream begins, [T, D]."""
        assert self.stage.is_first
        x_TD = embed_tokens(batch.tokens.reshape(-1), self.embedding, self.queue, self.axis, self._vocab_start)
        if self.config.embedding_scale != 1.0:
            x_TD = x_TD * self.config.embedding_scale
        if self.positions is not None:
            x_TD = x_TD + embed(self.axis.own(batch.positions.reshape(-1)), self.positions, self.queue)
        return x_TD

    def _capped(self, logits: Tensor) -> Tensor:
        return softcap(logits, self.config.logit_softcap) if self.config.logit_softcap else logits

    def _sums(self, h_TD: Tensor, targets_T: Tensor, scale: float) -> Sums:
        """Loss of hidden states against targets; IGNORE counts nowhere."""
        if self.axis.size > 1:
            return self._sums_of_parts(h_TD, targets_T, scale)
        losses_T, lse_T = self._losses(h_TD, targets_T, scale)
        total = losses_T.sum()
        counted_T = targets_T != IGNORE
        loss = total.detach()
        if self.config.z_loss:
            loss = loss - self.config.z_loss * lse_T.square().masked_fill(~counted_T, 0.0).sum()
        return Sums(total * scale, loss, counted_T.sum())

    def _sums_of_parts(self, h_TD: Tensor, targets_T: Tensor, scale: float) -> Sums:
        """The same over a vocabulary that is cut, for all tokens, on every rank of the tensor axis."""
        loss = VocabularyLoss(
            self.ops,
            self.queue,
            self.axis,
            self._vocab_start,
            self.config.vocab_size,
            IGNORE,
            self.config.z_loss,
            self.config.logit_softcap or None,
            token_grad=scale,
        )
        objective, cross_entropy = vocabulary_loss(h_TD, self.output_weight, targets_T, loss)
        return Sums(objective * scale, cross_entropy, (targets_T != IGNORE).sum())

    def _losses(self, h_TD: Tensor, targets_T: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(losses, log-sum-exps), [T] each."""
        weight, z_loss = self.output_weight, self.config.z_loss
        if weight.dtype != gradient_dtype(weight.dtype) and self.ops.is_reference("linear_cross_entropy"):
            # Half precision: the reference multiplies in float32, which takes longer than all logits at once.
            logits_TV = self._capped(linear(h_TD, weight, self.queue))
            return self.ops.cross_entropy(logits_TV, targets_T, IGNORE, z_loss, return_lse=True)
        # `scale` is promised, so gradients are formed while a chunk's logits exist: 0.8 of the time of all logits.
        return self.ops.linear_cross_entropy(
            h_TD,
            weight,
            targets_T,
            IGNORE,
            z_loss,
            return_lse=True,
            token_grad=scale,
            grad_weight_out=lambda gradient: self.queue.push(weight, partial(add_or_copy, gradient)),
            softcap=self.config.logit_softcap or None,
        )


class Stages(nn.Module):
    """Several stages on one rank. Parameters go by their names in the whole model; a tied one is a single tensor."""

    def __init__(self, stages: Sequence[Decoder]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        with_embedding = [stage for stage in stages if hasattr(stage, "embedding")]
        for stage in with_embedding[1:]:
            stage.embedding = with_embedding[0].embedding

    def get_parameter(self, target: str) -> nn.Parameter:
        """By the name in the parameter table."""
        for stage in self.stages:
            try:
                return stage.get_parameter(target)
            except AttributeError:
                continue
        raise AttributeError(f"no stage of this rank has {target}")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of one model."""
        seen: set[str] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if name not in seen:
                    seen.add(name)
                    yield name, parameter


def whole_model(
    config: ModelConfig, ops: Ops, queue: WeightGradients | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """All of a model on this process, without values yet."""
    return Decoder(Parts.of(config, ops, queue or WeightGradients(), dtype=dtype), whole(config.num_layers))


def _token_rows(batch: Batch, axis: TensorAxis) -> TokenRows:
    """Of the stream on this rank."""
    rows, width = batch.tokens.shape
    sequence_T = torch.arange(rows, device=batch.tokens.device).repeat_interleave(width)
    is_real_T = (batch.samples >= 0).repeat_interleave(width)
    length = width if batch.part is None else batch.part.row_length
    return TokenRows(axis.own(sequence_T), axis.own(is_real_T), rows, length)
