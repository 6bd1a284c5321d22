"""Layers whose rows are the vocabulary, cut over the tensor axis: embedding, and output projection with the loss.

Owns: how each rank's part of the vocabulary makes one embedding and one loss (Shoeybi et al. 2019, arXiv:1909.08053,
section 3), chunked over tokens so that all logits never exist at once. The mathematics of the loss is the kernels'.
Parts may be uneven. Without a tensor axis the whole vocabulary is linear.embed's and ops.linear_cross_entropy's.

Shapes: T tokens of a micro-batch, R tokens of the residual stream on this rank (see tensor.py), N tokens of a chunk,
V rows of the vocabulary on this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.cross_entropy import check_targets, exp_stats, exp_to_grad, losses_from_stats
from ...kernels.linear_cross_entropy import default_chunk
from ...kernels.numerics import accumulate_dtype, apply
from ...kernels.softcap import softcap_, softcap_slope
from ..linear import WeightGradients, embed, gradient_dtype
from .tensor import Gathered, TensorAxis

if TYPE_CHECKING:
    from ...kernels.ops import Ops
    from ...kernels.weight_gradient import WeightGradient


def embed_tokens(
    tokens_T: Tensor, weight_VD: Tensor, queue: WeightGradients, axis: TensorAxis | None = None, vocab_start: int = 0
) -> Tensor:
    """Rows of the embedding by token id: the residual stream [R, D].

    tokens_T: [T] int64, the same on all ranks of the axis. weight_VD: this rank's rows, from `vocab_start` on.
    """
    if axis is None or axis.size == 1:
        return embed(tokens_T, weight_VD, queue)
    return apply(_Embed, tokens_T, weight_VD, queue, axis, vocab_start)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_T: Tensor, weight_VD: Tensor, queue: WeightGradients, axis: TensorAxis, vocab_start: int
    ) -> Tensor:
        local_T = tokens_T - vocab_start
        elsewhere_T1 = ((local_T < 0) | (local_T >= weight_VD.shape[0])).unsqueeze(-1)
        # Tokens of other ranks add zeros to rows spread over the part, not all to one row, which would be a queue.
        rows_T = local_T.remainder_(weight_VD.shape[0])
        ctx.save_for_backward(rows_T, elsewhere_T1)
        ctx.weight, ctx.queue, ctx.axis = weight_VD, queue, axis
        x_RD, reduced = axis.reduce(F.embedding(rows_T, weight_VD).masked_fill_(elsewhere_T1, 0.0))
        reduced.wait()
        return x_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[None, ...]:
        rows_T, elsewhere_T1 = ctx.saved_tensors
        gathered = Gathered(ctx.axis, grad_RD)

        def add(buffer: Tensor, holds_sum: bool) -> None:
            if not holds_sum:
                buffer.zero_()
            grad_TD = gathered.wait().to(buffer.dtype)
            buffer.index_add_(0, rows_T, grad_TD.masked_fill(elsewhere_T1, 0.0))

        if ctx.weight.requires_grad:
            ctx.queue.push(ctx.weight, add)
        return None, None, None, None, None


@dataclass(frozen=True)
class VocabularyLoss:
    """What decides the loss besides hidden states, weights and targets.

    vocab_start, vocab_size: first row of this rank, and rows of the whole vocabulary.
    softcap: logits become softcap * tanh(logit / softcap). z_loss: weight of the squared log-sum-exp.
    token_grad: what the objective will be multiplied with. Gradients are then formed while a chunk's logits exist, and
    the weight's gradient [V, D] is held from forward to backward. None: logits are formed again in the backward pass.
    chunk: tokens whose logits exist at once; None chooses.
    """

    ops: Ops
    queue: WeightGradients
    axis: TensorAxis
    vocab_start: int
    vocab_size: int
    ignore_index: int = -100
    z_loss: float = 0.0
    softcap: float | None = None
    token_grad: float | None = None
    chunk: int | None = None


def vocabulary_loss(x_RD: Tensor, weight_VD: Tensor, targets_T: Tensor, loss: VocabularyLoss) -> tuple[Tensor, Tensor]:
    """Sums over targets of (cross-entropy + z-loss, cross-entropy) of logits x @ weight.T, the same on all ranks.

    x_RD: the normed residual stream; weight_VD: this rank's rows; targets_T: [T] int64, the same on all ranks of the
    axis. Both sums are scalars in promote_types(dtype, float32); only the first is differentiable. Logits have x's
    dtype, sums are formed in the wide one. Raises ValueError for a target that is no class (on the CPU).
    """
    check_targets(targets_T, targets_T.shape, loss.vocab_size, loss.ignore_index)
    wants_grad = torch.is_grad_enabled() and (x_RD.requires_grad or weight_VD.requires_grad)
    # Without an edge to the weight, a backward split into inputs and weights runs this function once, not twice.
    edge = weight_VD.detach() if x_RD.requires_grad else weight_VD
    return apply(_Loss, x_RD, edge, (weight_VD,), targets_T, loss, wants_grad and loss.token_grad is not None)


class _Gradients:
    """Of an objective multiplied with `factor`: dx is written chunk by chunk, dweight summed in their order."""

    def __init__(self, x_TD: Tensor, weight_VD: Tensor, factor: float, op: WeightGradient) -> None:
        self.x_TD, self._op = torch.empty_like(x_TD), op
        self.weight_VD: Tensor | None = None
        if weight_VD.requires_grad:
            self.weight_VD = torch.empty(weight_VD.shape, dtype=gradient_dtype(x_TD.dtype), device=x_TD.device)
        self.factor = factor
        self._holds_sum = False

    def add(self, x_TD: Tensor, weight_VD: Tensor, tokens: slice, grad_NV: Tensor) -> None:
        torch.mm(grad_NV, weight_VD, out=self.x_TD[tokens])
        if self.weight_VD is not None:
            self._op(self.weight_VD, grad_NV, x_TD[tokens], self._holds_sum)
            self._holds_sum = True


def _sweep(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, loss: VocabularyLoss, gradients: _Gradients | None
) -> Tensor:
    """One pass over the chunks; while the ranks exchange a chunk's statistics the next one's logits are formed.

    Returns the two sums as [2].
    """
    sums = torch.zeros(2, dtype=accumulate_dtype(x_TD.dtype), device=x_TD.device)
    finish: Callable[[], None] | None = None
    chunk = loss.chunk or _chunk_tokens(x_TD, weight_VD)
    for start in range(0, x_TD.shape[0], chunk):
        tokens = slice(start, start + chunk)
        begun = _begin(x_TD, weight_VD, targets_T, loss, gradients, tokens, sums)
        if finish is not None:
            finish()
        finish = begun
    if finish is not None:
        finish()
    return sums


def _begin(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    loss: VocabularyLoss,
    gradients: _Gradients | None,
    tokens: slice,
    sums: Tensor,
) -> Callable[[], None]:
    """Logits of a chunk and the exchange of their statistics; what is returned waits for it and adds up the rest."""
    comm, targets_N = loss.axis.comm, targets_T[tokens]
    logits_NV = x_TD[tokens] @ weight_VD.t()
    is_wide = logits_NV.dtype == accumulate_dtype(logits_NV.dtype)
    chunk = (_Exponentials if is_wide else _Logits)(logits_NV, targets_N, loss, gradients is not None)
    # One collective where maximum, sum of exponentials and target logit would take one each, and the same order of
    # summation on every rank.
    stats_3N = torch.stack(chunk.stats)
    gathered, work = comm.all_gather_async(stats_3N)

    def finish() -> None:
        work.wait()
        maximum, sumexp, target_logit = _combine(gathered.view(comm.size, *stats_3N.shape))
        losses_N, lse_N = losses_from_stats(maximum, sumexp, target_logit, targets_N, loss.ignore_index, loss.z_loss)
        penalty_N = (loss.z_loss * lse_N.square()).masked_fill_(targets_N == loss.ignore_index, 0.0)
        total = losses_N.sum()
        sums.add_(torch.stack((total, total - penalty_N.sum())))
        if gradients is not None:
            gradients.add(x_TD, weight_VD, tokens, chunk.gradient(lse_N, gradients.factor))

    return finish


class _Exponentials:
    """A chunk in the accumulation dtype: its logits become their exponentials, and these their gradient, in place."""

    def __init__(self, logits_NV: Tensor, targets_N: Tensor, loss: VocabularyLoss, wants_grad: bool) -> None:
        self._targets_N, self._loss, self._slope_NV = targets_N, loss, None
        if loss.softcap is not None:
            softcap_(logits_NV, loss.softcap)
            self._slope_NV = softcap_slope(logits_NV, loss.softcap) if wants_grad else None
        *self.stats, self._exps_NV = exp_stats(logits_NV, targets_N, loss.vocab_start, out=logits_NV)

    def gradient(self, lse_N: Tensor, factor: float) -> Tensor:
        """Of factor x the sum of losses, with respect to the logits."""
        loss, grad_N = self._loss, torch.full_like(lse_N, factor)
        scale_N = (self.stats[0] - lse_N).exp_().mul_(factor * (1.0 + 2.0 * loss.z_loss * lse_N))
        exps, targets = self._exps_NV, self._targets_N
        grad_NV = exp_to_grad(exps, scale_N, grad_N, targets, loss.vocab_start, loss.ignore_index, out=exps)
        return grad_NV if self._slope_NV is None else grad_NV.mul_(self._slope_NV)


class _Logits:
    """A chunk of narrower logits, which stay as they are; whatever is summed is wide."""

    def __init__(self, logits_NV: Tensor, targets_N: Tensor, loss: VocabularyLoss, wants_grad: bool) -> None:
        if loss.softcap is not None:
            wide = accumulate_dtype(logits_NV.dtype)
            logits_NV = softcap_(logits_NV.to(wide), loss.softcap).to(logits_NV.dtype)
        self._logits_NV, self._targets_N, self._loss = logits_NV, targets_N, loss
        self.stats = list(loss.ops.cross_entropy_stats(logits_NV, targets_N, loss.vocab_start))

    def gradient(self, lse_N: Tensor, factor: float) -> Tensor:
        """See _Exponentials."""
        loss, logits = self._loss, self._logits_NV
        grad_N = torch.full_like(lse_N, factor)
        in_place = loss.softcap is None
        grad_NV = loss.ops.cross_entropy_grad(
            logits, self._targets_N, lse_N, grad_N, loss.vocab_start, loss.ignore_index, loss.z_loss, in_place
        )
        return grad_NV if loss.softcap is None else grad_NV.mul_(softcap_slope(logits.to(lse_N.dtype), loss.softcap))


def _combine(stats_S3N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the whole vocabulary from those of S parts, see cross_entropy_stats."""
    maxima_SN, sums_SN, targets_SN = stats_S3N.unbind(1)
    maximum_N = maxima_SN.amax(0)
    return maximum_N, (sums_SN * (maxima_SN - maximum_N).exp_()).sum(0), targets_SN.sum(0)


