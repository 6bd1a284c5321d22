"""csrc/l2norm.cu on the CPU against float64."""

import math

import pytest
import torch
from emulated_runs import assert_order_does_not_matter, only_blocks, sparse
from stoker.kernels.reference import l2norm as reference
from torch.library import opcheck

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def l2norm(emulated):
    from stoker.kernels.native.l2norm import l2norm

    return l2norm


def exact(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def test_literals(l2norm):
    tensors = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]
    assert l2norm(tensors).item() == 5.0
    assert l2norm(tensors, squared=True).item() == 25.0
    assert l2norm([]).item() == 0.0
    assert l2norm([torch.empty(0, 3)]).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 1023, 32768, 32769, 70001])
def test_matches_float64_around_the_sizes_of_packs_and_chunks(l2norm, dtype, size):
    tensors = [torch.randn(size).to(dtype), torch.randn(3, 5).to(dtype)]
    found = l2norm(tensors)
    assert (found.dtype, tuple(found.shape)) == (torch.float32, ())
    assert found.item() == pytest.approx(exact(tensors), rel=1.5e-7)


def test_long_sums_keep_their_digits(l2norm):
    # a plain float32 accumulation is off by about 3e-5 here
    found = l2norm([torch.full((1_000_000,), 0.1)], squared=True).item()
    assert found == pytest.approx(1_000_000 * float(torch.tensor(0.1)) ** 2, rel=2e-7)


def test_more_tensors_than_one_launch_takes_in_mixed_dtypes_and_strides(l2norm):
    tensors = [torch.randn(1 + 7 * i % 90).to(DTYPES[i % 3]) for i in range(700)]
    tensors += [torch.randn(6, 100).t(), torch.randn(64)[1:], torch.empty(0), torch.randn(6, 10)[:, ::2].bfloat16()]
    found = l2norm(tensors)
    assert found.item() == pytest.approx(exact(tensors), rel=1.5e-7)
    assert found.item() == pytest.approx(reference(tensors).item(), rel=3e-7)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_comes_through(l2norm, bad, dtype):
    assert not l2norm([torch.ones(5000, dtype=dtype), torch.tensor([bad], dtype=dtype)]).isfinite()


def test_the_norm_survives_where_its_square_overflows_float32(l2norm):
    tensors = [torch.full((100_000,), 1e17)]
    assert l2norm(tensors).item() == pytest.approx(3.1622776e19, rel=1e-6)
    assert l2norm(tensors, squared=True).item() == math.inf


def test_the_order_of_threads_does_not_matter(l2norm):
    x = torch.randn(33001)
    assert_order_does_not_matter(lambda: l2norm([x, x[1:]]).view(1))


@pytest.mark.full
def test_the_norm_of_more_than_two_to_the_31(l2norm):
    x = sparse((2**31 + 32768 + 5,), torch.bfloat16)
    x[[0, -6, -5, -1]] = 2.0
    assert l2norm([x, torch.tensor([3.0])]).item() == 5.0


def test_infinity_past_two_to_the_31_is_found(l2norm):
    x = sparse((2**31 + 32768 + 5,), torch.bfloat16)
    x[-1] = math.inf
    with only_blocks(-1, of="each_chunk"):  # what the other blocks did not leave is anything
        assert not l2norm([x]).isfinite()


def test_opcheck_compile_and_no_graph(l2norm):
    x = torch.randn(300, requires_grad=True)
    opcheck(torch.ops.stoker.l2norm, ([x.detach(), x.detach().half()], True))
    assert not l2norm([x]).requires_grad
    compiled = torch.compile(l2norm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled([x.detach(), x.detach()[1:]]), l2norm([x, x[1:]]))


def test_mistakes_are_named(l2norm):
    with pytest.raises(ValueError, match=r"tensors\[1\] is float64; .* or choose kernels\.l2norm=reference"):
        l2norm([torch.ones(3), torch.ones(3).double()])
