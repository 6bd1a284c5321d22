"""csrc/router.cu on the CPU against the reference: the same choice, weights and gradients near float64's."""

import pytest
import torch
from emulated_runs import FarRows, assert_order_does_not_matter, sparse
from stoker.kernels.reference import moe_topk as reference
from torch.library import opcheck

# Sums of at most 32 weights and their quotients, each rounded to float32.
TOLERANCE = 1e-6
SHAPES = [
    (17, 8, 2),
    (5, 60, 8),
    (9, 64, 1),
    (3, 100, 6),
    (11, 256, 8),
    (2, 300, 32),
    (3, 512, 22),
    (1, 1, 1),
    (4, 5, 5),
]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def moe_topk(emulated):
    from stoker.kernels.native.moe_topk import moe_topk

    return moe_topk


def chosen(function, scores, k, bias=None, **options):
    leaf = scores.detach().clone().requires_grad_()
    choice, weights = function(leaf, k, bias, **options)
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return choice, weights.detach(), *torch.autograd.grad(weights, leaf, upstream.to(weights.dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_choice_is_the_references_and_weights_and_gradients_match_float64(moe_topk, shape, normalize, has_bias):
    tokens, experts, k = shape
    scores = torch.randn(tokens, experts).sigmoid()
    bias = 0.3 * torch.randn(experts) if has_bias else None
    choice, *found = chosen(moe_topk, scores, k, bias, normalize=normalize, scale=2.5)
    wanted_choice = reference(scores, k, bias)[0]
    assert torch.equal(choice, wanted_choice)
    exact = scores.double().requires_grad_()
    weights = exact.gather(1, wanted_choice)
    weights = 2.5 * (weights / weights.sum(-1, keepdim=True) if normalize else weights)
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ours, wide in zip(found, [weights, *torch.autograd.grad(weights, exact, upstream)], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), wide.detach(), rtol=TOLERANCE, atol=10 * TOLERANCE)


def test_of_equal_scores_the_lower_expert_comes_first(moe_topk):
    scores = torch.zeros(2, 70)
    scores[0, [3, 40, 69]] = 1.0
    scores[1, [0, 32, 64]] = -0.0
    for function in (reference, moe_topk):
        choice, weights = function(scores, 5)
        assert choice.tolist() == [[3, 40, 69, 0, 1], [0, 1, 2, 3, 4]]
        assert weights.tolist() == [[1, 1, 1, 0, 0], [0] * 5]


def test_infinities_and_nan_have_their_place(moe_topk):
    scores = torch.tensor([[0.5, -INF, NAN, INF, 3e38, -3e38, NAN], [-INF] * 7])
    for function in (reference, moe_topk):
        assert function(scores, 7)[0].tolist() == [[2, 6, 3, 4, 0, 5, 1], [0, 1, 2, 3, 4, 5, 6]]


def test_all_weights_next_to_zero(moe_topk):
    for function in (reference, moe_topk):
        _, weights, grad = chosen(function, torch.zeros(2, 8), 2, normalize=True)
        assert not weights.any()
        assert grad.isfinite().all()


def test_non_contiguous_empty_and_the_same_bits_twice(moe_topk):
    turned = torch.randn(40, 9).t()
    assert torch.equal(moe_topk(turned, 3)[0], reference(turned, 3)[0])
    assert [tuple(t.shape) for t in chosen(moe_topk, torch.empty(0, 8), 2)] == [(0, 2), (0, 2), (0, 8)]
    scores, bias = torch.randn(33, 72), torch.randn(72)
    assert_order_does_not_matter(lambda: chosen(moe_topk, scores, 4, bias, normalize=True))


@pytest.mark.parametrize("normalize", [False, True])
def test_scores_past_two_to_the_31(moe_topk, normalize):
    far = FarRows((512,), torch.float32)
    scores, upstream = far.random(), sparse((far.rows, 2), torch.float32)
    upstream[-2:] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with far.launches():
        choice, weights = moe_topk(scores.requires_grad_(), 2, normalize=normalize)
        (grad,) = torch.autograd.grad(weights, scores, upstream)
    ends = far.ends(scores.detach()).requires_grad_()
    wanted, wanted_weights = reference(ends, 2, normalize=normalize)
    assert torch.equal(far.ends(choice), wanted)
    torch.testing.assert_close(far.ends(weights.detach()), wanted_weights.detach())
    (wanted_grad,) = torch.autograd.grad(wanted_weights, ends, far.ends(upstream))
    torch.testing.assert_close(far.ends(grad), wanted_grad)


def test_gradcheck_opcheck_and_one_graph(moe_topk):
    scores = torch.rand(3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: moe_topk(s, 3, None, True, 2.0)[1], (scores,))
    assert torch.autograd.gradcheck(lambda s: moe_topk(s, 3, torch.arange(12.0))[1], (scores,))
    narrow, bias = torch.rand(3, 12), torch.rand(12)
    choice, weights = moe_topk(narrow, 3)
    opcheck(torch.ops.stoker.moe_topk, (narrow, 3, bias, True, 1.0, 1e-20))
    opcheck(torch.ops.stoker.moe_topk_grad, (weights, narrow, choice, True, 1.0, 1e-20))
    leaf = narrow.requires_grad_()
    compiled = torch.compile(
        lambda s: moe_topk(s.sigmoid(), 3, bias, True)[1].square().sum(), fullgraph=True, backend="aot_eager"
    )
    wanted = torch.autograd.grad(moe_topk(leaf.sigmoid(), 3, bias, True)[1].square().sum(), leaf)
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf), leaf), wanted)


def test_what_does_not_fit_is_refused_as_the_reference_does(moe_topk):
    scores = torch.rand(2, 8)
    for function in (reference, moe_topk):
        with pytest.raises(ValueError, match="k=9 of 8 experts, expected 1 to 8"):
            function(scores, 9)
        with pytest.raises(ValueError, match=r"bias is torch.float32 \(7,\)"):
            function(scores, 2, torch.ones(7))
        with pytest.raises(ValueError, match=r"scores are torch\.bfloat16"):
            function(scores.bfloat16(), 2)
    with pytest.raises(
        ValueError, match=r"513 experts; this kernel has up to 512; or choose kernels.moe_topk=reference"
    ):
        moe_topk(torch.rand(2, 513), 2)
    with pytest.raises(ValueError, match="k=33 of 64 experts; this kernel has up to 32"):
        moe_topk(torch.rand(2, 64), 33)
