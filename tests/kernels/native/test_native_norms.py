"""What csrc/norm*.cuh have to get right for RMSNorm and LayerNorm alike: layouts, wide rows, sums over many rows."""

import pytest
import torch
from emulated_runs import assert_order_does_not_matter, only_blocks, outputs_and_grads, sparse
from stoker.kernels import reference

EPS = 1e-5
OPS = {"rmsnorm": ("weight",), "layernorm": ("weight", "bias")}


@pytest.fixture(params=OPS)
def op(emulated, request):
    return request.param


def native(op):
    from stoker.kernels.native import layernorm, rmsnorm

    return {"rmsnorm": rmsnorm.rmsnorm, "layernorm": layernorm.layernorm}[op]


def parameters(op, width, dtype=torch.float32):
    values = {"weight": 1 + 0.1 * torch.randn(width), "bias": torch.randn(width)}
    return [values[name].to(dtype) for name in OPS[op]]


def normed(op, eps=EPS, of=None):
    return lambda x, *weights: (of or native(op))(x, *weights, eps)


def exact(op, tensors, eps=EPS):
    return outputs_and_grads(normed(op, eps, getattr(reference, op)), [t.double() for t in tensors])


def assert_close(found, wanted, tolerance):
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype != torch.float64
        scale = theirs.abs().max().clamp(min=1).item()
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [slice(0, 5), slice(5, 7)])
def test_heads_of_a_fused_projection_give_the_bits_of_a_copy(op, dtype, heads):
    qkv = torch.randn(2, 3, 9, 64).to(dtype)
    x, weights = qkv[:, :, heads], parameters(op, 64, dtype)
    assert not x.is_contiguous()
    for upstream in (torch.randn(qkv.shape)[:, :, heads], torch.ones(()).expand(x.shape)):
        found = outputs_and_grads(normed(op), [x, *weights], upstream)
        wanted = outputs_and_grads(normed(op), [x.contiguous(), *weights], upstream.contiguous())
        assert found[0].is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(5, 32, 6).transpose(1, 2),  # features apart
        torch.randn(4, 3, 2, 32).permute(2, 0, 1, 3)[:, :, ::2],  # more strides than two
        torch.randn(4 * 32 + 1)[1:].view(4, 32),  # not at 16 bytes
        torch.randn(4, 33)[:, :32],  # nor any row but the first
        torch.randn(1, 32).expand(4, 32),
    ],
    ids=["columns", "permuted", "shifted", "odd", "expanded"],
)
def test_layouts_that_have_to_be_copied_or_read_one_by_one(op, x):
    tensors = [x, *parameters(op, 32)]
    assert_close(outputs_and_grads(normed(op), tensors), exact(op, tensors), 2e-6)


def test_a_residual_in_another_layout(op):
    x, residual = torch.randn(2, 3, 9, 64)[:, :, :4], torch.randn(2, 4, 3, 64).transpose(1, 2)
    weights = parameters(op, 64)
    y, total = native(op)(x, *weights, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, native(op)(total, *weights, EPS))


def test_an_output_that_goes_nowhere_adds_nothing_to_gradients(op):
    x, residual = torch.randn(2, 5, 64, requires_grad=True).unbind()
    weights = [w.requires_grad_() for w in parameters(op, 64)]
    upstream = torch.randn(5, 64)
    y, total = native(op)(x, *weights, EPS, residual)
    found = torch.autograd.grad(y, [x, *weights], upstream)
    wanted = torch.autograd.grad(native(op)(x + residual, *weights, EPS), [x, *weights], upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    y, total = native(op)(x, *weights, EPS, residual)
    of_x, *of_weights = torch.autograd.grad(total, [x, *weights], upstream)
    assert torch.equal(of_x, upstream)
    assert not any(g.any() for g in of_weights)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (16400, torch.float32),  # more packs than a block's registers hold
        (8197, torch.float32),  # more elements, one by one
        (32800, torch.bfloat16),
    ],
)
def test_rows_beyond_the_registers(op, width, dtype):
    x, weights = torch.randn(2, width).to(dtype), parameters(op, width, dtype)
    tolerance = 5e-6 if dtype == torch.float32 else 4e-3
    assert_close(outputs_and_grads(normed(op), [x, *weights]), exact(op, [x, *weights]), tolerance)
    residual = torch.randn(2, width).to(dtype)
    y, total = native(op)(x, *weights, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, native(op)(total, *weights, EPS))


