"""csrc/cross_entropy.cu on the CPU against float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from emulated_runs import assert_order_does_not_matter, only_blocks, sparse
from stoker.kernels import losses_from_stats
from stoker.kernels import reference as ref
from torch.library import opcheck

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# In units of the largest value. Losses are float32 whatever the logits are; a gradient is rounded once to their dtype.
LOSS = 2e-6
GRAD = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = [
    (3, 5, 64),
    (7, 37),  # rows that begin at every alignment
    (2, 2053),  # more than one round of loads, with a rest
    (2, 4, 9000),  # the larger blocks
    (4, 1),
    (3,),  # fewer than a pack
]


@pytest.fixture
def native(emulated):
    from stoker.kernels.native import cross_entropy

    return cross_entropy


def inputs(shape, dtype=torch.float32, scale=4.0):
    logits = (scale * torch.randn(shape)).to(dtype)
    targets = torch.randint(0, shape[-1], shape[:-1])
    if targets.numel() > 2:
        targets.view(-1)[1] = -100
    return logits, targets


def losses_and_grad(function, logits, targets, **options):
    leaf = logits.detach().clone().requires_grad_()
    losses, lse = function(leaf, targets, return_lse=True, **options)
    upstream = torch.randn(losses.shape, generator=torch.Generator().manual_seed(1)).to(losses.dtype)
    return losses.detach(), lse, *torch.autograd.grad(losses, leaf, upstream)


def assert_close(found, wanted, tolerance):
    for ours, exact, limit in zip(found, wanted, tolerance, strict=True):
        scale = exact.abs().max().clamp(min=1).item() if exact.numel() else 1.0
        torch.testing.assert_close(ours.double(), exact, rtol=limit, atol=limit * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradient_match_float64(native, shape, dtype):
    logits, targets = inputs(shape, dtype)
    found = losses_and_grad(native.cross_entropy, logits, targets, z_loss=1e-2)
    wanted = losses_and_grad(ref.cross_entropy, logits.double(), targets, z_loss=1e-2)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, dtype]
    assert_close(found, wanted, (LOSS, LOSS, GRAD[dtype]))


def test_equals_torch_in_float64(native):
    logits, targets = inputs((6, 300))
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, targets, reduction="none")
    torch.testing.assert_close(native.cross_entropy(logits, targets).double(), want, rtol=LOSS, atol=LOSS)
    (grad,) = torch.autograd.grad(native.cross_entropy(leaf := logits.requires_grad_(), targets).sum(), leaf)
    (want_grad,) = torch.autograd.grad(want.sum(), exact)
    torch.testing.assert_close(grad.double(), want_grad, rtol=LOSS, atol=LOSS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary_of_128k(native, dtype):
    logits, targets = inputs((1, 128_257), dtype)
    found = losses_and_grad(native.cross_entropy, logits, targets)
    wanted = losses_and_grad(ref.cross_entropy, logits.double(), targets)
    assert_close(found, wanted, (LOSS, LOSS, GRAD[dtype]))


@pytest.mark.full
@pytest.mark.parametrize("n_classes", [1 << 18, (1 << 18) + 5])
def test_a_vocabulary_of_256k(native, n_classes):
    logits, targets = inputs((2, n_classes), torch.bfloat16)
    found = losses_and_grad(native.cross_entropy, logits, targets, z_loss=1e-4)
    wanted = losses_and_grad(ref.cross_entropy, logits.double(), targets, z_loss=1e-4)
    assert_close(found, wanted, (LOSS, LOSS, GRAD[torch.bfloat16]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_targets_give_exactly_nothing_whatever_their_logits_are(native, dtype):
    logits, targets = inputs((6, 77), dtype)
    targets[[0, 2, 4, 5]] = -100
    logits[0, 3], logits[2, 5], logits[4] = math.inf, math.nan, -math.inf
    losses, _, grad = losses_and_grad(native.cross_entropy, logits, targets, z_loss=1e-2)
    assert losses[[0, 1, 2, 4, 5]].tolist() == [0.0] * 5
    assert grad[[0, 1, 2, 4, 5]].count_nonzero() == 0
    assert (losses[3] > 0, bool(grad[3].isfinite().all()), grad[3].count_nonzero() > 60) == (True, True, True)


def test_logits_of_minus_infinity_are_no_classes(native):
    logits, targets = inputs((4, 600))
    logits[:, 256:600] = -math.inf
    targets.remainder_(256)
    found = losses_and_grad(native.cross_entropy, logits, targets)
    wanted = losses_and_grad(ref.cross_entropy, logits[:, :256].double(), targets)
    assert_close(found[:2], wanted[:2], (LOSS, LOSS))
    torch.testing.assert_close(found[2][:, :256].double(), wanted[2], rtol=LOSS, atol=LOSS)
    assert found[2][:, 256:].count_nonzero() == 0


def test_infinite_and_undefined_logits_give_an_undefined_loss(native):
    logits, targets = inputs((3, 50))
    targets = targets.clamp(min=0)
    logits[0, 4], logits[1, 9] = math.inf, math.nan
    assert native.cross_entropy(logits, targets).isnan().tolist() == [True, True, False]


def test_large_logits_neither_overflow_nor_lose_digits(native):
    logits, targets = inputs((3, 2000), scale=2e3)
    targets = logits.argmax(-1)
    logits.scatter_(1, ((targets + 1) % 2000).unsqueeze(1), logits.gather(1, targets.unsqueeze(1)) - 0.5)
    losses, _, grad = losses_and_grad(native.cross_entropy, logits, targets)
    want, _, want_grad = losses_and_grad(ref.cross_entropy, logits.double(), targets)
    torch.testing.assert_close(losses.double(), want, rtol=LOSS, atol=LOSS)
    torch.testing.assert_close(grad.double(), want_grad, rtol=LOSS, atol=LOSS)


@pytest.mark.parametrize("cuts", [[0, 37], [0, 12, 37], [0, 1, 2, 30, 37]])
@pytest.mark.parametrize("in_place", [False, True])
def test_vocabulary_shards_combine_to_the_whole(native, cuts, in_place):
    logits, targets = inputs((3, 5, 37))
    want, want_lse, want_grad = losses_and_grad(ref.cross_entropy, logits.double(), targets, z_loss=1e-2)
    shards = [(a, logits[..., a:b]) for a, b in itertools.pairwise(cuts)]  # rows that are not dense in memory
    stats = [native.cross_entropy_stats(part, targets, start) for start, part in shards]
    top = torch.stack([m for m, _, _ in stats]).amax(0)
    sumexp = sum(s * torch.exp(m - top) for m, s, _ in stats)
    losses, lse = losses_from_stats(top, sumexp, sum(t for _, _, t in stats), targets, z_loss=1e-2)
    upstream = torch.randn(losses.shape, generator=torch.Generator().manual_seed(1))
    grads = [
        native.cross_entropy_grad(part, targets, lse, upstream, start, z_loss=1e-2, in_place=in_place)
        for start, part in shards
    ]
    assert_close((losses, lse, torch.cat(grads, -1)), (want, want_lse, want_grad), (LOSS, LOSS, 4e-6))
    if in_place:
        assert torch.equal(logits, torch.cat(grads, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pieces_of_a_shard_are_the_references(native, dtype):
    logits, targets = inputs((5, 70), dtype)
    found, wanted = native.cross_entropy_stats(logits, targets, 20), ref.cross_entropy_stats(logits, targets, 20)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    lse, upstream = torch.full((5,), 5.0), torch.randn(5)
    ours, theirs = (
        f(logits, targets, lse, upstream, 20, -100, 1e-2) for f in (native.cross_entropy_grad, ref.cross_entropy_grad)
    )
    torch.testing.assert_close(ours, theirs, rtol=GRAD[dtype] * 2, atol=GRAD[dtype])


def test_gradcheck(native):
    logits, targets = inputs((5, 7), torch.float64)
    assert torch.autograd.gradcheck(lambda t: native.cross_entropy(t, targets, z_loss=0.1), (logits.requires_grad_(),))


def test_opcheck(native):
    logits, targets = inputs((3, 4, 24), torch.bfloat16)
    row, ops = torch.ones(3, 4), torch.ops.stoker
    opcheck(ops.cross_entropy, (logits, targets, -100, 0.1))
    opcheck(ops.cross_entropy_stats, (logits, targets, 3))
    opcheck(ops.cross_entropy_grad, (logits, targets, row, row, row, row, 0, -100, 0.1))
    opcheck(ops.cross_entropy_grad, (logits, targets, row, row, None, None, 3, -100, 0.1))
    opcheck(ops.cross_entropy_grad_, (logits, targets, row, row, 0, -100, 0.1))


def test_compiles_to_one_graph(native):
    def step(logits, targets):
        losses, lse = native.cross_entropy(2 * logits, targets, z_loss=1e-3, return_lse=True)
        return losses.sum() + lse.detach().sum()

    logits, targets = inputs((6, 33), torch.bfloat16)
    logits.requires_grad_()
    (eager,) = torch.autograd.grad(step(logits, targets), logits)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(logits, targets), logits)[0], eager)


def test_rows_are_read_where_they_lie(native):
    whole = torch.randn(4, 3, 200)
    targets = torch.randint(0, 100, (4, 3))
    shifted = torch.randn(3 * 40 + 1)[1:].view(3, 40)
    for logits, t in (
        (whole[..., 3:103], targets),  # evenly spaced
        (whole[:, ::2, :100], targets[:, ::2]),  # not one distance
        (whole[..., ::2], targets),  # not dense
        (whole[:1, :1, :100].expand(4, 3, 100), targets),
        (shifted, torch.tensor([1, 2, 39])),
    ):
        found = losses_and_grad(native.cross_entropy, logits, t)
        wanted = losses_and_grad(ref.cross_entropy, logits.double(), t)
        assert_close(found, wanted, (LOSS, LOSS, LOSS))
        strided = logits.detach().requires_grad_()
        (grad,) = torch.autograd.grad(native.cross_entropy(strided, t).sum(), strided)
        exact = logits.detach().double().requires_grad_()
        (want,) = torch.autograd.grad(ref.cross_entropy(exact, t).sum(), exact)
        torch.testing.assert_close(grad.double(), want, rtol=LOSS, atol=LOSS)


def test_in_place_works_on_what_is_not_dense_too(native):
    logits, targets = inputs((6, 40))
    lse, upstream = logits.logsumexp(-1), torch.randn(6)
    want = ref.cross_entropy_grad(logits, targets, lse, upstream)
    turned = logits.t().contiguous().t()
    found = native.cross_entropy_grad(turned, targets, lse, upstream, in_place=True)
    assert found is turned
    torch.testing.assert_close(turned, want, rtol=2e-6, atol=1e-6)


def test_empty(native):
    losses, lse, grad = losses_and_grad(
        native.cross_entropy, torch.empty(0, 4, 9), torch.empty(0, 4, dtype=torch.int64)
    )
    assert [tuple(t.shape) for t in (losses, lse, grad)] == [(0, 4), (0, 4), (0, 4, 9)]
    assert native.cross_entropy_stats(torch.empty(0, 9), torch.empty(0, dtype=torch.int64))[2].shape == (0,)


@pytest.mark.parametrize("target", [37, -1])
def test_a_target_that_is_no_class_is_named(native, target):
    logits, targets = inputs((4, 37))
    targets[2] = target
    with pytest.raises(ValueError, match=rf"target {target} is neither a class \(0 to 36\) nor ignore_index=-100"):
        native.cross_entropy(logits, targets)
    # On a device the kernel itself says so.
    with pytest.raises(RuntimeError, match="a target is neither a class nor ignore_index"):
        torch.ops.stoker.cross_entropy(logits, targets, -100, 0.0)


def test_what_does_not_fit_is_refused(native):
    logits, targets = inputs((3, 8))
    with pytest.raises(ValueError, match=r"targets is torch.int32 \(3,\), expected int64 \(3,\)"):
        native.cross_entropy(logits, targets.int())
    with pytest.raises(ValueError, match=r"int64 \(2,\), expected int64 \(3,\)"):
        native.cross_entropy(logits, targets[:2])
    with pytest.raises(ValueError, match=r"logits is int64; expected .*; or choose kernels\.cross_entropy=reference"):
        native.cross_entropy(logits.long(), targets)
    with pytest.raises(
        ValueError, match=r"targets is int64 \[2\], logits is float32 \[3, 8\]; expected one int64 per row"
    ):
        native.cross_entropy_stats(logits, targets[:2])
    with pytest.raises(ValueError, match=r"lse is float64 \[3\], .*; expected one float32 per row"):
        native.cross_entropy_grad(logits, targets, torch.ones(3).double(), torch.ones(3))


def test_the_order_of_threads_does_not_matter(native):
    logits, targets = inputs((2, 2100), torch.bfloat16)
    assert_order_does_not_matter(lambda: losses_and_grad(native.cross_entropy, logits, targets, z_loss=1e-2))


def test_rows_past_2_31_elements(native):
    n_classes, rows = 128_256, 17_000
    logits = sparse((rows, n_classes), torch.bfloat16)
    assert logits.numel() > 2**31
    logits[-1] = 4 * torch.randn(n_classes)
    targets = torch.zeros(rows, dtype=torch.int64)
    with only_blocks(-1):
        maximum, sumexp, target_logit = native.cross_entropy_stats(logits, targets)
        assert (maximum[-1], target_logit[-1]) == (logits[-1].max(), logits[-1, 0])
        lse = maximum + sumexp.log()
        torch.testing.assert_close(lse[-1], logits[-1].float().logsumexp(0), rtol=LOSS, atol=0)
        want = logits[-1].double().softmax(0)
        want[0] -= 1
        native.cross_entropy_grad(logits, targets, lse, torch.ones(rows), in_place=True)
    torch.testing.assert_close(logits[-1].double(), want, rtol=4e-3, atol=1e-7)
