"""Soft-capped logits: the function, its derivative, and the loss that caps chunk by chunk."""

import pytest
import torch
from stoker.kernels import softcap, softcap_, softcap_slope
from stoker.kernels.reference import cross_entropy, linear_cross_entropy


def test_literals():
    assert softcap(torch.tensor([0.0, 30.0, -1e9]), 30.0).tolist() == pytest.approx([0.0, 22.847825, -30.0])
    assert softcap_slope(torch.tensor([0.0, 15.0, 30.0]), 30.0).tolist() == [1.0, 0.75, 0.0]


def test_in_place_is_the_same_and_gradients_are_right():
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: softcap(3 * t, 2.0), (x,))
    work = x.detach().clone()
    assert softcap_(work, 2.0) is work
    torch.testing.assert_close(work, softcap(x.detach(), 2.0), rtol=1e-14, atol=1e-14)


def test_bf16_is_rounded_once_and_keeps_its_dtype():
    x = (torch.randn(1000) * 20).bfloat16().requires_grad_()
    y = softcap(x, 10.0)
    assert torch.equal(y, (torch.tanh(x.double() / 10) * 10).float().bfloat16())
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize("token_grad", [None, 0.5])
@pytest.mark.parametrize("chunk", [None, 4])
def test_the_joint_loss_caps_like_logits_capped_at_once(token_grad, chunk):
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = (4 * torch.randn(9, 6, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 9, (11,))
    targets[3] = -100
    joint = linear_cross_entropy(x, weight, targets, z_loss=0.1, token_grad=token_grad, chunk_tokens=chunk, softcap=2.0)
    apart = cross_entropy(2.0 * torch.tanh(x @ weight.t() / 2.0), targets, z_loss=0.1)
    torch.testing.assert_close(joint, apart, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(0.5 * joint.sum(), (x, weight))
    for a, b in zip(found, torch.autograd.grad(0.5 * apart.sum(), (x, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not found[0][3].any()
