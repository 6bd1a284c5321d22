"""csrc/linear_cross_entropy.cu and the products around it, on the CPU against float64."""

import math

import pytest
import torch
from emulated_runs import assert_order_does_not_matter, only_blocks, sparse
from stoker.kernels.reference import linear_cross_entropy as reference
from torch.library import opcheck

# In units of the largest value. Losses and log-sum-exps are float32; dx and dweight come of logits' gradients that were
# rounded to the inputs' dtype, and are rounded to it themselves.
LOSS = 2e-6
GRAD = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
GRAD_OF_LOSS = 1 / 15


@pytest.fixture
def native(emulated):
    from stoker.kernels.native.linear_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


def inputs(dtype=torch.float32, n_classes=29, features=12):
    x, weight = torch.randn(3, 5, features).to(dtype), torch.randn(n_classes, features).to(dtype)
    targets = torch.randint(0, n_classes, (3, 5))
    targets[0, 2] = targets[2, 4] = -100
    return x, weight, targets


def results(function, x, weight, targets, **options):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    losses, lse = function(x, weight, targets, return_lse=True, **options)
    return [losses.detach(), lse, *torch.autograd.grad(losses.sum() * GRAD_OF_LOSS, (x, weight))]


def assert_close(found, wanted, dtype):
    for ours, exact, limit in zip(found, wanted, (LOSS, LOSS, GRAD[dtype], GRAD[dtype]), strict=True):
        scale = exact.abs().max().clamp(min=0.1).item()
        torch.testing.assert_close(ours.double(), exact, rtol=limit, atol=limit * scale)


@pytest.mark.parametrize("dtype", GRAD)
@pytest.mark.parametrize("token_grad", [None, GRAD_OF_LOSS])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("n_classes", [29, 2056])  # rows at every alignment; aligned, more than a round of loads
def test_matches_float64(native, dtype, token_grad, softcap, n_classes):
    x, weight, targets = inputs(dtype, n_classes)
    options = {"z_loss": 1e-2, "token_grad": token_grad, "softcap": softcap, "chunk_tokens": 4}
    found = results(native, x, weight, targets, **options)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, dtype, dtype]
    assert_close(found, results(reference, x.double(), weight.double(), targets, **options), dtype)


@pytest.mark.parametrize("token_grad", [None, GRAD_OF_LOSS])
def test_the_weights_gradient_leaves_unrounded_by_the_sink(native, token_grad):
    x, weight, targets = inputs(torch.bfloat16)
    leaf = x.detach().requires_grad_()
    received = []
    losses = native(
        leaf, weight.requires_grad_(), targets, token_grad=token_grad, grad_weight_out=received.append, chunk_tokens=4
    )
    (losses.sum() * GRAD_OF_LOSS).backward()
    (gradient,) = received
    want = results(reference, x.double(), weight.detach().double(), targets)[3]
    assert (gradient.dtype, weight.grad) == (torch.float32, None)
    assert not torch.equal(gradient, gradient.bfloat16().float())
    torch.testing.assert_close(gradient.double(), want, rtol=GRAD[torch.bfloat16], atol=1e-3)


def test_without_gradients_it_gives_the_same_losses(native):
    x, weight, targets = inputs(torch.bfloat16)
    with torch.no_grad():
        plain = native(x.requires_grad_(), weight, targets, token_grad=0.5, chunk_tokens=4)
    assert torch.equal(plain, native(x, weight, targets, chunk_tokens=4).detach())


@pytest.mark.parametrize("token_grad", [None, GRAD_OF_LOSS])
def test_ignored_tokens_contribute_nothing_even_with_infinite_logits(native, token_grad):
    x, weight, targets = inputs()
    finite = results(native, x, weight, targets, token_grad=token_grad)
    x[0, 2], x[2, 4] = math.inf, math.nan
    found = results(native, x, weight, targets, token_grad=token_grad)
    assert found[0][targets == -100].tolist() == [0.0, 0.0]
    assert found[2][targets == -100].count_nonzero() == 0
    for ours, want in zip(found[2:3], finite[2:3], strict=True):
        assert torch.equal(ours[targets != -100], want[targets != -100])


def test_gradcheck(native):
    x, weight, targets = inputs(torch.float64, n_classes=7, features=3)
    for softcap in (None, 1.5):
        assert torch.autograd.gradcheck(
            lambda a, b, cap=softcap: native(a, b, targets, z_loss=1e-2, chunk_tokens=4, softcap=cap),
            (x.detach().requires_grad_(), weight.detach().requires_grad_()),
        )


