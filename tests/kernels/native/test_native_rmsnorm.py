"""csrc/rmsnorm.cu on the CPU against float64. Layouts and wide rows: test_native_norms.py."""

import pytest
import torch
from emulated_runs import FarRows, assert_order_does_not_matter, outputs_and_grads
from norm_cases import EPS, SHAPES, TOLERANCE, assert_close
from stoker.kernels.reference import rmsnorm as reference
from torch.library import opcheck


@pytest.fixture
def rmsnorm(emulated):
    from stoker.kernels.native.rmsnorm import rmsnorm

    return rmsnorm


def inputs(shape, dtype, weight_dtype=None):
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[-1])).to(weight_dtype or dtype)
    return x, weight, residual


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients_match_float64(rmsnorm, shape, dtype):
    x, weight, _ = inputs(shape, dtype)
    found = outputs_and_grads(lambda a, w: rmsnorm(a, w, EPS, offset=1.0), [x, weight])
    wanted = outputs_and_grads(lambda a, w: reference(a, w, EPS, offset=1.0), [x.double(), weight.double()])
    assert [t.dtype for t in found] == [dtype] * 3
    assert_close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_with_a_residual_is_normed_and_both_gradients_meet(rmsnorm, shape, dtype):
    x, weight, residual = inputs(shape, dtype)
    y, total, grad_x, grad_weight, grad_residual = outputs_and_grads(
        lambda a, w, r: rmsnorm(a, w, EPS, r), [x, weight, residual]
    )
    assert torch.equal(total, x + residual)
    assert torch.equal(grad_x, grad_residual)
    # The sum as rounded is what is normed.
    wanted = outputs_and_grads(lambda a, w: (reference(a, w, EPS), a.clone()), [total.double(), weight.double()])
    assert_close([y, total, grad_x, grad_weight], wanted, dtype)


def test_float32_weight_beside_bfloat16(rmsnorm):
    x, weight, _ = inputs((4, 64), torch.bfloat16, torch.float32)
    found = outputs_and_grads(lambda a, w: rmsnorm(a, w, EPS), [x, weight])
    wanted = outputs_and_grads(lambda a, w: reference(a, w, EPS), [x.double(), weight.double()])
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_close(found, wanted, torch.bfloat16)


def test_gradcheck(rmsnorm):
    x, weight, residual = (t.double().requires_grad_() for t in inputs((3, 6), torch.float64))
    assert torch.autograd.gradcheck(lambda a, w: rmsnorm(a, w, EPS, offset=1.0), (x, weight))
    assert torch.autograd.gradcheck(lambda a, w, r: rmsnorm(a, w, EPS, r), (x, weight, residual))


def test_opcheck(rmsnorm):
    x, weight, residual = inputs((3, 16), torch.bfloat16)
    ops = torch.ops.stoker
    opcheck(ops.rmsnorm, (x, weight, EPS, 0.0))
    opcheck(ops.rmsnorm_residual, (x, residual, weight, EPS, 0.0))
    opcheck(ops.rmsnorm_grad, (x, residual, x, weight, torch.ones(3), 0.0))
    opcheck(ops.rmsnorm_grad, (x, None, x, weight, torch.ones(3), 0.0))


def test_compiles_to_one_graph(rmsnorm):
    def step(a, w, r):
        y, total = rmsnorm(a, w, EPS, r)
        return y.float().sum() + total.float().square().sum() + rmsnorm(total, w, EPS).float().sum()

    x, weight, residual = (t.requires_grad_() for t in inputs((3, 16), torch.bfloat16))
    eager = torch.autograd.grad(step(x, weight, residual), (x, weight, residual))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, wanted in zip(
        torch.autograd.grad(compiled(x, weight, residual), (x, weight, residual)), eager, strict=True
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-2)


def test_the_same_bits_twice(rmsnorm):
    x, weight, residual = inputs((9, 257), torch.bfloat16)
    first, second = (outputs_and_grads(lambda a, w, r: rmsnorm(a, w, EPS, r), [x, weight, residual]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_does_not_fit_is_refused_as_the_reference_does(rmsnorm):
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), x needs \(8,\)"):
        rmsnorm(x, torch.ones(4), EPS)
    with pytest.raises(ValueError, match="both must be alike"):
        rmsnorm(x, torch.ones(8), EPS, torch.ones(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x is int64; expected .*; or choose kernels\.rmsnorm=reference"):
        rmsnorm(torch.ones(2, 8, dtype=torch.int64), torch.ones(8), EPS)
    with pytest.raises(ValueError, match="weight is float16; beside bfloat16 expected that or float32"):
        rmsnorm(x.bfloat16(), torch.ones(8).half(), EPS)


@pytest.mark.parametrize("width", [8192])
def test_offsets_past_2_to_the_31(rmsnorm, width):
    far = FarRows((width,), torch.bfloat16)
    x, residual, grad_y = far.random(), far.random(), far.random()
    weight = torch.randn(width).bfloat16()
    with far.launches():
        leaf = x.requires_grad_()
        y, total = rmsnorm(leaf, weight, EPS, residual)
        (grad_x,) = torch.autograd.grad(y, leaf, grad_y)
    ends = far.ends(total.detach()).double().requires_grad_()
    exact = reference(ends, weight.double(), EPS)
    assert_close([far.ends(y.detach())], [exact.detach()], torch.bfloat16)
    (exact_grad,) = torch.autograd.grad(exact, ends, far.ends(grad_y).double())
    assert_close([far.ends(grad_x)], [exact_grad], torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_of_threads_does_not_matter(rmsnorm, shape):
    x, weight, residual = inputs(shape, torch.bfloat16)
    assert_order_does_not_matter(
        lambda: tuple(outputs_and_grads(lambda a, w, r: rmsnorm(a, w, EPS, r), [x, weight, residual]))
    )
