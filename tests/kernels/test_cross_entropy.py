import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from stoker.kernels import losses_from_stats
from stoker.kernels.reference import cross_entropy, cross_entropy_grad, cross_entropy_stats


def oracle(logits, targets, ignore_index=-100, z_loss=0.0):
    lse = torch.logsumexp(logits, -1)
    losses = lse - logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) + z_loss * lse**2
    return torch.where(targets == ignore_index, 0.0, losses)


def batch(dtype=torch.float32, shape=(3, 5), n_classes=37):
    logits = (4 * torch.randn(*shape, n_classes)).to(dtype)
    targets = torch.randint(0, n_classes, shape)
    targets.view(-1)[[1, 4]] = -100
    return logits, targets, torch.randn(shape)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-13)]
)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_losses_and_gradient_match_float64(dtype, tolerance, z_loss):
    logits, targets, upstream = batch(dtype)
    logits.requires_grad_()
    losses, lse = cross_entropy(logits, targets, z_loss=z_loss, return_lse=True)
    (grad,) = torch.autograd.grad(losses, logits, upstream.to(losses.dtype))
    exact = logits.detach().double().requires_grad_()
    want = oracle(exact, targets, z_loss=z_loss)
    (want_grad,) = torch.autograd.grad(
        want, exact, upstream.to(torch.float32 if dtype != torch.float64 else dtype).double()
    )
    wide = torch.promote_types(dtype, torch.float32)
    assert (losses.dtype, lse.dtype, grad.dtype, lse.requires_grad) == (wide, wide, dtype, False)
    loss_tolerance = min(tolerance, 3e-6)  # bf16 logits are exact inputs: only their gradient is rounded to bf16
    torch.testing.assert_close(losses.double(), want, rtol=loss_tolerance, atol=loss_tolerance)
    torch.testing.assert_close(lse.double(), torch.logsumexp(exact, -1), rtol=loss_tolerance, atol=loss_tolerance)
    torch.testing.assert_close(grad.double(), want_grad, rtol=tolerance, atol=tolerance)


def test_a_literal():
    # softmax of [0, ln 3] is [1/4, 3/4]
    losses, lse = cross_entropy(torch.tensor([[0.0, math.log(3)]]), torch.tensor([0]), z_loss=0.5, return_lse=True)
    assert lse.tolist() == pytest.approx([math.log(4)], rel=1e-6)
    assert losses.tolist() == pytest.approx([math.log(4) + 0.5 * math.log(4) ** 2], rel=1e-6)


def test_matches_torch():
    logits, targets, _ = batch(shape=(64,), n_classes=101)
    want = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(cross_entropy(logits, targets), want, rtol=1e-6, atol=1e-6)


def test_gradcheck():
    logits, targets, _ = batch(torch.float64, shape=(6,), n_classes=5)
    assert torch.autograd.gradcheck(lambda t: cross_entropy(t, targets, z_loss=0.1), (logits.requires_grad_(),))


def test_ignored_targets_give_exactly_nothing_even_with_infinite_logits():
    logits, targets, upstream = batch()
    logits[0, 1] = math.inf
    logits[0, 4] = math.nan
    logits.requires_grad_()
    losses = cross_entropy(logits, targets, z_loss=1e-2)
    (grad,) = torch.autograd.grad(losses, logits, upstream)
    assert losses[0, [1, 4]].tolist() == [0.0, 0.0]
    assert grad[0, [1, 4]].count_nonzero() == 0
    assert losses.isfinite().all()
    assert grad.isfinite().all()
    assert losses.count_nonzero() == 13


def test_all_ignored_and_another_ignore_index_and_empty():
    logits = torch.randn(4, 9, requires_grad=True)
    losses = cross_entropy(logits, torch.full((4,), 3), ignore_index=3)
    losses.sum().backward()
    assert losses.tolist() == [0.0] * 4
    assert logits.grad.count_nonzero() == 0
    assert cross_entropy(torch.empty(0, 9), torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    losses = cross_entropy(torch.tensor([[1e4, 0.0], [-1e4, -1e4]]), torch.tensor([1, 0]))
    assert losses.tolist() == pytest.approx([1e4, math.log(2)])


def test_the_logits_are_left_alone_and_strides_change_nothing():
    logits, targets, _ = batch()
    before = logits.clone()
    want = cross_entropy(logits, targets)
    assert torch.equal(logits, before)
    strided = logits.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(cross_entropy(strided, targets), want, rtol=1e-6, atol=1e-6)


def test_backward_twice_over_a_retained_graph_gives_the_same():
    logits, targets, upstream = batch()
    losses = cross_entropy(logits.requires_grad_(), targets, z_loss=1e-3)
    first = torch.autograd.grad(losses, logits, upstream, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(losses, logits, upstream)[0])


@pytest.mark.parametrize("cuts", [[0, 37], [0, 12, 37], [0, 1, 2, 30, 37]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vocabulary_shards_combine_to_the_whole(cuts, dtype):
    logits, targets, upstream = batch(dtype)
    upstream = upstream.to(dtype)
    whole = logits.clone().requires_grad_()
    want, want_lse = cross_entropy(whole, targets, z_loss=1e-2, return_lse=True)
    (want_grad,) = torch.autograd.grad(want, whole, upstream)

    shards = [(a, logits[..., a:b]) for a, b in itertools.pairwise(cuts)]
    stats = [cross_entropy_stats(part, targets, start) for start, part in shards]
    top = torch.stack([m for m, _, _ in stats]).amax(0)
    sumexp = sum(s * torch.exp(m - top) for m, s, _ in stats)
    target_logit = sum(t for _, _, t in stats)
    losses, lse = losses_from_stats(top, sumexp, target_logit, targets, z_loss=1e-2)
    grad = torch.cat(
        [cross_entropy_grad(part, targets, lse, upstream, start, z_loss=1e-2) for start, part in shards], -1
    )
    tolerance = 1e-13 if dtype == torch.float64 else 3e-6
    for found, expected in ((losses, want.detach()), (lse, want_lse), (grad, want_grad)):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_shard_pieces_as_literals():
    logits = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    here = cross_entropy_stats(logits, torch.tensor([5]), vocab_start=4)
    elsewhere = cross_entropy_stats(logits, torch.tensor([3]), vocab_start=4)
    assert [t.tolist() for t in here] == [[1.0], [2.0], [1.0]]
    assert [t.tolist() for t in elsewhere] == [[1.0], [2.0], [0.0]]
    assert here[1].dtype == torch.float32


@pytest.mark.parametrize("target", [9, -1])
def test_a_target_that_is_no_class_is_named(target):
    with pytest.raises(ValueError, match=rf"target {target} is neither a class \(0 to 8\) nor ignore_index=-100"):
        cross_entropy(torch.randn(2, 9), torch.tensor([0, target]))


def test_targets_of_another_shape_or_dtype_are_refused():
    with pytest.raises(ValueError, match=r"int64 \(3,\), expected int64 \(2,\)"):
        cross_entropy(torch.randn(2, 9), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"int32 \(2,\), expected int64"):
        cross_entropy(torch.randn(2, 9), torch.tensor([0, 1], dtype=torch.int32))
