"""`attention` by torch's own kernels, in the dtype of the queries.

Owns: what torch's scaled_dot_product_attention is asked, and what goes by chunks instead. On CUDA the kernel (cuDNN,
FlashAttention, memory-efficient) is torch's choice.
"""

from __future__ import annotations

from torch import Tensor

from .attention import check_attention, chunked_attention, is_plain, plain_attention


def attention_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_ids: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `attention`. Softmax and sums are in promote_types(dtype, float32), products in the dtype of q.

    Plain causal attention is one call of torch's. Documents, windows, soft caps and log-sum-exps go by chunks of
    queries: on the CPU with torch's fused kernel, elsewhere (and with a soft cap) as explicit products.
    """
    check_attention(q, k, v, doc_ids, window, softcap)
    if is_plain(q, doc_ids, window, softcap) and not return_lse:
        return plain_attention(q, k, v, scale)
    out, lse = chunked_attention(q, k, v, doc_ids, window, scale, softcap)
    return (out, lse) if return_lse else out
