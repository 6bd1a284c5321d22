"""Blocks of queries and keys: which are seen, that they add up, and that nothing of the length squared is in memory."""

from __future__ import annotations

import math

import pytest
import torch
from stoker.kernels import attention_blocks, attention_flash
from stoker.kernels.attention_blocks import Place, Rule, block_backward, block_forward, sight
from stoker.kernels.reference import attention
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize(
    ("q_start", "queries", "k_start", "keys", "window", "expected"),
    [
        (0, 4, 0, 4, None, "causal"),
        (0, 4, 0, 4, 4, "causal"),
        (0, 4, 0, 4, 3, "some"),
        (4, 4, 0, 4, None, "all"),
        (0, 4, 4, 4, None, "none"),
        (0, 4, 3, 4, None, "some"),  # the last query sees the first key
        (3, 4, 0, 4, None, "all"),
        (2, 4, 0, 4, None, "some"),
        (4, 4, 0, 4, 8, "all"),
        (4, 4, 0, 4, 7, "some"),
        (4, 4, 0, 4, 2, "some"),  # the first query sees the last key
        (4, 4, 0, 4, 1, "none"),
        (0, 2, 0, 4, None, "some"),
    ],
)
def test_what_a_block_sees(q_start, queries, k_start, keys, window, expected):
    assert sight(q_start, queries, k_start, keys, window) == expected
    seen = [
        [0 <= q - k < (window or 99) for k in range(k_start, k_start + keys)] for q in range(q_start, q_start + queries)
    ]
    everything, nothing = all(map(all, seen)), not any(map(any, seen))
    assert (expected == "all", expected == "none") == (everything, nothing)


def explicit(q, k, v, rule, place):
    """One matrix of scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = rule.scale * q @ k.transpose(-1, -2)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    back = torch.arange(q.shape[2])[:, None] + place.q_start - torch.arange(k.shape[2]) - place.k_start
    seen = ((back >= 0) & (back < (rule.window or 10**6)))[None]
    if place.q_docs is not None:
        seen = seen & (place.q_docs[:, :, None] == place.k_docs[:, None])
    return scores.masked_fill(~seen[:, None], -math.inf), v


DOCS = torch.arange(600).div(70, rounding_mode="floor").repeat(2, 1)
BLOCKS = [
    (Rule(0.4), Place(300, 0)),
    (Rule(0.4), Place(300, 300)),
    (Rule(0.4, window=350), Place(300, 0)),  # the nearest keys are seen by all, the farthest by few
    (Rule(0.4, window=120), Place(300, 0)),  # late queries see nothing
    (Rule(0.4, window=200), Place(300, 300)),
    (Rule(0.4, softcap=1.3, window=250), Place(300, 0)),
    (Rule(0.4), Place(300, 0, DOCS[:, 300:], DOCS[:, :300])),
    (Rule(0.4, window=40, softcap=2.0), Place(300, 300, DOCS[:, 300:], DOCS[:, 300:])),
    (Rule(0.4), Place(100, 0)),
]


def make_block(rule, place):
    """Tensors of a block, with (out, lse) of these keys and of others that the queries see as well."""
    q, grad = (torch.randn(2, 4, 300, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 300, 8, dtype=torch.float64) for _ in range(2))
    scores, _ = explicit(q, k, v, rule, place)
    lse = torch.logaddexp(scores.logsumexp(-1), torch.randn(2, 4, 300, dtype=torch.float64))
    return q, k, v, grad, torch.randn_like(q), lse


@pytest.mark.parametrize(("rule", "place"), BLOCKS, ids=lambda value: str(value)[:40])
def test_a_block_is_what_one_matrix_of_scores_gives(rule, place):
    q, k, v, *_ = make_block(rule, place)
    scores, values = explicit(q, k, v, rule, place)
    found, found_lse = block_forward(q, k, v, rule, place)
    torch.testing.assert_close(found_lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, scores.softmax(-1).nan_to_num(0.0) @ values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rule", "place"), BLOCKS, ids=lambda value: str(value)[:40])
def test_a_blocks_gradients_follow_from_the_result_of_all_keys(rule, place):
    q, k, v, grad, out, lse = make_block(rule, place)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores, values = explicit(*leaves, rule, place)
    # d(weights) of softmax over these and other keys, with the others' part in lse and out.
    weights = (scores - lse[..., None]).exp()
    shift = (out * grad).sum(-1, keepdim=True)
    objective = (
        weights.detach() * ((grad @ values.transpose(-1, -2)).detach() - shift) * scores.nan_to_num(neginf=0.0)
    ).sum()
    objective = objective + ((weights.detach() @ values) * grad).sum()
    want = torch.autograd.grad(objective, leaves)
    for a, b in zip(block_backward(grad, q, k, v, out, lse, rule, place), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        (Rule(0.4, window=200), Place(300, 300)),
        (Rule(0.4, window=400), Place(300, 0)),
        (Rule(0.4, window=350), Place(300, 300)),
    ],
    ids=str,
)
def test_a_window_is_a_band_for_kernels_that_count_before_and_after(rule, place, monkeypatch):
    def banded(q, k, v, scale, band):
        far = torch.arange(300) - torch.arange(300)[:, None]
        seen = (far >= -(10**6 if band.before < 0 else band.before)) & (
            far <= (10**6 if band.after < 0 else band.after)
        )
        group = q.shape[1] // k.shape[1]
        scores = (scale * q @ k.repeat_interleave(group, 1).transpose(-1, -2)).masked_fill(~seen, -math.inf)
        asked.append(band)
        return scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)

    asked = []
    q, k, v, *_ = make_block(rule, place)
    want = block_forward(q, k, v, rule, place)
    monkeypatch.setattr(attention_flash, "takes", lambda *_: True)
    monkeypatch.setattr(attention_flash, "forward", banded)
    found = block_forward(q, k, v, rule, place)
    assert len(asked) == 1
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for t in results if isinstance(results, tuple | list) else [results]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return results


@pytest.mark.parametrize("options", [{"window": 100}, {"softcap": 1.0}, {"documents": 50}], ids=str)
def test_memory_is_linear_in_the_length(options, monkeypatch):
    monkeypatch.setattr(attention_blocks, "CHUNK", 16)
    monkeypatch.setattr(attention_blocks, "MAX_SCORES", 1)
    length = 1024
    if "documents" in options:
        options = {"doc_ids": torch.arange(length).div(50, rounding_mode="floor")[None]}
    q, k, v = (torch.randn(1, length, 2, 8).requires_grad_() for _ in range(3))
    with Largest() as largest:
        attention(q, k, v, **options).sum().backward()
    assert largest.elements <= 2 * 16 * length
