import math

import pytest
import torch
from stoker.kernels.reference import attention


def batch(dtype=torch.float64, length=9, heads=4, kv=2, dim=8, dim_v=None):
    q = torch.randn(2, length, heads, dim).to(dtype)
    k, v = torch.randn(2, length, kv, dim).to(dtype), torch.randn(2, length, kv, dim_v or dim).to(dtype)
    return q, k, v


def oracle(q, k, v, doc_ids=None, window=None, scale=None, softcap=None):
    """One query at a time: the keys it may see, in float64."""
    batch_size, length, heads, dim = q.shape
    group = heads // k.shape[2]
    out = torch.zeros(batch_size, length, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.zeros(batch_size, heads, length, dtype=torch.float64)
    for b in range(batch_size):
        for i in range(length):
            seen = [
                j
                for j in range(i + 1)
                if (window is None or i - j < window) and (doc_ids is None or doc_ids[b, i] == doc_ids[b, j])
            ]
            for h in range(heads):
                scores = k[b, seen, h // group].double() @ q[b, i, h].double() * (scale or dim**-0.5)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                lse[b, h, i] = torch.logsumexp(scores, 0)
                out[b, i, h] = torch.softmax(scores, 0) @ v[b, seen, h // group].double()
    return out, lse


DOCS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 7]])
CASES = [
    {},
    {"window": 3},
    {"window": 1},
    {"window": 8},
    {"window": 100},
    {"doc_ids": DOCS},
    {"doc_ids": DOCS, "window": 2},
    {"softcap": 0.7},
    {"doc_ids": DOCS, "window": 4, "softcap": 2.0, "scale": 0.9},
    {"scale": 0.05},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
def test_matches_one_query_at_a_time(options, dtype, tolerance):
    q, k, v = batch(dtype)
    want, want_lse = oracle(q, k, v, **options)
    out = attention(q, k, v, **options)
    again, lse = attention(q, k, v, **options, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    for found, expected in ((out, want), (again, want)):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_gradients_match_the_explicit_form(options):
    leaves = [t.requires_grad_() for t in batch()]
    upstream = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    found = torch.autograd.grad(attention(*leaves, **options), leaves, upstream)
    want = torch.autograd.grad(oracle_differentiable(*leaves, **options), leaves, upstream)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def oracle_differentiable(q, k, v, doc_ids=None, window=None, scale=None, softcap=None):
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    seen = (j <= i)[None] & ((i - j) < (window or 99))
    if doc_ids is not None:
        seen = seen & (doc_ids[:, :, None] == doc_ids[:, None, :])
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), v)


def test_gradcheck_plain_and_through_the_log_sum_exp():
    q, k, v = (t[:1, :4].requires_grad_() for t in batch(heads=2, kv=1, dim=3))
    assert torch.autograd.gradcheck(lambda *t: attention(*t), (q, k, v))
    assert torch.autograd.gradcheck(lambda *t: attention(*t, window=2, softcap=1.5, return_lse=True), (q, k, v))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_packed_documents_equal_documents_alone(softcap):
    lengths = (4, 1, 7)
    q, k, v = (t[:1] for t in batch(torch.float32, length=12))
    doc_ids = torch.repeat_interleave(torch.tensor([3, 1, 4]), torch.tensor(lengths))[None]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    packed = attention(*leaves, doc_ids=doc_ids, softcap=softcap)
    grads = torch.autograd.grad(packed.square().sum(), leaves)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = [t[:, part].clone().requires_grad_() for t in (q, k, v)]
        out = attention(*alone, softcap=softcap)
        torch.testing.assert_close(packed[:, part], out, rtol=1e-5, atol=1e-6)
        for a, b in zip(grads, torch.autograd.grad(out.square().sum(), alone), strict=True):
            torch.testing.assert_close(a[:, part], b, rtol=1e-5, atol=1e-5)
        start += length


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}], ids=str)
def test_the_future_has_no_influence(options):
    q, k, v = batch(torch.float32)
    before = attention(q, k, v, **options)
    k[:, 6:], v[:, 6:] = 1e3, -1e3
    assert torch.equal(attention(q, k, v, **options)[:, :6], before[:, :6])


def test_a_window_of_one_returns_the_values_and_the_first_token_sees_itself():
    q, k, v = batch(torch.float32)
    assert torch.equal(attention(q, k, v, window=1), v.repeat_interleave(2, 2))
    assert torch.equal(attention(q, k, v)[:, 0], v.repeat_interleave(2, 2)[:, 0])


def test_two_halves_of_the_keys_merge_by_their_log_sum_exp():
    # What sequence parallelism does: query block 2 over key block 1 (all visible) and its own (causal).
    q, k, v = batch(torch.float64, length=8)
    whole = attention(q, k, v)[:, 4:]
    own, own_lse = attention(q[:, 4:], k[:, 4:], v[:, 4:], return_lse=True)
    keys, values = (t[:, :4].repeat_interleave(2, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q[:, 4:], keys) * 8**-0.5
    other, other_lse = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values), scores.logsumexp(-1)
    total = torch.logaddexp(own_lse, other_lse)
    weight_own, weight_other = ((t - total).exp().transpose(1, 2).unsqueeze(-1) for t in (own_lse, other_lse))
    torch.testing.assert_close(own * weight_own + other * weight_other, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 1), (3, 3)])
@pytest.mark.parametrize("dim_v", [8, 5])
def test_head_layouts_and_values_of_another_width(heads, kv, dim_v):
    q, k, v = batch(heads=heads, kv=kv, dim_v=dim_v)
    want, _ = oracle(q, k, v)
    torch.testing.assert_close(attention(q, k, v), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention(q, k, v, softcap=1e9), want, rtol=1e-6, atol=1e-6)


def test_strided_views_of_a_fused_projection():
    fused = torch.randn(2, 9, 8, 8)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    want = attention(q.contiguous(), k.contiguous(), v.contiguous())
    torch.testing.assert_close(attention(q, k, v), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 1.0}, {"return_lse": True}], ids=str)
def test_empty_batch(options):
    q, k, v = (t[:0] for t in batch(torch.float32))
    out = attention(q, k, v, **options)
    assert (out[0] if isinstance(out, tuple) else out).shape == (0, 9, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window=0, expected at least 1"),
        ({"softcap": 0.0}, "softcap=0.0, expected a positive"),
        ({"doc_ids": torch.zeros(2, 8)}, r"doc_ids is \(2, 8\), expected \[B, S\] = \(2, 9\)"),
        ({"k": torch.zeros(2, 8, 2, 8)}, "expected .B, S, H, D"),
        ({"k": torch.zeros(2, 9, 3, 8), "v": torch.zeros(2, 9, 3, 8)}, "4 query heads cannot be shared among 3"),
    ],
)
def test_mistakes_are_named(change, message):
    q, k, v = batch(torch.float32)
    with pytest.raises(ValueError, match=message):
        attention(**{"q": q, "k": k, "v": v, **change})
