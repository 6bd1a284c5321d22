"""csrc/permute.cu on the CPU: order, counts, rows and sums as the reference's, gradients near float64's."""

import pytest
import torch
from emulated_runs import assert_order_does_not_matter, sparse
from stoker.kernels import reference
from torch.library import opcheck

# Half precision rounds once; float32 sums up to 8 copies, and dot products over D.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4.0e-3, torch.float16: 5e-4}


@pytest.fixture
def native(emulated):
    from stoker.kernels.native import moe_permute

    return moe_permute


def choices(tokens, k, experts, none=0, seed=0):
    """Distinct experts per token; the last `none` tokens go to no expert."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].contiguous()
    choice[tokens - none :] = experts
    return choice


CHOICES = {
    "ragged": (choices(700, 8, 60), 60),
    "one of each": (choices(40, 1, 5), 5),
    "none at the end": (choices(33, 3, 100, none=5), 100),
    "nothing but none": (choices(6, 2, 8, none=6), 8),
    "all to one": (torch.full((2100, 1), 3), 7),
    "all to the last of many": (torch.full((50, 1), 1022), 1023),
    "one expert": (torch.zeros(9, 1, dtype=torch.int64), 1),
    "one token": (choices(1, 4, 64), 64),
    "no token": (choices(0, 2, 8), 8),
}


@pytest.mark.parametrize("name", CHOICES)
def test_order_places_and_counts_are_the_references(native, name):
    choice, experts = CHOICES[name]
    wanted = reference.moe_sort(choice, experts)
    for ours, other in zip(native.moe_sort(choice, experts), wanted, strict=True):
        assert torch.equal(ours, other)
    counts = wanted[2]
    assert counts.tolist() == [int((choice == e).sum()) for e in range(experts)]


def test_copies_of_an_expert_lie_by_token(native):
    choice = torch.tensor([[2, 0], [1, 2], [3, 3], [0, 2]])  # three experts: the third token goes nowhere
    for moe_sort in (reference.moe_sort, native.moe_sort):
        copies, places, counts = moe_sort(choice, 3)
        assert copies.tolist() == [1, 6, 2, 0, 3, 7, 4, 5]
        assert places.tolist() == [[3, 0], [2, 4], [6, 7], [1, 5]]
        assert counts.tolist() == [2, 1, 3]


def test_numbers_of_no_expert_write_nothing_out_of_bounds(native):
    copies, places, counts = native.moe_sort(torch.tensor([[5], [-1], [2**40], [1]]), 4)
    assert (copies.tolist(), counts.tolist()) == ([3, 0, 1, 2], [0, 1, 0, 0])
    assert places.tolist() == [[1], [2], [3], [0]]


def moved(permute, unpermute, x, weights, plan, upstream):
    """x to its copies and back, and the gradients."""
    copies, places, counts = plan
    copies = copies[: int(counts.sum())]
    x, weights = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    rows = permute(x, copies, places)
    inner = rows * 2
    y = unpermute(inner, copies, places, weights)
    grads = torch.autograd.grad(y, [x, weights, inner], upstream.to(y.dtype))
    return [rows.detach(), y.detach(), *grads]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [64, 33, 4200])
@pytest.mark.parametrize("name", ["none at the end", "one of each", "nothing but none", "one token", "no token"])
def test_rows_there_and_back_match_float64(native, name, width, dtype):
    choice, experts = CHOICES[name]
    plan, (tokens, k) = reference.moe_sort(choice, experts), choice.shape
    x, weights, upstream = (
        torch.randn(tokens, width).to(dtype),
        torch.rand(tokens, k),
        torch.randn(tokens, width).to(dtype),
    )
    found = moved(native.moe_permute, native.moe_unpermute, x, weights, plan, upstream)
    wanted = moved(reference.moe_permute, reference.moe_unpermute, x.double(), weights.double(), plan, upstream)
    assert [t.dtype for t in found] == [dtype, dtype, dtype, torch.float32, dtype]
    assert torch.equal(found[0].double(), wanted[0])
    for ours, exact in zip(found[1:], wanted[1:], strict=True):
        scale = exact.abs().max().clamp(min=1).item() if exact.numel() else 1.0
        # The gradient of x is a sum of rows that were rounded before.
        bound = 2 * TOLERANCE[dtype]
        torch.testing.assert_close(ours.double(), exact, rtol=bound, atol=bound * scale)
    real = (choice < experts).all(1)
    assert not any(t[~real].any() for t in (found[1], found[2], found[3]))


def test_eight_copies_are_summed_in_order_to_the_references_bits(native):
    plan = reference.moe_sort(choices(5, 8, 9), 9)
    x, weights = torch.randn(5, 40), torch.rand(5, 8)
    upstream = torch.ones(5, 40)
    ours = moved(native.moe_permute, native.moe_unpermute, x, weights, plan, upstream)
    other = moved(reference.moe_permute, reference.moe_unpermute, x, weights, plan, upstream)
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], other[:3], strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_rows_of_any_dtype_are_copied(native, dtype):
    copies, places, _ = reference.moe_sort(choices(7, 2, 4), 4)
    x = torch.randint(0, 2, (7, 5)).to(dtype)
    found = native.moe_permute(x, copies, places)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8)[copies // 2])


def test_non_contiguous_and_unaligned(native):
    copies, places, _ = reference.moe_sort(choices(6, 2, 4), 4)
    weights = torch.rand(2, 6).t()
    for x in (torch.randn(32, 6).t(), torch.randn(6 * 32 + 1)[1:].view(6, 32)):
        rows = native.moe_permute(x, copies, places)
        assert torch.equal(rows, x[copies // 2])
        torch.testing.assert_close(
            native.moe_unpermute(rows, copies, places, weights), reference.moe_unpermute(rows, copies, places, weights)
        )


def test_the_same_bits_in_every_order_of_threads(native):
    choice = choices(300, 7, 12, none=3)
    assert_order_does_not_matter(lambda: native.moe_sort(choice, 12))
    plan, x, weights = reference.moe_sort(choice, 12), torch.randn(300, 20), torch.rand(300, 7)
    assert_order_does_not_matter(
        lambda: tuple(moved(native.moe_permute, native.moe_unpermute, x, weights, plan, torch.ones(300, 20)))
    )


def test_rows_past_2_to_the_31_elements(native):
    rows = sparse((2**31 // 64 + 4, 64), torch.bfloat16)
    rows[-1], places, weights = torch.arange(64), torch.tensor([[len(rows) - 1, len(rows)]]), torch.tensor([[2.0, 9.0]])
    y = native.moe_unpermute(rows, torch.zeros(0), places, weights)
    assert y.tolist() == [[2 * i for i in range(64)]]
    ones = torch.ones(1, 64, dtype=torch.bfloat16)
    grad_rows, grad_weights = torch.ops.stoker.moe_unpermute_grad(ones, rows, places, weights)
    assert grad_rows[-1].tolist() == [2.0] * 64
    assert grad_weights.tolist() == [[2016.0, 0.0]]


def test_gradcheck(native):
    copies, places, counts = reference.moe_sort(choices(4, 3, 5, none=1), 5)
    copies = copies[: int(counts.sum())]
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    for module in (native, reference):
        assert torch.autograd.gradcheck(lambda a, m=module: m.moe_permute(a, copies, places), (x,))
        assert torch.autograd.gradcheck(lambda r, w, m=module: m.moe_unpermute(r, copies, places, w), (rows, weights))


def test_opcheck_and_one_graph(native):
    choice = choices(6, 2, 4)
    places = reference.moe_sort(choice, 4)[1]
    x, weights, rows = torch.randn(6, 8), torch.rand(6, 2), torch.randn(12, 8)
    ops = torch.ops.stoker
    opcheck(ops.moe_sort, (choice, 4))
    opcheck(ops.moe_permute, (x, places, 12))
    opcheck(ops.moe_unpermute, (rows, places, None))
    opcheck(ops.moe_unpermute, (rows, places, weights))
    opcheck(ops.moe_unpermute_grad, (x, rows, places, weights))

    def step(x, weights):
        copies, places, _ = native.moe_sort(choice, 4)
        return native.moe_unpermute(native.moe_permute(x, copies, places).sin(), copies, places, weights).square().sum()

    leaves = (x.requires_grad_(), weights.requires_grad_())
    wanted = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), wanted)


def test_what_does_not_fit_is_refused_as_the_reference_does(native):
    copies, places, _ = reference.moe_sort(choices(6, 2, 4), 4)
    x, rows, weights = torch.ones(6, 8), torch.ones(12, 8), torch.ones(6, 2)
    for m in (reference, native):
        with pytest.raises(ValueError, match=r"choice is torch.int32 \(6, 2\), expected int64"):
            m.moe_sort(places.int(), 4)
        with pytest.raises(ValueError, match="num_experts=0"):
            m.moe_sort(places, 0)
        with pytest.raises(ValueError, match=r"x is \(5, 8\), places \(6, 2\)"):
            m.moe_permute(x[:5], copies, places)
        with pytest.raises(ValueError, match="13 copies of 12 choices"):
            m.moe_permute(x, torch.zeros(13, dtype=torch.int64), places)
        with pytest.raises(ValueError, match=r"weights are torch.bfloat16 \(6, 2\), expected torch.float32"):
            m.moe_unpermute(rows, copies, places, weights.bfloat16())
    with pytest.raises(
        ValueError, match=r"1024 experts; this kernel has 1 to 1023; or choose kernels.moe_sort=reference"
    ):
        native.moe_sort(places, 1024)
    with pytest.raises(ValueError, match="rows is int64; expected float32, bfloat16 or float16"):
        native.moe_unpermute(rows.long(), copies, places, weights)
