"""`attention` by FlashAttention kernels that take documents as sequences: torch's own, or the flash_attn package.

Owns: finding the documents' borders, once per batch, and what each kernel is asked. What it cannot do (soft caps with
torch's, log-sum-exps, float32, other widths, GPUs before Ampere, documents under the compiler) is attention_sdpa.py's.

Shapes: B rows, S positions, T = B x S tokens, N documents, H query heads, K key heads, E features.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention import check_attention, is_plain
from .attention_flash import is_for_flash
from .attention_sdpa import attention_sdpa


@dataclass(frozen=True)
class Documents:
    """Where sequences begin among the tokens of all rows."""

    starts: Tensor  # [N + 1] int32, the last is T
    longest: int


class Kernel(Protocol):
    """Causal attention within documents: q [T, H, E], k and v [T, K, E] to [T, H, E]. window: keys seen, or None."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents,
        window: int | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor: ...


def torch_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """torch.nn.attention.varlen."""
    from torch.nn.attention.varlen import varlen_attn

    assert softcap is None
    # torch 2.11 shares key heads without being told, and does not know the word.
    groups: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if _has_word_for_groups() else {}
    starts, longest = documents.starts, documents.longest
    # It counts the keys before the token, not the token itself; -1 is no limit.
    reach = -1 if window is None else window - 1
    out: Any = varlen_attn(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(reach, 0),
        **groups,
    )
    result: Tensor = out
    return result


@functools.cache
def _has_word_for_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def package_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """The flash_attn package, 2.6 or newer."""
    function = importlib.import_module("flash_attn").flash_attn_varlen_func
    starts, longest = documents.starts, documents.longest
    out: Tensor = function(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


class VarlenAttention:
    """`attention` over a kernel for sequences of many lengths."""

    def __init__(self, kernel: Kernel, has_softcap: bool) -> None:
        self._kernel, self._has_softcap = kernel, has_softcap
        # Of the last batch: all layers ask the same, and finding out waits for the device.
        self._known: tuple[weakref.ref[Tensor], Documents | None] | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        doc_ids: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `attention`, in the dtype of q with softmax and sums in float32. Plain causal attention is torch's choice
        of kernel."""
        check_attention(q, k, v, doc_ids, window, softcap)
        is_possible = self._takes(q, v, softcap) and not return_lse
        if doc_ids is not None and torch.compiler.is_compiling():
            is_possible = False  # a graph cannot hold how many documents there are
        documents = None
        if is_possible and not is_plain(q, doc_ids, window, softcap):
            documents = _rows(q) if doc_ids is None else self._find(doc_ids)
        if documents is None:
            return attention_sdpa(q, k, v, doc_ids, window, scale, softcap, return_lse)
        q_THE, k_TKE, v_TKE = (t.flatten(0, 1) for t in (q, k, v))
        return self._kernel(q_THE, k_TKE, v_TKE, documents, window, scale, softcap).view_as(q)

    def _takes(self, q: Tensor, v: Tensor, softcap: float | None) -> bool:
        has_kernel = is_for_flash(q) and v.shape[-1] == q.shape[-1] and q.numel() > 0
        return has_kernel and (softcap is None or self._has_softcap)

    def _find(self, doc_ids: Tensor) -> Documents | None:
        if self._known is None or self._known[0]() is not doc_ids:
            self._known = weakref.ref(doc_ids), find_documents(doc_ids)
        return self._known[1]


def find_documents(doc_ids_BS: Tensor) -> Documents | None:
    """Runs of equal numbers within each row; None where a number may come back later, which is no sequence."""
    rows, length = doc_ids_BS.shape
    is_start = torch.ones_like(doc_ids_BS, dtype=torch.bool)
    is_start[:, 1:] = doc_ids_BS[:, 1:] != doc_ids_BS[:, :-1]
    if not bool((doc_ids_BS[:, 1:] >= doc_ids_BS[:, :-1]).all()):
        return None
    starts = torch.nonzero(is_start.flatten()).flatten()
    starts = torch.cat([starts, starts.new_tensor([rows * length])])
    return Documents(starts.int(), int(starts.diff().max()))


def _rows(q: Tensor) -> Documents:
    """Each row a document."""
    rows, length = q.shape[:2]
    return Documents(torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device), length)
