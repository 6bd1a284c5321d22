"""What FlashAttention kernels are asked, by a stand-in that attends in each sequence alone; and the kernels themselves
where there is a GPU."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest
import torch
from stoker.kernels import select
from stoker.kernels.attention_flash import CAUSAL, Band, backward, forward
from stoker.kernels.attention_sdpa import attention_sdpa
from stoker.kernels.attention_varlen import Documents, VarlenAttention, find_documents, package_kernel, torch_kernel
from stoker.kernels.reference import attention
from torch._subclasses.fake_tensor import FakeTensorMode

DOCS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1]])


class Sequences:
    """A kernel that notes what it is asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, q, k, v, documents, window, scale, softcap):
        self.asked.append((documents.starts.tolist(), documents.longest))
        bounds = documents.starts.tolist()
        parts = [
            attention(q[None, a:b], k[None, a:b], v[None, a:b], None, window, scale, softcap)[0]
            for a, b in pairwise(bounds)
        ]
        return torch.cat(parts)


def batch(dtype=torch.bfloat16):
    return [torch.randn(2, 9, n, 8).to(dtype).requires_grad_() for n in (4, 2, 2)]


OPTIONS = [
    {"doc_ids": DOCS},
    {"doc_ids": DOCS, "window": 2, "scale": 0.9},
    {"window": 3},
    {"doc_ids": DOCS, "softcap": 1.5},
    {},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_documents_as_sequences_give_what_the_reference_gives(options):
    q, k, v = batch()
    kernel = Sequences()
    found = VarlenAttention(kernel, has_softcap=True)(q, k, v, **options)
    torch.testing.assert_close(found, attention(q, k, v, **options), rtol=2e-2, atol=2e-2)
    assert len(kernel.asked) == (1 if options else 0)  # plain causal attention is torch's


def test_a_kernel_is_told_where_documents_of_all_rows_begin():
    kernel = Sequences()
    VarlenAttention(kernel, has_softcap=False)(*batch(), doc_ids=DOCS)
    VarlenAttention(kernel, has_softcap=False)(*batch(), window=3)
    assert kernel.asked == [([0, 3, 7, 9, 17, 18], 8), ([0, 9, 18], 9)]


def test_borders_are_found_once_for_all_layers_of_a_batch(monkeypatch):
    found = []
    monkeypatch.setattr(
        "stoker.kernels.attention_varlen.find_documents", lambda ids: found.append(ids) or find_documents(ids)
    )
    op = VarlenAttention(Sequences(), has_softcap=False)
    other = DOCS.clone()
    for ids in (DOCS, DOCS, DOCS, other, other):
        op(*batch(), doc_ids=ids)
    assert [ids is other for ids in found] == [False, True]


def test_a_number_that_comes_back_is_no_sequence():
    assert find_documents(torch.tensor([[0, 1, 0]])) is None
    kernel = Sequences()
    ids = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]]).repeat(2, 1)
    q, k, v = batch()
    found = VarlenAttention(kernel, has_softcap=False)(q, k, v, doc_ids=ids)
    assert kernel.asked == []
    torch.testing.assert_close(found, attention(q, k, v, doc_ids=ids), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"doc_ids": DOCS}),
        (torch.bfloat16, {"doc_ids": DOCS, "softcap": 1.5}),
        (torch.bfloat16, {"doc_ids": DOCS, "return_lse": True}),
    ],
    ids=str,
)
def test_what_a_kernel_cannot_do_is_done_by_another(dtype, options):
    q, k, v = batch(dtype)
    kernel = Sequences()
    found = VarlenAttention(kernel, has_softcap=False)(q, k, v, **options)
    assert kernel.asked == []
    torch.testing.assert_close(found, attention(q, k, v, **options), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, {"doc_ids": DOCS, "return_lse": True}], ids=str)
def test_torchs_own_attention_gives_what_the_reference_gives(dtype, options):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    leaves = batch(dtype)
    results = []
    for op in (attention, attention_sdpa):
        out = op(*leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_log_says_what_attention_leaves_to_others():
    choice = next(c for c in select(device="cuda", strict=False).choices if c.op == "attention")
    assert choice.why.endswith("; half precision, documents outside of the compiler; the rest by sdpa")
    if importlib.util.find_spec("flash_attn") is None:
        assert choice.implementation == "varlen"
        assert choice.why.startswith("auto; flash: needs flash_attn from PyPI's flash-attn, 2.6 or newer; ")


def test_torchs_gpu_kernels_are_asked_with_arguments_they_have():
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(2, 9, n, 8, dtype=torch.bfloat16, device="cuda") for n in (4, 2, 2))
        documents = Documents(torch.empty(6, dtype=torch.int32, device="cuda"), 8)
        assert torch_kernel(*(t.flatten(0, 1) for t in (q, k, v)), documents, 3, None, None).shape == (18, 4, 8)
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        out, lse = forward(*heads_first, 0.3, CAUSAL)
        assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 9, 8), (2, 4, 9), torch.float32)
        grads = backward(out, *heads_first, out, lse, 0.3, Band(3, -1))
        assert [g.shape for g in grads] == [t.shape for t in heads_first]


@pytest.mark.full
def test_a_graph_leaves_documents_to_another():
    kernel = Sequences()
    op = VarlenAttention(kernel, has_softcap=False)
    q, k, v = batch()
    found = torch.compile(op, backend="eager", fullgraph=True)(q, k, v, doc_ids=DOCS)
    assert kernel.asked == []
    torch.testing.assert_close(found, attention(q, k, v, doc_ids=DOCS), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["flash", "varlen", "sdpa"])
def test_kernels_on_a_gpu_give_what_the_reference_gives(name, options):
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash_attn is not installed")
    kernel = {"flash": package_kernel, "varlen": torch_kernel}.get(name)
    op = attention_sdpa if kernel is None else VarlenAttention(kernel, has_softcap=name == "flash")
    leaves = [t.detach().cuda().requires_grad_() for t in batch()]
    options = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    found, want = op(*leaves, **options), attention(*leaves, **options)
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
    for a, b in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
