"""Linear layer and cross-entropy: torch's matrix products, and csrc/linear_cross_entropy.cu between them, which turns a
chunk's logits into losses and their gradient in one launch.

Chunks and autograd are those of stoker.kernels.linear_cross_entropy. Import after `library.load`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear_cross_entropy import Chunk, Plan, WeightGradSink, chunked
from ..numerics import accumulate_dtype
from .library import fake, raw, refuse

_whole = raw("cross_entropy_whole_")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    return_lse: bool = False,
    token_grad: float | None = None,
    grad_weight_out: WeightGradSink | None = None,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.linear_cross_entropy. x, weight: float32, bfloat16 or float16 on CUDA.

    Logits are float32, so losses are as exact as the reference's; their gradient is rounded once to the inputs' dtype,
    in which the matrix products take it, and sums over tokens are float32.
    """
    arguments = (x, weight, targets, ignore_index, z_loss, return_lse, token_grad, grad_weight_out, chunk_tokens)
    try:
        return chunked(_NATIVE, *arguments, softcap)
    except RuntimeError as error:
        refuse("linear_cross_entropy", error, lambda: None)


class _Native:
    def factors(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x, weight

    def chunk(self, weight: Tensor, plan: Plan, n_tokens: int, wants_grad: bool) -> Chunk:
        return _NativeChunk(weight, plan, n_tokens, wants_grad)

    def add_product(self, total: Tensor, grad_logits: Tensor, x: Tensor, holds_sum: bool) -> None:
        """The products' accumulators are added unrounded."""
        if total.dtype == x.dtype:
            total.addmm_(grad_logits.t(), x, beta=int(holds_sum))
        elif not total.is_cuda:
            total.addmm_(grad_logits.t().to(total.dtype), x.to(total.dtype), beta=int(holds_sum))
        elif torch.compiler.is_compiling():  # has no way to add to a sum of another dtype
            product = torch.mm(grad_logits.t(), x, out_dtype=total.dtype)
            total.copy_(total + product if holds_sum else product)
        else:
            torch.addmm(total, grad_logits.t(), x, out_dtype=total.dtype, beta=int(holds_sum), out=total)


_NATIVE = _Native()


class _NativeChunk:
    def __init__(self, weight: Tensor, plan: Plan, n_tokens: int, wants_grad: bool) -> None:
        self._weight, self._plan = weight, plan
        wide = accumulate_dtype(weight.dtype)
        self._logits = weight.new_empty(n_tokens, weight.shape[0], dtype=wide)
        self._grad: Tensor | None = None  # over the logits
        if wants_grad and wide != weight.dtype:
            self._grad = weight.new_empty(n_tokens, weight.shape[0])

    def __call__(
        self, x: Tensor, targets: Tensor, grad_losses: Tensor | None, losses: Tensor, lse: Tensor
    ) -> Tensor | None:
        plan, n = self._plan, x.shape[0]
        logits = self._logits[:n]
        grad = None if self._grad is None else self._grad[:n]
        if x.dtype == logits.dtype:
            torch.mm(x, self._weight.t(), out=logits)
        elif x.is_cuda:
            torch.mm(x, self._weight.t(), out_dtype=logits.dtype, out=logits)
        else:
            torch.mm(x.to(logits.dtype), self._weight.to(logits.dtype).t(), out=logits)
        _whole(logits, losses, lse, grad, targets, grad_losses, plan.ignore_index, plan.z_loss, plan.softcap or 0.0)
        if grad_losses is None:
            return None
        return logits if grad is None else grad


@fake("cross_entropy_whole_")
def _(
    logits: Tensor,
    losses: Tensor,
    lse: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    grad_losses: Tensor | None,
    ignore_index: int,
    z_loss: float,
    softcap: float,
) -> None:
    return None
