"""csrc/glu.cu on the CPU against float64: SwiGLU, GeGLU and GELU."""

import pytest
import torch
from emulated_runs import assert_order_does_not_matter, only_blocks, outputs_and_grads, sparse
from stoker.kernels import reference
from torch.library import opcheck

OPS = ("swiglu", "geglu", "gelu")
# Relative to the value: half precision rounds it once, float32 takes some ten operations.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4.0e-3, torch.float16: 5e-4}
# Absolute: the slope of GELU is a difference near its zeros; the smallest number of float16 is 6e-8.
ABSOLUTE = 1e-6
SHAPES = [(2, 3, 1024), (3, 5, 37), (2, 17, 8), (1,), ()]


@pytest.fixture(params=OPS)
def op(emulated, request):
    native(request.param)  # its import is what tells torch of the shapes
    return request.param


def native(op):
    from stoker.kernels.native import glu

    return getattr(glu, op)


def inputs(op, shape, dtype):
    return [3 * torch.randn(shape).to(dtype) for _ in range(1 if op == "gelu" else 2)]


def assert_close(found, wanted, dtype):
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        scale = exact.abs().max().clamp(min=1).item() if exact.numel() else 1.0
        torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCE[dtype], atol=ABSOLUTE * scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients_match_float64(op, shape, dtype):
    given = inputs(op, shape, dtype)
    found = outputs_and_grads(native(op), given)
    wanted = outputs_and_grads(getattr(reference, op), [t.double() for t in given])
    assert_close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24, 520, 5])
def test_halves_of_one_projection_are_read_where_they_lie(op, width, dtype):
    whole = 3 * torch.randn(2, 7, 2 * width).to(dtype)
    halves = whole.chunk(2, -1)[: 1 if op == "gelu" else 2]
    found = outputs_and_grads(native(op), halves)
    wanted = outputs_and_grads(native(op), [t.contiguous() for t in halves])
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, wanted, strict=True))


def test_other_strides_and_an_unaligned_start(op):
    given = inputs(op, (4, 6, 16), torch.float32)
    wanted = outputs_and_grads(native(op), given)
    turned = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in given]
    shifted = [torch.cat((torch.zeros(1), t.flatten()))[1:].view(t.shape) for t in given]
    mixed = [given[0], *(t.transpose(0, 1).contiguous().transpose(0, 1) for t in given[1:])]
    spread = [t.flatten().repeat_interleave(2)[::2].view(4, 6, 16) for t in given]
    for strided in (turned, shifted, mixed, spread):
        found = outputs_and_grads(native(op), strided)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradcheck(op):
    given = [t.requires_grad_() for t in inputs(op, (3, 10), torch.float64)]
    assert torch.autograd.gradcheck(native(op), given)


def test_opcheck(op):
    given = inputs(op, (3, 16), torch.bfloat16)
    opcheck(getattr(torch.ops.stoker, op), given)
    opcheck(getattr(torch.ops.stoker, f"{op}_grad"), (given[0], *given))


def test_compiles_to_one_graph(op):
    def step(*given):
        return native(op)(native(op)(*given), *given[1:])

    given = inputs(op, (3, 16), torch.float32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(outputs_and_grads(compiled, given), outputs_and_grads(step, given), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_values_give_what_float64_gives(op, dtype):
    x = torch.tensor([-1e4, -300.0, -100.0, -88.0, -40.0, -12.0, -0.0, 0.0, 12.0, 88.0, 100.0, 300.0, 1e4]).to(dtype)
    given = [x] if op == "gelu" else [x, torch.full_like(x, 3.0)]
    found = outputs_and_grads(native(op), given)
    wanted = outputs_and_grads(getattr(reference, op), [t.double() for t in given])
    assert all(bool(t.isfinite().all()) for t in found)
    assert_close(found, wanted, dtype)
    # What is small is right by its own size too.
    assert found[0][4] == 0 or found[0][4].double() / wanted[0][4] == pytest.approx(1, rel=2 * TOLERANCE[dtype])


def test_not_a_number_is_passed_on(op):
    given = [torch.tensor([float("nan"), 1.0])] * (1 if op == "gelu" else 2)
    assert native(op)(*given).isnan().tolist() == [True, False]


def test_literals(emulated):
    swiglu, geglu, gelu = (native(op) for op in OPS)
    one, three = torch.tensor([0.0, 1.0, -1.0]), torch.full((3,), 3.0)
    assert swiglu(one, three).tolist() == pytest.approx([0.0, 3 * 0.7310586, -3 * 0.2689414], abs=1e-6)
    assert gelu(one).tolist() == pytest.approx([0.0, 0.841192, -0.158808], abs=1e-6)
    assert geglu(one, three).tolist() == pytest.approx([0.0, 2.523576, -0.476424], abs=1e-6)


def test_half_precision_is_rounded_once(op):
    for dtype in (torch.bfloat16, torch.float16):
        given = inputs(op, (4096,), dtype)
        exact = getattr(reference, op)(*(t.double() for t in given))
        found = native(op)(*given)
        # What float32 is off by may carry a few over the border; far below, float64 has no digits of 1 + tanh left.
        differs = (found != exact.to(dtype)) & (exact.abs() > 1e-6)
        assert int(differs.sum()) <= 4


def test_empty(op):
    for shape in ((0, 4), (3, 0)):
        found = outputs_and_grads(native(op), inputs(op, shape, torch.float32))
        assert {tuple(t.shape) for t in found} == {shape}


def test_the_same_bits_twice_and_in_any_order_of_threads(op):
    given = inputs(op, (5, 333), torch.bfloat16)
    assert_order_does_not_matter(lambda: native(op)(*given))
    assert_order_does_not_matter(lambda: getattr(torch.ops.stoker, f"{op}_grad")(given[0], *given))


def test_places_past_two_to_the_31_elements(op):
    """Rows whose distance is beyond 2^31 elements, and the last block of a tensor that long."""
    near = inputs(op, (1, 64), torch.bfloat16)
    far = [sparse((2, 64), torch.bfloat16, stride=2**31 + 64) for _ in near]
    for x, values in zip(far, near, strict=True):
        x[1] = values[0]
    wanted = outputs_and_grads(native(op), near)
    assert torch.equal(native(op)(*far)[1:], wanted[0])
    given = [sparse((1, 2**31 + 512), torch.bfloat16)] * len(near)
    given[0][0, -64:] = near[0][0]
    with only_blocks(-1):
        found = native(op)(*given)
    assert torch.equal(found[:, -64:], native(op)(*[near[0]] * len(near)))


def test_what_does_not_fit_is_refused_as_the_reference_does(emulated):
    swiglu, geglu, gelu = (native(op) for op in OPS)
    for gated in (swiglu, geglu):
        for other in (torch.ones(2, 5), torch.ones(2, 4).bfloat16()):
            with pytest.raises(ValueError, match=r"up is .*; both must be alike$"):
                gated(torch.ones(2, 4), other)
        with pytest.raises(ValueError, match=r"gate is int64; expected .*; or choose kernels\.\w+=reference"):
            gated(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x is int64; expected .*; or choose kernels\.gelu=reference"):
        gelu(torch.ones(2, dtype=torch.int64))
