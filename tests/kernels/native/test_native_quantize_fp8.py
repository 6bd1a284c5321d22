"""csrc/fp8.cu on the CPU: the reference's bits."""

import pytest
import torch
from emulated_runs import assert_order_does_not_matter, multiprocessors, only_blocks, sparse
from stoker.kernels.reference import quantize_fp8 as reference
from torch.library import opcheck

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def quantize_fp8(emulated):
    from stoker.kernels.native.quantize_fp8 import quantize_fp8

    return quantize_fp8


def bits(tensor):
    return None if tensor is None else tensor.reshape(-1).view(torch.uint8)


def assert_same(found, wanted):
    assert [t is None for t in found] == [t is None for t in wanted]
    for ours, other in zip(found, wanted, strict=True):
        if other is not None:
            assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
            assert ours.is_contiguous()
            assert torch.equal(bits(ours), bits(other))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(128, 80), (65, 63), (16, 16), (1, 1), (3, 1000), (0, 8), (4, 0)])
def test_values_scale_and_copy_have_the_references_bits(quantize_fp8, dtype, given, shape):
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(given)
    assert_same(quantize_fp8(x, dtype), reference(x, dtype))
    assert_same(quantize_fp8(x, dtype, transpose=True), reference(x, dtype, transpose=True))


def test_numbers_by_hand(quantize_fp8):
    # The scale is 1: what is left is the format's rounding, to even in the middle between two.
    x = torch.tensor([448.0, -448.0, 0.0, 17.0, 19.0, -21.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 260.0])
    for function in (reference, quantize_fp8):
        values, scale, none = function(x)
        assert (scale.item(), none) == (1.0, None)
        assert values.float().tolist() == [448, -448, 0, 16, 20, -20, 2**-9, 0, 2**-8, 256]
        values, scale, _ = function(torch.tensor([57344.0, 9.0, -11.0]), torch.float8_e5m2)
        assert scale.item() == 1.0
        assert values.float().tolist() == [57344, 8, -12]


def test_zeros_nan_and_infinity(quantize_fp8):
    for function in (reference, quantize_fp8):
        values, scale, _ = function(torch.zeros(5))
        assert not values.float().any()
        assert scale.item() == pytest.approx(448e12)
        values, scale, _ = function(torch.tensor([1.0, NAN, INF, -2.0]))
        assert scale.isnan()
        assert values.float().isnan().all()
        values, scale, _ = function(torch.tensor([1.0, -INF, 2.0]))
        assert scale.item() == 0.0
        assert values.float().isnan().tolist() == [False, True, False]
        values, scale, _ = function(torch.tensor([3e38, 1.0]))
        assert values.float().tolist() == [448, 0]


def test_strides_offsets_and_the_same_bits_twice(quantize_fp8):
    for x in (torch.randn(48, 32).t(), torch.randn(32 * 48 + 1)[1:].view(32, 48), torch.randn(3, 4, 40)):
        assert_same(quantize_fp8(x), reference(x))
    x = torch.randn(70, 96)
    assert_order_does_not_matter(lambda: tuple(bits(t) for t in quantize_fp8(x.bfloat16(), transpose=True)))


# The pass for the largest magnitude runs whole, as every block of the other one reads what all of its blocks have left;
# of the other one the first and the last of 512 blocks run. Sizes are such that these have the last tile, or the last
# pieces and the elements behind them.
def test_numbers_past_two_to_the_31_elements(quantize_fp8):
    x = sparse((2**31 + 2**21 + 3,), torch.bfloat16)
    x[-5:] = torch.tensor([1.5, -7.0, 448.0, 0.25, -3.0])
    with multiprocessors(64), only_blocks(0, -1, of="quantize_flat"):
        values, scale, _ = quantize_fp8(x)
    assert scale.item() == 1.0
    assert values[-5:].float().tolist() == [1.5, -7.0, 448.0, 0.25, -3.0]


def test_a_transposed_copy_past_two_to_the_31_elements(quantize_fp8):
    rows = 2**25 + 2**15
    x = sparse((rows, 64), torch.bfloat16)
    x[-2:, -3:] = torch.tensor([[1.5, -7.0, 448.0], [0.25, -3.0, 2.0]])
    with multiprocessors(64), only_blocks(0, -1, of="quantize_both"):
        values, scale, copy = quantize_fp8(x, transpose=True)
    assert scale.item() == 1.0
    assert values[-2:, -3:].float().tolist() == [[1.5, -7.0, 448.0], [0.25, -3.0, 2.0]]
    assert copy[-3:, -2:].float().tolist() == [[1.5, 0.25], [-7.0, -3.0], [448.0, 2.0]]


def test_opcheck_and_one_graph(quantize_fp8):
    x = torch.randn(16, 32)
    checks = ("test_schema", "test_faketensor")
    opcheck(torch.ops.stoker.quantize_fp8, (x, False, 1e-12), test_utils=checks)
    opcheck(torch.ops.stoker.quantize_fp8_transposed, (x, True, 1e-12), test_utils=checks)
    compiled = torch.compile(lambda x: quantize_fp8(x * 2, transpose=True), fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), reference(x * 2, transpose=True))


def test_what_does_not_fit_is_refused_as_the_reference_does(quantize_fp8):
    for function in (reference, quantize_fp8):
        with pytest.raises(ValueError, match=r"x is torch\.float64, expected float32"):
            function(torch.ones(3, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"dtype=torch\.float8_e4m3fnuz, expected torch\.float8_e4m3fn or"):
            function(torch.ones(3), torch.float8_e4m3fnuz)
        with pytest.raises(ValueError, match=r"x is \(3,\), expected \[rows, columns\]"):
            function(torch.ones(3), transpose=True)
