import pytest
import torch
import torch.nn.functional as F
from stoker.kernels.reference import rmsnorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def grads(function, *leaves, seed=1):
    """Value and gradients of the leaves for a fixed random output gradient."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, leaves, upstream)


def oracle(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 33), (16,), (2, 1, 1)])
def test_value_and_gradients_match_float64(dtype, tolerance, shape):
    x, weight = torch.randn(shape).to(dtype), (1 + 0.1 * torch.randn(shape[-1])).to(dtype)
    y, (dx, dweight) = grads(lambda a, w: rmsnorm(a, w, 1e-5), x, weight)
    want, (want_dx, want_dweight) = grads(oracle, x.double(), weight.double())
    for found, expected in ((y, want), (dx, want_dx), (dweight, want_dweight)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_literal():
    y = rmsnorm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 12.5)
    # mean square 12.5, plus eps 12.5: root 5
    assert y.tolist() == pytest.approx([0.6, 1.6], rel=1e-6)


def test_matches_llama_of_transformers():
    module = LlamaRMSNorm(48, eps=1e-6)
    module.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(2, 9, 48)
    torch.testing.assert_close(rmsnorm(x, module.weight, 1e-6), module(x), rtol=1e-6, atol=1e-6)


def test_matches_torch_in_float32():
    x, weight = torch.randn(4, 6, 40), torch.randn(40)
    torch.testing.assert_close(rmsnorm(x, weight, 1e-6), F.rms_norm(x, (40,), weight, 1e-6), rtol=1e-6, atol=1e-6)


def test_gradcheck_with_and_without_residual():
    x, r = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: rmsnorm(a, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda a, w, b: rmsnorm(a, w, 1e-5, b), (x, weight, r))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_is_the_addition_followed_by_the_norm_bit_for_bit(dtype):
    x, residual = (torch.randn(3, 4, 24).to(dtype) for _ in range(2))
    weight = torch.randn(24).to(dtype)
    y, total = rmsnorm(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rmsnorm(x + residual, weight, 1e-5))


def test_accumulates_in_float32_for_bf16():
    # In bf16 a running sum of 4096 ones stops at 256.
    y = rmsnorm(torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16), 0.0)
    assert y.unique().tolist() == [1.0]


def test_noncontiguous_input_and_mixed_weight_dtype():
    x, weight = torch.randn(5, 32, 6).transpose(1, 2), torch.randn(32)
    torch.testing.assert_close(rmsnorm(x, weight, 1e-5), rmsnorm(x.contiguous(), weight, 1e-5), rtol=1e-6, atol=1e-6)
    y, (dx, dweight) = grads(lambda a, w: rmsnorm(a, w, 1e-5), x.bfloat16(), weight)
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_empty_batch_gives_a_zero_weight_gradient():
    weight = torch.ones(8, requires_grad=True)
    x = torch.empty(0, 4, 8, requires_grad=True)
    rmsnorm(x, weight, 1e-5).sum().backward()
    assert x.grad.shape == (0, 4, 8)
    assert weight.grad.tolist() == [0.0] * 8


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), x needs \(8,\)"):
        rmsnorm(torch.ones(2, 8), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="both must be alike"):
        rmsnorm(torch.ones(2, 8), torch.ones(8), 1e-5, torch.ones(2, 8, dtype=torch.bfloat16))


def test_an_offset_is_added_to_the_weight_as_in_gemma():
    module = Gemma2RMSNorm(48, eps=1e-6)
    module.weight.data.uniform_(-0.5, 0.5)
    x = torch.randn(2, 9, 48)
    found = grads(lambda a, w: rmsnorm(a, w, 1e-6, offset=1.0), x, module.weight)
    theirs = grads(lambda a, w: torch.func.functional_call(module, {"weight": w}, a), x, module.weight)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    # The sum is taken in float32: 1 + 2^-9 is 1 in bf16.
    y = rmsnorm(torch.full((1, 4), 256.0), torch.full((4,), 2.0**-9).bfloat16(), 0.0, offset=1.0)
    assert y.unique().tolist() == [1.001953125]
