"""Mixture of experts: a router sends each token through a few of many feed-forward layers, and a shared one if wanted.

Owns: scores, the terms that keep experts equally loaded, and a layer's statistics. Does not own: choice and weights
(kernels/moe_topk.py), how tokens get to their experts (parallel/experts.py), or when the bias moves and what is
reported (the loop).

Families: Mixtral (softmax, normalised: the same as a softmax over the chosen logits), Qwen3-MoE (softmax), DeepSeek-V3
(sigmoid, bias). The choice of experts has no derivative; the weights' goes through scores and logits.

Auxiliary terms are sums over tokens, like the loss, and are divided by the same token count in the end: a term is
its weight times a mean over the tokens of the step, whatever micro-batches and layout are. The balance term of a
sequence of L tokens is L x balance_weight x E sum_e f_e P_e, with f_e the part of its L x K choices that fell on expert
e, and P_e the mean of its normalised scores (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20); it is balance_weight
per token where the load is even. It is linear in the scores, so ranks that hold parts of one sequence only sum its
counts of choices, which are integers; each then has its own part of the term, and its own tokens' gradients.

Shapes: T tokens of this rank, D features, E experts, K experts per token, B sequences, M rows of this rank's experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...conf.schema import Activation, Balance, Router
from ...kernels.numerics import apply
from ..grouped import grouped_linear, grouped_project
from ..linear import Product, WeightGradients, gradient_dtype
from ..parallel.experts import Groups
from .feedforward import FeedForward
from .forward_pass import TokenRows
from .norm import Branch
from .parts import Parts


class Statistics:
    """What one layer has seen since the last `clear`, on this rank: sums over the micro-batches of a step.

    Filled by the backward pass, so that a forward pass counts once though it is computed again, and an evaluation
    does not count.
    """

    def __init__(self, num_experts: int, device: torch.device | str = "cpu") -> None:
        self.load_E = torch.zeros(num_experts, dtype=torch.int64, device=device)  # tokens that chose each expert
        self.auxiliary = torch.zeros((), dtype=torch.float64, device=device)  # balance and z terms, with their weights

    def clear(self) -> None:
        """For the next step."""
        self.load_E.zero_()
        self.auxiliary.zero_()


class MixtureOfExperts(Branch):
    """Normed stream [T, D] to [T, D] in place of a feed-forward layer. The norms around it are the block's to apply."""

    def __init__(self, parts: Parts, layer: int) -> None:
        name, config = f"blocks.{layer}.ffn", parts.config
        super().__init__(parts, name)
        self.config, self.queue, self.axis, self.name, self.layer = config, parts.queue, parts.experts, name, layer
        self.topk = parts.ops.moe_topk
        # Ranks that hold other parts of the same sequences.
        self.sequence_comms = [parts.grid.tensor, parts.grid.context]
        self.router = parts.parameter(f"{name}.router")
        self.experts = Experts(parts, f"{name}.experts")
        # The feed-forward layer that every token passes besides its experts.
        self.shared = FeedForward(parts, f"{name}.shared") if config.shared_expert_ffn_size else None
        self.statistics = Statistics(config.num_experts, parts.device)
        # Added to the scores where experts are chosen, and nowhere else; persistent. In float32 whatever the model is.
        has_bias = config.balance is Balance.bias
        self.router_bias = torch.zeros(config.num_experts, device=parts.device) if has_bias else None

    def forward(self, x_TD: Tensor, rows: TokenRows, scale: float = 1.0) -> Tensor:
        """`scale` multiplies the auxiliary terms, as it does the loss. Collective over all ranks that share experts.

        The auxiliary terms are no output: their gradients join when the backward pass reaches this layer.
        """
        logits_TE = _apply_router(x_TD, self.router, self.queue)
        scores_TE = self._scores(logits_TE)
        choice_TK, weights_TK = self._choose(scores_TE)
        routes = self.axis.routes(choice_TK, self.config.num_experts, rows.is_real_T)
        transfer = self.axis.dispatch(x_TD, routes)
        shared_TD = None if self.shared is None else self.shared(x_TD)  # while tokens are on their way
        out_MD = self.experts(transfer.arrive(), routes.groups)
        y_TD = self.axis.combine(out_MD, weights_TK, routes)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        if not y_TD.requires_grad:
            return y_TD
        auxiliary = self._auxiliary(logits_TE, scores_TE, choice_TK, rows)
        return apply(_Attach, y_TD, auxiliary, routes.load_E, self.statistics, scale)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1) if self.config.router is Router.softmax else logits_TE.sigmoid()

    def _choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(expert numbers [T, K] int64, their weights [T, K])."""
        config, bias_E = self.config, self.router_bias
        return self.topk(scores_TE, config.experts_per_token, bias_E, config.router_normalize, config.router_scale)

    def _auxiliary(self, logits_TE: Tensor, scores_TE: Tensor, choice_TK: Tensor, rows: TokenRows) -> Tensor:
        """This rank's part of the terms, a scalar in the logits' dtype."""
        config, total = self.config, logits_TE.new_zeros(())
        is_real_T = rows.is_real_T
        if config.balance is Balance.loss and config.balance_weight:
            counts_TE = self._sequence_counts(choice_TK, rows)[rows.sequence_T].to(scores_TE.dtype)
            shares_TE = scores_TE if config.router is Router.softmax else scores_TE / scores_TE.sum(-1, keepdim=True)
            each_T = (counts_TE * shares_TE).sum(-1)
            if is_real_T is not None:
                each_T = each_T.masked_fill(~is_real_T, 0.0)
            factor = config.num_experts / (config.experts_per_token * rows.length)
            total = total + config.balance_weight * factor * each_T.sum()
        if config.router_z_loss:
            each_T = logits_TE.logsumexp(-1).square()
            if is_real_T is not None:
                each_T = each_T.masked_fill(~is_real_T, 0.0)
            total = total + config.router_z_loss * each_T.sum()
        return total

    @torch.no_grad()
    def _sequence_counts(self, choice_TK: Tensor, rows: TokenRows) -> Tensor:
        """How many tokens of each sequence chose each expert, wherever those tokens are: int64 [B, E]."""
        experts = self.config.num_experts
        bins = (rows.sequence_T[:, None] * experts + choice_TK).reshape(-1)
        counts = torch.zeros(rows.sequences * experts, dtype=torch.int64, device=bins.device)
        counts.scatter_add_(0, bins, torch.ones_like(bins))
        for comm in self.sequence_comms:
            comm.all_reduce(counts)
        return counts.view(rows.sequences, experts)


class Experts(nn.Module):
    """This rank's feed-forward layers: [M, D] to [M, D], rows sorted by expert."""

    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.ops, self.queue, activation = parts.ops, parts.queue, parts.config.activation
        self.has_gate = activation is not Activation.gelu
        if self.has_gate:
            self.gate = parts.parameter(f"{name}.gate")
            self.activate = parts.ops.swiglu if activation is Activation.swiglu else parts.ops.geglu
        self.up = parts.parameter(f"{name}.up")
        self.down = parts.parameter(f"{name}.down")

    def forward(self, x_MD: Tensor, groups: Groups) -> Tensor:
        if self.has_gate:
            inner_MF = self.activate(*grouped_project(x_MD, (self.gate, self.up), groups, self.queue))
        else:
            inner_MF = self.ops.gelu(grouped_linear(x_MD, self.up, groups, self.queue))
        return grouped_linear(inner_MF, self.down, groups, self.queue)


