import pytest
import torch
from stoker.kernels import linear_cross_entropy as module
from stoker.kernels.linear_cross_entropy import default_chunk
from stoker.kernels.reference import cross_entropy, linear_cross_entropy

GRAD = 1 / 15


def batch(dtype=torch.float32):
    x, weight = torch.randn(3, 5, 12).to(dtype), torch.randn(29, 12).to(dtype)
    targets = torch.randint(0, 29, (3, 5))
    targets[0, 2] = targets[2, 4] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [None, 1, 4, 15])
@pytest.mark.parametrize("token_grad", [None, GRAD])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_equals_cross_entropy_of_the_linear_layer(chunk, token_grad, z_loss):
    x, weight, targets = batch(torch.float64)
    options = {"z_loss": z_loss, "token_grad": token_grad, "chunk_tokens": chunk, "return_lse": True}
    losses, lse = linear_cross_entropy(x, weight, targets, **options)
    want, want_lse = cross_entropy(x @ weight.T, targets, z_loss=z_loss, return_lse=True)
    found = (losses, lse, *torch.autograd.grad(losses.sum() * GRAD, (x, weight)))
    expected = (want, want_lse, *torch.autograd.grad(want.sum() * GRAD, (x, weight)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("token_grad", [None, GRAD])
def test_bf16_inputs_keep_float32_logits(token_grad):
    x, weight, targets = batch(torch.bfloat16)
    losses = linear_cross_entropy(x, weight, targets, token_grad=token_grad)
    dx, dweight = torch.autograd.grad(losses.sum() * GRAD, (x, weight))
    exact_x, exact_w = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = cross_entropy(exact_x @ exact_w.T, targets)
    want_dx, want_dweight = torch.autograd.grad(want.sum() * GRAD, (exact_x, exact_w))
    assert (losses.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(dweight.double(), want_dweight, rtol=1e-2, atol=1e-3)


def test_gradcheck():
    x, weight, targets = batch(torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(a, b, targets, z_loss=1e-2, chunk_tokens=4), (x, weight)
    )


def test_tokens_may_have_their_own_gradients_when_none_was_promised():
    x, weight, targets = batch(torch.float64)
    upstream = torch.randn(3, 5, dtype=torch.float64)
    found = torch.autograd.grad(linear_cross_entropy(x, weight, targets, chunk_tokens=4), (x, weight), upstream)
    want = torch.autograd.grad(cross_entropy(x @ weight.T, targets), (x, weight), upstream)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_a_promise_off_by_a_common_factor_is_put_right_and_a_broken_one_refused():
    x, weight, targets = batch(torch.float64)
    losses = linear_cross_entropy(x, weight, targets, token_grad=0.5)
    found = torch.autograd.grad(losses.sum() * GRAD, (x, weight), retain_graph=True)
    want = torch.autograd.grad(cross_entropy(x @ weight.T, targets).sum() * GRAD, (x, weight))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="promised one gradient for every loss, but they reach from 0 to 1"):
        losses[1].sum().backward()


@pytest.mark.parametrize("token_grad", [None, GRAD])
def test_weight_gradient_is_handed_out_once_in_float32_and_not_accumulated(token_grad):
    x, weight, targets = batch(torch.bfloat16)
    received = []
    losses = linear_cross_entropy(x, weight, targets, token_grad=token_grad, grad_weight_out=received.append)
    assert received == []
    (losses.sum() * GRAD).backward()
    (want,) = torch.autograd.grad(
        linear_cross_entropy(x.detach().float(), wide := weight.detach().float().requires_grad_(), targets).sum()
        * GRAD,
        (wide,),
    )
    assert len(received) == 1
    assert received[0].dtype == torch.float32
    torch.testing.assert_close(received[0], want, rtol=1e-5, atol=1e-6)
    assert weight.grad is None
    assert x.grad is not None


def test_backward_split_into_inputs_and_weights_hands_out_once():
    x, weight, targets = batch()
    received = []
    hidden = x * 2
    losses = linear_cross_entropy(hidden, weight, targets, grad_weight_out=received.append)
    torch.autograd.grad(losses.sum(), hidden, retain_graph=True)
    assert len(received) == 1
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(losses.sum(), weight)
    assert len(received) == 1


def test_a_frozen_trunk_still_hands_out_the_weight_gradient():
    x, weight, targets = batch()
    received = []
    linear_cross_entropy(x.detach(), weight, targets, grad_weight_out=received.append).sum().backward()
    assert len(received) == 1
    assert weight.grad is None


def test_ignored_tokens_give_exactly_nothing():
    x, weight, _ = batch()
    for token_grad in (None, GRAD):
        losses = linear_cross_entropy(x, weight, torch.full((3, 5), -100), z_loss=1e-2, token_grad=token_grad)
        dx, dweight = torch.autograd.grad(losses.sum(), (x, weight))
        assert losses.count_nonzero() == dx.count_nonzero() == dweight.count_nonzero() == 0


def test_no_logits_beyond_a_chunk_are_ever_allocated(monkeypatch):
    widest = 0
    original = torch.mm

    def spy(a, b, **options):
        nonlocal widest
        if b.shape[1] == 29:
            widest = max(widest, a.shape[0])
        return original(a, b, **options)

    monkeypatch.setattr(torch, "mm", spy)
    x, weight, targets = batch()
    linear_cross_entropy(x, weight, targets, chunk_tokens=4).sum().backward()
    assert widest == 4
    assert [default_chunk(v) for v in (8192, 128256, 100)] == [512, 128, 41943]


def test_a_promise_is_not_held_to_ignored_tokens():
    x, weight, targets = batch()
    losses = linear_cross_entropy(x, weight, targets, token_grad=GRAD)
    mask = (targets != -100).float()
    found = torch.autograd.grad((losses * mask).sum() * GRAD, (x, weight))
    want = torch.autograd.grad(linear_cross_entropy(x, weight, targets).sum() * GRAD, (x, weight))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_on_a_gpu_a_promise_is_put_right_or_refused_without_waiting_for_the_device(monkeypatch):
    on_device = module._common_ratio_on_device
    monkeypatch.setattr(module, "_common_ratio", lambda grad, targets, plan: on_device(grad, targets == -100, plan))
    x, weight, targets = batch(torch.float64)
    losses = linear_cross_entropy(x, weight, targets, token_grad=0.5)
    upstream = (targets != -100).double() * GRAD
    found = torch.autograd.grad((losses * upstream).sum(), (x, weight))
    want = torch.autograd.grad(cross_entropy(x @ weight.T, targets).sum() * GRAD, (x, weight))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    with pytest.raises(RuntimeError, match="promised one gradient for every loss"):
        linear_cross_entropy(x, weight, targets, token_grad=0.5)[1].sum().backward()
    x, weight, targets = batch()
    losses = linear_cross_entropy(x, weight, torch.full_like(targets, -100), token_grad=0.5)
    losses.sum().backward()
    assert not x.grad.any()
    assert not weight.grad.any()


def test_without_gradients_nothing_is_formed_ahead(monkeypatch):
    products = []
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append(1) or original(*a, **k))
    x, weight, targets = batch()
    with torch.no_grad():
        losses = linear_cross_entropy(
            x, weight, targets, token_grad=GRAD, grad_weight_out=lambda _: pytest.fail("called")
        )
    assert not losses.requires_grad
    assert len(products) == 1
    torch.testing.assert_close(losses, cross_entropy(x @ weight.T, targets).detach(), rtol=1e-5, atol=1e-5)


def test_strided_and_empty_inputs():
    x, weight, targets = batch(torch.float64)
    strided = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    turned = weight.detach().T.contiguous().T.requires_grad_()
    losses = linear_cross_entropy(strided, turned, targets, chunk_tokens=4)
    found = torch.autograd.grad(losses.sum(), (strided, turned))
    want = torch.autograd.grad(linear_cross_entropy(x, weight, targets).sum(), (x, weight))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    for token_grad in (None, 1.0):
        empty = linear_cross_entropy(x[:0], weight, targets[:0], token_grad=token_grad)
        dx, dweight = torch.autograd.grad(empty.sum(), (x, weight))
        assert empty.shape == (0, 5)
        assert dx.count_nonzero() == dweight.count_nonzero() == 0


def test_mistakes_are_named():
    x, weight, targets = batch()
    with pytest.raises(ValueError, match=r"expected torch.float32 \[classes, 12\]"):
        linear_cross_entropy(x, weight.T, targets)
    with pytest.raises(ValueError, match="target 40 is neither a class"):
        linear_cross_entropy(x, weight, targets.masked_fill(targets == targets[1, 1], 40))
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        linear_cross_entropy(x, weight, targets, chunk_tokens=0)
    with pytest.raises(ValueError, match="token_grad=0"):
        linear_cross_entropy(x, weight, targets, token_grad=0.0)
