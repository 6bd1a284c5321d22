"""The references that move tokens to their experts and back, against products with matrices of ones and zeros.

With M [N, T] that has its one of row i where copy i comes from, moving there is M x, and back is the sum over copies
M' (w rows). csrc/permute.cu is held against the references.
"""

import pytest
import torch
from stoker.kernels import reference

E = 6


def plan(tokens, k, dropped=0):
    """choice [T, k] of E experts, the last `dropped` tokens of none; what moe_sort makes of it; N."""
    choice = torch.rand(tokens, E).argsort(1)[:, :k].contiguous()
    choice[tokens - dropped :] = E
    return choice, *reference.moe_sort(choice, E), (tokens - dropped) * k


def matrices(copies, tokens, k, weights=None):
    """M [N, T], and M times each copy's weight."""
    m = torch.zeros(len(copies), tokens, dtype=torch.float64)
    m[torch.arange(len(copies)), copies // k] = 1
    return m if weights is None else m * weights.reshape(-1)[copies, None]


@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (9, 2), (40, 6), (0, 2)])
@pytest.mark.parametrize("dropped", [0, 1])
def test_sorting_is_pythons(tokens, k, dropped):
    choice, copies, places, counts, _ = plan(tokens, k, min(dropped, tokens))
    flat = choice.reshape(-1).tolist()
    assert copies.tolist() == sorted(range(len(flat)), key=flat.__getitem__)
    assert [copies.tolist().index(c) for c in range(len(flat))] == places.reshape(-1).tolist()
    assert counts.tolist() == [flat.count(e) for e in range(E)]
    assert (places.shape, copies.dtype, places.dtype, counts.dtype) == ((tokens, k), *3 * [torch.int64])


def test_numbers_by_hand():
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    choice = torch.tensor([[1, 0], [2, 2], [0, 1]])  # of 2 experts: the token in the middle goes nowhere
    copies, places, counts = reference.moe_sort(choice, 2)
    assert (copies.tolist(), places.tolist(), counts.tolist()) == (
        [1, 4, 0, 5, 2, 3],
        [[2, 0], [4, 5], [1, 3]],
        [2, 2],
    )
    rows = reference.moe_permute(x, copies[:4], places)
    assert rows.tolist() == [[1, 10], [3, 30], [1, 10], [3, 30]]
    weights = torch.tensor([[0.5, 0.25], [7.0, 7.0], [1.0, 2.0]])
    y = reference.moe_unpermute(rows, copies[:4], places, weights)
    assert y.tolist() == [[0.75, 7.5], [0, 0], [9, 90]]


@pytest.mark.parametrize("dropped", [0, 3])
@pytest.mark.parametrize(("tokens", "k", "width"), [(11, 1, 4), (23, 3, 5)])
def test_values_and_gradients_are_those_of_the_products(tokens, k, width, dropped):
    _, copies, places, _, n = plan(tokens, k, dropped)
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, k, dtype=torch.float64, requires_grad=True)
    y = reference.moe_unpermute(reference.moe_permute(x, copies[:n], places).sin(), copies[:n], places, weights)
    there, back = matrices(copies[:n], tokens, k), matrices(copies[:n], tokens, k, weights)
    wanted = back.t() @ (there @ x).sin()
    torch.testing.assert_close(y, wanted)
    upstream = torch.randn(tokens, width, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(z, (x, weights), upstream) for z in (y, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_is_summed_in_float32():
    # bfloat16 has 2^-7 beside 1: either of the two smaller copies alone would be lost, both together are not.
    rows = torch.tensor([[1.0], [2.0**-9], [2.0**-8]]).bfloat16()
    weights = torch.tensor([[1.0, 2.0, 1.0]])
    y = reference.moe_unpermute(rows, torch.arange(3), torch.tensor([[0, 1, 2]]), weights)
    assert (y.dtype, y.item()) == (torch.bfloat16, 1 + 2.0**-7)


def test_without_rows_or_tokens():
    empty = torch.empty(0, 2, dtype=torch.int64)
    y = reference.moe_unpermute(torch.empty(0, 4), empty.reshape(-1), empty, torch.empty(0, 2))
    assert y.shape == (0, 4)
    places = torch.tensor([[0, 1], [2, 3]])  # all copies are of no expert
    weights = torch.ones(2, 2, requires_grad=True)
    rows = torch.empty(0, 4, requires_grad=True)
    y = reference.moe_unpermute(rows, torch.empty(0, dtype=torch.int64), places, weights)
    assert y.tolist() == [[0.0] * 4] * 2
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), (rows, weights)))