def _chunk_tokens(x_TD: Tensor, weight_VD: Tensor) -> int:
    """Two chunks exist at a time. On a GPU they are long: adding each one's [V, D] to the gradient should not count."""
    return max(default_chunk(weight_VD.shape[0]) // 2, 128 if x_TD.device.type == "cpu" else 2048)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        _: Tensor,
        weights: tuple[Tensor],
        targets_T: Tensor,
        loss: VocabularyLoss,
        is_ahead: bool,
    ) -> tuple[Tensor, Tensor]:
        (weight_VD,) = weights
        x_TD = Gathered(loss.axis, x_RD).wait()
        op = loss.ops.weight_gradient
        gradients = _Gradients(x_TD, weight_VD, loss.token_grad, op) if is_ahead and loss.token_grad else None
        objective, cross_entropy = _sweep(x_TD, weight_VD, targets_T, loss, gradients).unbind()
        ctx.loss, ctx.weight = loss, weight_VD
        if gradients is None:
            ctx.save_for_backward(x_RD, targets_T)
            ctx.ahead = None
        else:
            # dx is reduced by the time the backward pass asks for it.
            ctx.ahead = (*loss.axis.reduce(gradients.x_TD), gradients.weight_VD, gradients.factor)
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        loss: VocabularyLoss = ctx.loss
        if ctx.ahead is not None:
            (dx_RD, reduced, dweight_VD, promised), ctx.ahead = ctx.ahead, None
            factor = grad / promised
        else:
            x_RD, targets_T = ctx.saved_tensors
            x_TD = Gathered(loss.axis, x_RD).wait()
            gradients = _Gradients(x_TD, ctx.weight, 1.0, loss.ops.weight_gradient)
            _sweep(x_TD, ctx.weight, targets_T, loss, gradients)
            (dx_RD, reduced), dweight_VD = loss.axis.reduce(gradients.x_TD), gradients.weight_VD
            factor = grad
        if dweight_VD is not None:
            loss.queue.push(ctx.weight, _Scaled(dweight_VD, factor))
        reduced.wait()
        if not _is_one(factor):
            dx_RD = dx_RD.mul_(factor)
        return dx_RD, None, None, None, None, None


class _Scaled:
    """buffer (+)= gradient * factor, for a gradient that was formed ahead."""

    __slots__ = ("factor", "gradient")

    def __init__(self, gradient: Tensor, factor: Tensor) -> None:
        self.gradient, self.factor = gradient, factor

    def __call__(self, buffer: Tensor, holds_sum: bool) -> None:
        if not holds_sum:
            torch.mul(self.gradient, self.factor, out=buffer)
        elif _is_one(self.factor):
            buffer.add_(self.gradient)
        else:
            buffer.addcmul_(self.gradient, self.factor)


def _is_one(factor: Tensor) -> bool:
    """Whether a multiplication can be left out; on a GPU looking costs more than multiplying."""
    return factor.device.type == "cpu" and float(factor) == 1.0