def moved_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """The bias after one step: up by `rate` for experts with less than the mean load of the global batch, down for
    those with more (Wang et al. 2024, arXiv:2408.15664, algorithm 1).

    bias_E: float32. load_E: int64, tokens that chose each expert, summed over all ranks and micro-batches.
    """
    # In whole numbers, so that every layout comes to the same sign.
    return bias_E + rate * torch.sign(load_E.sum() - load_E * len(load_E)).to(bias_E.dtype)


def _apply_router(x_TD: Tensor, weight_ED: Tensor, queue: WeightGradients) -> Tensor:
    """x @ weight.T in gradient_dtype, whatever the model's: [T, E]."""
    return apply(_RouterLinear, x_TD, weight_ED, queue)


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, queue: WeightGradients) -> Tensor:
        ctx.save_for_backward(x_TD)
        ctx.weight_ED, ctx.queue = weight_ED, queue
        dtype = gradient_dtype(x_TD.dtype)
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None, None]:
        (x_TD,), weight_ED = ctx.saved_tensors, ctx.weight_ED
        if weight_ED.requires_grad:
            ctx.queue.push(weight_ED, Product(grad_TE, x_TD.to(grad_TE.dtype), ctx.queue.weight_gradient))
        return (grad_TE @ weight_ED.to(grad_TE.dtype)).to(x_TD.dtype), None, None


class _Attach(torch.autograd.Function):
    """y, unchanged; its backward pass starts that of `scale` x auxiliary, and counts the statistics."""

    @staticmethod
    def forward(
        ctx: Any, y_TD: Tensor, auxiliary: Tensor, load_E: Tensor, statistics: Statistics, scale: float
    ) -> Tensor:
        ctx.save_for_backward(auxiliary, load_E)
        ctx.statistics, ctx.scale = statistics, scale
        return y_TD.view_as(y_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        auxiliary, load_E = ctx.saved_tensors
        ctx.statistics.load_E += load_E
        ctx.statistics.auxiliary += auxiliary
        return grad_TD, torch.full_like(auxiliary, ctx.scale), None, None, None
