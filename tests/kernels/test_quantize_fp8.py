"""The reference of quantize_fp8 against float8's own table of numbers, and against torchao where that is installed."""

import importlib.util

import pytest
import torch
from stoker.kernels import reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def numbers(dtype):
    """The finite numbers of codes 0, 1, 2, ... without a sign, ascending. Micikevicius et al. 2022, table 1."""
    mantissa, bias, codes = (3, 7, 0x7F) if dtype == E4M3 else (2, 15, 0x7C)
    steps = 2**mantissa
    return [
        (code % steps) / steps * 2.0 ** (1 - bias)
        if code < steps
        else (1 + code % steps / steps) * 2.0 ** (code // steps - bias)
        for code in range(codes)
    ]


def nearest(value, table):
    """The code whose number is nearest to |value|, the even one of two; what is larger than all becomes the largest."""
    value = min(abs(value), table[-1])
    return min(range(len(table)), key=lambda code: (abs(table[code] - value), code % 2))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_table_is_the_formats(dtype):
    table = numbers(dtype)
    bits = torch.arange(len(table), dtype=torch.uint8)
    assert bits.view(dtype).double().tolist() == table
    assert table[-1] == {E4M3: 448.0, E5M2: 57344.0}[dtype]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_nearest_of_the_table(dtype, given):
    x = (torch.randn(40, 12) * torch.logspace(-4, 3, 12)).to(given)
    values, scale, copy = reference.quantize_fp8(x, dtype, transpose=True)
    table = numbers(dtype)
    assert scale.item() == torch.tensor(table[-1] / x.abs().max().item(), dtype=torch.float64).float().item()
    products = (x.float() * scale).reshape(-1).tolist()
    wanted = [nearest(p, table) + (128 if p < 0 else 0) for p in products]
    assert values.view(torch.uint8).reshape(-1).tolist() == wanted
    assert torch.equal(copy.view(torch.uint8), values.view(torch.uint8).t())
    assert copy.is_contiguous()


def test_the_rule_in_numbers():
    values, scale, none = reference.quantize_fp8(torch.tensor([1.75, -0.5, 0.0]))
    assert (scale.item(), none) == (256.0, None)  # 448 / 1.75
    assert values.float().tolist() == [448.0, -128.0, 0.0]
    # 448 / 3 is no power of two, and is not made one: torchao does that by row, not by tensor.
    assert reference.quantize_fp8(torch.tensor([3.0]))[1].item() == torch.tensor(448 / 3).item()
    assert reference.quantize_fp8(torch.tensor([7.0]), E5M2)[1].item() == 8192.0
    # What is smaller than 1e-12 is scaled as if it were that.
    values, scale, _ = reference.quantize_fp8(torch.tensor([1e-13]))
    assert scale.item() == torch.tensor(448e12).item()
    assert values.float().item() == 44.0  # of 44.8
    assert reference.quantize_fp8(torch.empty(0, 3))[1].item() == torch.tensor(448e12).item()


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-30, 1e-13, 1.0, 100.0])
def test_scale_and_bits_are_torchaos(dtype, given, size):
    utils = importlib.import_module("torchao.float8.float8_utils")
    x = (size * torch.randn(65, 33) * torch.logspace(-4, 2, 33)).to(given)
    scale = utils.tensor_to_scale(x, dtype)
    bits = utils.to_fp8_saturated(x.float() * scale, dtype)
    values, ours, _ = reference.quantize_fp8(x, dtype)
    assert torch.equal(ours, scale)
    assert torch.equal(values.view(torch.uint8), bits.view(torch.uint8))
