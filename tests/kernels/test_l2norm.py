import math

import pytest
import torch
from stoker.kernels.reference import l2norm


def test_literals():
    tensors = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]
    assert l2norm(tensors).item() == 5.0
    assert l2norm(tensors, squared=True).item() == 25.0
    assert l2norm([]).item() == 0.0
    assert l2norm([torch.empty(0, 3)]).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 20000])
def test_matches_float64_at_sizes_around_the_row(dtype, size):
    tensors = [torch.randn(size).to(dtype), torch.randn(3, 5).to(dtype)]
    want = math.sqrt(sum(t.double().square().sum().item() for t in tensors))
    found = l2norm(tensors)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert found.shape == ()
    assert found.item() == pytest.approx(want, rel=3e-7 if dtype != torch.float64 else 1e-14)


def test_long_sums_keep_their_digits():
    # a plain float32 accumulation is off by about 3e-5 here
    found = l2norm([torch.full((3_000_000,), 0.1)], squared=True).item()
    assert found == pytest.approx(3_000_000 * float(torch.tensor(0.1)) ** 2, rel=5e-7)


def test_strided_mixed_dtypes_and_no_graph():
    x = torch.randn(6, 1000, requires_grad=True)
    found = l2norm([x.t(), x[:, ::2].bfloat16()])
    want = math.sqrt(x.double().square().sum().item() + x[:, ::2].bfloat16().double().square().sum().item())
    assert found.item() == pytest.approx(want, rel=1e-6)
    assert found.dtype == torch.float32
    assert not found.requires_grad


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_comes_through(bad):
    assert not l2norm([torch.ones(5000), torch.tensor([bad])]).isfinite()


def test_the_norm_survives_where_its_square_overflows_float32():
    tensors = [torch.full((1_000_000,), 2e16)]
    assert l2norm(tensors).item() == pytest.approx(2e19, rel=1e-6)
    assert l2norm(tensors, squared=True).item() == math.inf