@pytest.mark.parametrize("width", [8, 264])
def test_gradients_of_parameters_over_many_rows(op, width):
    """Sums of 4,096 terms of one sign: half precision would have stopped at 256."""
    x, weights = torch.randn(4096, width).bfloat16(), parameters(op, width, torch.float32)
    upstream = x.float().sign() + 1
    found = outputs_and_grads(normed(op), [x, *weights], upstream)
    tensors = [t.double() for t in (x, *weights)]
    wanted = outputs_and_grads(normed(op, of=getattr(reference, op)), tensors, upstream)
    assert_close(found[2:], wanted[2:], 1e-6)


@pytest.mark.parametrize("shape", [(70, 48), (3, 1000), (9, 37)])
def test_the_order_of_threads_does_not_matter(op, shape):
    """Also: blocks of several warps, rows that do not fill a block, shared memory that nobody wrote."""
    tensors = [torch.randn(shape).bfloat16(), *parameters(op, shape[-1], torch.bfloat16)]
    assert_order_does_not_matter(lambda: tuple(outputs_and_grads(normed(op), tensors)))


@pytest.mark.parametrize("width", [64, 1024])
def test_large_values_and_small_deviations(op, width):
    # The squares' sum is beyond float16; the mean is a thousand deviations away.
    for x in (torch.randn(4, width).mul(3e4).half().clamp(-6e4, 6e4), 1000 + torch.randn(4, width)):
        tensors = [x, *parameters(op, width)]
        assert_close(
            outputs_and_grads(normed(op), tensors), exact(op, tensors), 1e-3 if x.dtype == torch.half else 1e-4
        )
    zeros = outputs_and_grads(normed(op), [torch.zeros(4, width), *parameters(op, width)])
    assert all(t.isfinite().all() for t in zeros)


@pytest.mark.parametrize("width", [64, 1024])
def test_places_past_two_to_the_31_elements(op, width):
    near, weights = torch.randn(1, width).bfloat16(), parameters(op, width, torch.bfloat16)
    grad = torch.randn(1, width).bfloat16()
    wanted = outputs_and_grads(normed(op), [near, *weights], grad)
    # Rows whose distance is beyond 2^31 elements ...
    x, upstream = (sparse((2, width), torch.bfloat16, stride=2**31 + width) for _ in range(2))
    x[1], upstream[1] = near[0], grad[0]
    found = outputs_and_grads(normed(op), [x, *weights], upstream)
    assert torch.equal(found[0][1:], wanted[0])
    assert torch.equal(found[1][1:], wanted[1])
    assert all(torch.equal(a, b) for a, b in zip(found[2:], wanted[2:], strict=True))
    # ... and the last row of a tensor that long, as it is written.
    x = sparse((2**31 // width + 4, width), torch.bfloat16)
    x[-1] = near[0]
    with only_blocks(-1):
        y = native(op)(x, *weights, EPS)
    assert torch.equal(y[-1:], wanted[0])


def test_no_rows_no_features_and_one_element(op):
    found = outputs_and_grads(normed(op), [torch.empty(0, 4, 8), *parameters(op, 8)])
    assert [tuple(t.shape) for t in found[:2]] == [(0, 4, 8)] * 2
    assert [t.tolist() for t in found[2:]] == [[0.0] * 8] * len(OPS[op])
    assert native(op)(torch.empty(3, 0), *parameters(op, 0), EPS).shape == (3, 0)
    one = [torch.tensor([2.0]), *parameters(op, 1)]
    assert_close(outputs_and_grads(normed(op, 1.0), one), exact(op, one, 1.0), 1e-6)


def test_a_scalar_and_tensors_elsewhere_are_refused(op):
    weights = parameters(op, 4)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        native(op)(torch.ones(()), *weights, EPS)
    with pytest.raises(RuntimeError, match="x has no dimension to norm over"):
        getattr(torch.ops.stoker, op)(torch.ones(()), *weights, EPS, *([0.0] if op == "rmsnorm" else []))
    x, saved, offset = torch.ones(2, 4), [torch.ones(3)] * len(OPS[op]), [0.0] if op == "rmsnorm" else []
    with pytest.raises(RuntimeError, match="expected what the forward pass returned"):
        getattr(torch.ops.stoker, f"{op}_grad")(x, None, x, weights[0], *saved, *offset)
