"""GELU and the gate made of it."""

import math

import pytest
import torch
from stoker.kernels.reference import geglu, gelu
from transformers.activations import ACT2FN


def formula(x):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_values_and_gradients_match_float64(dtype, tolerance):
    gate, up, upstream = (torch.randn(3, 5, 37).to(dtype) for _ in range(3))
    wide = [t.double().requires_grad_() for t in (gate, up)]
    gate, up = gate.requires_grad_(), up.requires_grad_()
    for y, want in ((geglu(gate, up), formula(wide[0]) * wide[1]), (gelu(gate), formula(wide[0]))):
        found = (y, *torch.autograd.grad(y, (gate, up), upstream, allow_unused=True))
        expected = (want, *torch.autograd.grad(want, wide, upstream.double(), allow_unused=True))
        for a, b in zip(found, expected, strict=True):
            if b is None:
                assert a is None
                continue
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
def test_it_is_what_gpt2_and_gemma_mean_by_gelu(name):
    x = torch.randn(1000, dtype=torch.float64) * 3
    torch.testing.assert_close(gelu(x), ACT2FN[name](x), rtol=1e-12, atol=1e-12)


def test_literals_and_extremes():
    assert gelu(torch.tensor([0.0, 1.0, -1.0])).tolist() == pytest.approx([0.0, 0.841192, -0.158808], abs=1e-6)
    assert geglu(torch.tensor([-200.0, 200.0]), torch.full((2,), 3.0)).tolist() == [0.0, 600.0]
    assert geglu(torch.empty(0, 4), torch.empty(0, 4)).shape == gelu(torch.empty(0, 4)).shape == (0, 4)


def test_bf16_is_rounded_once():
    gate, up = torch.randn(4096).bfloat16(), torch.randn(4096).bfloat16()
    exact = torch.nn.functional.gelu(gate.float(), approximate="tanh")
    assert torch.equal(geglu(gate, up), (exact * up.float()).bfloat16())
    assert torch.equal(gelu(gate), exact.bfloat16())


def test_gradcheck_on_halves_of_a_fused_projection():
    fused = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: geglu(*t.chunk(2, -1)), (fused,))


def test_unlike_inputs_are_refused():
    with pytest.raises(ValueError, match="both must be alike"):
        geglu(torch.ones(2, 4), torch.ones(2, 5))
    with pytest.raises(ValueError, match="both must be alike"):
        geglu(torch.ones(4), torch.ones(4, dtype=torch.bfloat16))
