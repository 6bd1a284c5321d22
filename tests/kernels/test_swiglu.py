import pytest
import torch
from stoker.kernels.reference import swiglu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradients_match_float64(dtype, tolerance):
    gate, up = (torch.randn(3, 5, 37).to(dtype).requires_grad_() for _ in range(2))
    upstream = torch.randn(3, 5, 37).to(dtype)
    y = swiglu(gate, up)
    found = (y, *torch.autograd.grad(y, (gate, up), upstream))
    g, u = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    want_y = g / (1 + torch.exp(-g)) * u
    want = (want_y, *torch.autograd.grad(want_y, (g, u), upstream.double()))
    for a, b in zip(found, want, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_bf16_is_rounded_once():
    gate, up = torch.randn(4096).bfloat16(), torch.randn(4096).bfloat16()
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert torch.equal(swiglu(gate, up), exact.float().bfloat16())


def test_gradcheck_on_halves_of_a_fused_projection_and_extremes():
    fused = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: swiglu(*t.chunk(2, -1)), (fused,))
    assert swiglu(torch.tensor([-200.0, 200.0]), torch.ones(2)).tolist() == [0.0, 200.0]
    assert swiglu(torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 4)


def test_unlike_inputs_are_refused():
    with pytest.raises(ValueError, match="both must be alike"):
        swiglu(torch.ones(2, 4), torch.ones(2, 5))
    with pytest.raises(ValueError, match="both must be alike"):
        swiglu(torch.ones(4), torch.ones(4, dtype=torch.bfloat16))
