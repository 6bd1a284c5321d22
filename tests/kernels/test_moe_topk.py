"""The reference of moe_topk against Python's own sort, token by token; csrc/router.cu is held against the reference."""

import math

import pytest
import torch
from stoker.kernels import reference

INF, NAN = math.inf, math.nan


def by_sorting(scores, k, bias, normalize, scale):
    """Lists (experts, weights) per token: sorted() keeps equal ones in their order."""
    experts, weights = [], []
    for row in scores.tolist():
        ranking = row if bias is None else [a + b for a, b in zip(row, bias.tolist(), strict=True)]
        chosen = sorted(range(len(row)), key=lambda e, r=ranking: -r[e])[:k]
        total = sum(row[e] for e in chosen) if normalize else 1.0
        experts.append(chosen)
        weights.append([scale * row[e] / total for e in chosen])
    return experts, weights


@pytest.mark.parametrize(("tokens", "experts", "k"), [(7, 5, 1), (4, 16, 4), (3, 300, 8), (2, 6, 6)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_choice_and_weights_are_those_of_a_sort(tokens, experts, k, normalize, has_bias):
    # Few different scores, so that many are equal; all of them sums of powers of two, so that a bias adds exactly.
    scores = torch.randint(1, 9, (tokens, experts)).double() / 8
    bias = torch.randint(-4, 5, (experts,)).double() / 8 if has_bias else None
    choice, weights = reference.moe_topk(scores, k, bias, normalize=normalize, scale=2.5)
    wanted_choice, wanted_weights = by_sorting(scores, k, bias, normalize, 2.5)
    assert choice.dtype == torch.int64
    assert choice.tolist() == wanted_choice
    torch.testing.assert_close(weights, torch.tensor(wanted_weights, dtype=torch.float64), rtol=1e-15, atol=0)


def test_the_bias_chooses_and_does_not_weigh():
    scores = torch.tensor([[0.5, 0.25, 0.125]])
    choice, weights = reference.moe_topk(scores, 2, torch.tensor([0.0, 0.0, 1.0]))
    assert choice.tolist() == [[2, 0]]
    assert weights.tolist() == [[0.125, 0.5]]
    assert reference.moe_topk(scores, 2, torch.tensor([0.0, 0.0, 1.0]), True, 10.0)[1].tolist() == [[2.0, 8.0]]


def test_nan_is_above_infinity_and_equal_ones_go_by_number():
    choice, _ = reference.moe_topk(torch.tensor([[1.0, INF, NAN, -INF, 1.0, NAN], [0.0, -0.0, 0.0, -0.0, 1.0, 0.0]]), 6)
    assert choice.tolist() == [[2, 5, 1, 0, 4, 3], [4, 0, 1, 2, 3, 5]]


def test_gradients_by_hand():
    # weights s/(s+t), t/(s+t) at s=3, t=1: their derivatives are t/16, -s/16, ...; times 2 and the upstream (1, 0).
    scores = torch.tensor([[1.0, 0.5, 3.0]], dtype=torch.float64, requires_grad=True)
    choice, weights = reference.moe_topk(scores, 2, None, normalize=True, scale=2.0)
    assert choice.tolist() == [[2, 0]]
    assert weights.tolist() == [[1.5, 0.5]]
    (grad,) = torch.autograd.grad(weights[0, 0], scores)
    assert grad.tolist() == [[-2 * 3 / 16, 0.0, 2 * 1 / 16]]
    (plain,) = torch.autograd.grad(reference.moe_topk(scores, 2, None, scale=2.0)[1].sum(), scores)
    assert plain.tolist() == [[2.0, 0.0, 2.0]]


def test_a_bias_gets_no_gradient():
    bias = torch.zeros(4, requires_grad=True)
    _, weights = reference.moe_topk(torch.rand(3, 4, requires_grad=True), 2, bias, normalize=True)
    assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)


def test_no_tokens():
    choice, weights = reference.moe_topk(torch.empty(0, 4), 2)
    assert (choice.shape, weights.shape) == ((0, 2), (0, 2))
