"""Layer normalisation against float64, and its residual form."""

import pytest
import torch
from stoker.kernels.reference import layernorm


def formula(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * weight + bias


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 33), (16,)])
def test_value_and_gradients_match_float64(dtype, tolerance, shape):
    x, upstream = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = (1 + 0.1 * torch.randn(shape[-1])).to(dtype), torch.randn(shape[-1]).to(dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    y, want = layernorm(*leaves, 1e-5), formula(*wide)
    found = (y, *torch.autograd.grad(y, leaves, upstream))
    expected = (want, *torch.autograd.grad(want, wide, upstream.double()))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_a_literal():
    y = layernorm(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), torch.tensor([10.0, 0.0]), 3.0)
    # mean 2, deviations -1 and 1, variance 1, plus eps 3: root 2
    assert y.tolist() == [9.5, 1.0]


def test_gradcheck_with_and_without_residual():
    x, r = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, w, b: layernorm(a, w, b, 1e-5), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda a, w, b, c: layernorm(a, w, b, 1e-5, c), (x, weight, bias, r))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_is_the_addition_followed_by_the_norm_bit_for_bit(dtype):
    x, residual = (torch.randn(3, 4, 24).to(dtype) for _ in range(2))
    weight, bias = torch.randn(24).to(dtype), torch.randn(24).to(dtype)
    y, total = layernorm(x, weight, bias, 1e-5, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, layernorm(x + residual, weight, bias, 1e-5))


def test_gradients_of_weight_and_bias_are_summed_in_float32_for_bf16():
    x = torch.ones(4096, 2, dtype=torch.bfloat16)
    weight, bias = (torch.ones(2, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    layernorm(x, weight, bias, 1e-5).backward(torch.ones_like(x))
    # In bf16 a running sum of ones stops at 256.
    assert bias.grad.tolist() == [4096.0, 4096.0]


def test_noncontiguous_input_mixed_weight_dtype_and_no_tokens():
    weight, bias = torch.randn(32), torch.randn(32)
    x = torch.randn(5, 32, 6).transpose(1, 2)
    torch.testing.assert_close(layernorm(x, weight, bias, 1e-5), layernorm(x.contiguous(), weight, bias, 1e-5))
    assert layernorm(x.bfloat16(), weight, bias, 1e-5).dtype == torch.bfloat16
    assert layernorm(torch.empty(0, 32), weight, bias, 1e-5).shape == (0, 32)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), bias \(8,\), x needs \(8,\) of both"):
        layernorm(torch.ones(2, 8), torch.ones(4), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="both must be alike"):
        layernorm(torch.ones(2, 8), torch.ones(8), torch.ones(8), 1e-5, torch.ones(3, 8))
