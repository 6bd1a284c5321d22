"""csrc/layernorm.cu on the CPU against float64. Layouts and wide rows: test_native_norms.py."""

import pytest
import torch
from emulated_runs import outputs_and_grads
from norm_cases import EPS, SHAPES, TOLERANCE, assert_close
from stoker.kernels.reference import layernorm as reference
from torch.library import opcheck


@pytest.fixture
def layernorm(emulated):
    from stoker.kernels.native.layernorm import layernorm

    return layernorm


def inputs(shape, dtype, weight_dtype=None):
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight, bias = 1 + 0.1 * torch.randn(shape[-1]), torch.randn(shape[-1])
    return x, weight.to(weight_dtype or dtype), bias.to(weight_dtype or dtype), residual


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients_match_float64(layernorm, shape, dtype):
    tensors = inputs(shape, dtype)[:3]
    found = outputs_and_grads(lambda a, w, b: layernorm(a, w, b, EPS), tensors)
    wanted = outputs_and_grads(lambda a, w, b: reference(a, w, b, EPS), [t.double() for t in tensors])
    assert [t.dtype for t in found] == [dtype] * 4
    assert_close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_with_a_residual_is_normed_and_both_gradients_meet(layernorm, shape, dtype):
    x, weight, bias, residual = inputs(shape, dtype)
    y, total, grad_x, grad_weight, grad_bias, grad_residual = outputs_and_grads(
        lambda a, w, b, r: layernorm(a, w, b, EPS, r), [x, weight, bias, residual]
    )
    assert torch.equal(total, x + residual)
    assert torch.equal(grad_x, grad_residual)
    # The sum as rounded is what is normed.
    wanted = outputs_and_grads(
        lambda a, w, b: (reference(a, w, b, EPS), a.clone()), [total.double(), weight.double(), bias.double()]
    )
    assert_close([y, total, grad_x, grad_weight, grad_bias], wanted, dtype)


def test_float32_parameters_beside_bfloat16(layernorm):
    tensors = inputs((4, 64), torch.bfloat16, torch.float32)[:3]
    found = outputs_and_grads(lambda a, w, b: layernorm(a, w, b, EPS), tensors)
    wanted = outputs_and_grads(lambda a, w, b: reference(a, w, b, EPS), [t.double() for t in tensors])
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert_close(found, wanted, torch.bfloat16)


def test_gradcheck(layernorm):
    x, weight, bias, residual = (t.double().requires_grad_() for t in inputs((3, 6), torch.float64))
    assert torch.autograd.gradcheck(lambda a, w, b: layernorm(a, w, b, EPS), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda a, w, b, r: layernorm(a, w, b, EPS, r), (x, weight, bias, residual))


def test_opcheck(layernorm):
    x, weight, bias, residual = inputs((3, 16), torch.bfloat16)
    ops, saved = torch.ops.stoker, torch.ones(3)
    opcheck(ops.layernorm, (x, weight, bias, EPS))
    opcheck(ops.layernorm_residual, (x, residual, weight, bias, EPS))
    opcheck(ops.layernorm_grad, (x, residual, x, weight, saved, saved))
    opcheck(ops.layernorm_grad, (x, None, x, weight, saved, saved))


def test_compiles_to_one_graph(layernorm):
    def step(a, w, b, r):
        y, total = layernorm(a, w, b, EPS, r)
        return y.float().square().sum() + total.float().square().sum() + layernorm(total, w, b, EPS).float().sum()

    tensors = [t.requires_grad_() for t in inputs((3, 16), torch.bfloat16)]
    eager = torch.autograd.grad(step(*tensors), tensors)
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors), tensors)
    for ours, wanted in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-2)


def test_the_same_bits_twice(layernorm):
    tensors = inputs((9, 257), torch.bfloat16)
    first, second = (outputs_and_grads(lambda a, w, b, r: layernorm(a, w, b, EPS, r), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_does_not_fit_is_refused_as_the_reference_does(layernorm):
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), bias \(8,\), x needs \(8,\) of both"):
        layernorm(x, torch.ones(4), weight, EPS)
    with pytest.raises(ValueError, match="both must be alike"):
        layernorm(x, weight, weight, EPS, torch.ones(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x is int64; expected .*; or choose kernels\.layernorm=reference"):
        layernorm(torch.ones(2, 8, dtype=torch.int64), weight, weight, EPS)
    with pytest.raises(ValueError, match="weight is float16; beside bfloat16 expected that or float32"):
        layernorm(x.bfloat16(), weight.half(), weight.half(), EPS)
    with pytest.raises(ValueError, match="weight is float32, bias is bfloat16; expected both alike"):
        layernorm(x.bfloat16(), weight, weight.bfloat16(), EPS)