def test_opcheck(native):
    rows = [torch.zeros(5) for _ in range(3)]
    targets = torch.tensor([0, 3, -100, 19, 1])
    whole = torch.ops.stoker.cross_entropy_whole_
    narrow = torch.empty(5, 20, dtype=torch.bfloat16)
    opcheck(whole, (torch.randn(5, 20), *rows[:2], None, targets, rows[2], -100, 0.1, 0.0))
    opcheck(whole, (torch.randn(5, 20), *rows[:2], narrow, targets, rows[2], -100, 0.1, 3.0))
    opcheck(whole, (torch.randn(5, 20), *rows[:2], None, targets, None, -100, 0.1, 0.0))


@pytest.mark.parametrize("beside", [False, True])  # the gradient over the logits, or narrower beside them
def test_logits_past_two_to_the_31(emulated, beside):
    n_classes, rows = 128_256, 17_000
    logits = sparse((rows, n_classes), torch.float32)
    grad = sparse((rows, n_classes), torch.bfloat16) if beside else None
    assert logits.numel() > 2**31
    given = logits[-1] = 4 * torch.randn(n_classes)
    targets, ones = torch.full((rows,), n_classes - 1), torch.ones(rows)
    losses, lse = torch.empty(rows), torch.empty(rows)
    with only_blocks(-1):
        torch.ops.stoker.cross_entropy_whole_(logits, losses, lse, grad, targets, ones, -100, 0.0, 0.0)
    exact = given.double().requires_grad_()
    loss = exact.logsumexp(0) - exact[-1]
    torch.testing.assert_close(losses[-1].double(), loss.detach(), rtol=LOSS, atol=0)
    (wanted,) = torch.autograd.grad(loss, exact)
    to = logits if grad is None else grad
    torch.testing.assert_close(to[-1].double(), wanted, rtol=GRAD[to.dtype], atol=1e-7)
    assert not to[-2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_to_one_graph(native, dtype):
    x, weight, targets = inputs(dtype)

    def step(x, weight):
        return native(x, weight, targets, z_loss=1e-3, chunk_tokens=8).sum() * GRAD_OF_LOSS

    x.requires_grad_(), weight.requires_grad_()
    eager = torch.autograd.grad(step(x, weight), (x, weight))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, want in zip(torch.autograd.grad(compiled(x, weight), (x, weight)), eager, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)


def test_empty_and_strided_inputs(native):
    x, weight, targets = inputs()
    losses = native(x[:0].requires_grad_(), weight.requires_grad_(), targets[:0])
    losses.sum().backward()
    assert (losses.shape, weight.grad.count_nonzero()) == ((0, 5), 0)
    turned = weight.detach().t().contiguous().t()
    found = results(native, x.transpose(0, 1), turned, targets.t())
    assert_close(found, results(reference, x.transpose(0, 1).double(), turned.double(), targets.t()), torch.float32)


def test_what_does_not_fit_is_refused_as_the_reference_does(native):
    x, weight, targets = inputs()
    with pytest.raises(ValueError, match=r"linear_cross_entropy: weight is torch.float32 \(12, 29\)"):
        native(x, weight.t(), targets)
    with pytest.raises(ValueError, match="target 29 is neither a class"):
        native(x, weight, targets.clamp(min=29))
    logits, row = torch.randn(2, 9), torch.zeros(2)
    whole = torch.ops.stoker.cross_entropy_whole_
    with pytest.raises(RuntimeError, match="a target is neither a class nor ignore_index"):
        whole(logits, row, row.clone(), None, torch.tensor([0, 9]), None, -100, 0.0, 0.0)
    with pytest.raises(RuntimeError, match=r"grad is float32 \[2, 8\], logits is float32 \[2, 9\]; expected one shape"):
        whole(logits, row, row.clone(), torch.empty(2, 8), torch.tensor([0, 1]), row, -100, 0.0, 0.0)
    half = row.bfloat16()
    with pytest.raises(RuntimeError, match=r"logits is bfloat16 \[2, 9\]; expected float32"):
        whole(logits.bfloat16(), half, half.clone(), None, torch.tensor([0, 1]), None, -100, 0.0, 0.0)


def test_the_order_of_threads_does_not_matter(native):
    x, weight, targets = inputs(torch.bfloat16, n_classes=2100)
    assert_order_does_not_matter(
        lambda: tuple(results(native, x, weight, targets, z_loss=1e-2, token_grad=GRAD_OF_LOSS))
    )
