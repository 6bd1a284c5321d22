"""The gradient of a weight, added to a sum or put in its place."""

import pytest
import torch
from stoker.kernels.reference import weight_gradient

PAIRS = [
    (torch.float64, torch.float64, 1e-14),
    (torch.float32, torch.float32, 1e-6),
    (torch.bfloat16, torch.bfloat16, 2.0**-7),
    (torch.bfloat16, torch.float32, 2.0**-8),  # the product is rounded once where there is no CUDA
    (torch.float16, torch.float32, 2.0**-11),
    (torch.float32, torch.bfloat16, 2.0**-7),
]


@pytest.mark.parametrize("holds_sum", [False, True])
@pytest.mark.parametrize(("dtype", "total_dtype", "limit"), PAIRS)
def test_the_product_is_added_or_takes_the_place(dtype, total_dtype, limit, holds_sum):
    dy, x = torch.randn(37, 5).to(dtype), torch.randn(37, 3).to(dtype)
    before = torch.randn(5, 3).to(total_dtype) if holds_sum else torch.full((5, 3), float("nan"), dtype=total_dtype)
    total = before.clone()
    weight_gradient(total, dy, x, holds_sum)
    exact = dy.double().t() @ x.double() + (before.double() if holds_sum else 0)
    torch.testing.assert_close(total.double(), exact, rtol=limit, atol=limit * 37**0.5)


def test_factors_of_any_strides_and_no_tokens():
    dy, x = torch.randn(5, 7).t(), torch.randn(7, 6)[:, ::2]
    total = torch.empty(3, 5).t()
    weight_gradient(total, dy, x, False)
    torch.testing.assert_close(total, dy.t() @ x)
    weight_gradient(total, dy[:0], x[:0], False)
    assert torch.equal(total, torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("total", "dy", "x", "words"),
    [
        (torch.zeros(5, 3), torch.zeros(7, 5), torch.zeros(6, 3), r"grad_output is torch.float32 \(7, 5\) and x is"),
        (torch.zeros(5, 3), torch.zeros(7, 5), torch.zeros(7, 3).half(), r"of one dtype"),
        (torch.zeros(5, 3), torch.zeros(7, 5)[0], torch.zeros(7, 3), r"expected \[tokens, outputs\]"),
        (torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(7, 3), r"total is torch.float32 \(3, 5\), expected"),
        (torch.zeros(5, 3).int(), torch.zeros(7, 5), torch.zeros(7, 3), r"expected a floating dtype and \(5, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(total, dy, x, words):
    with pytest.raises(ValueError, match=f"^weight_gradient: .*{words}"):
        weight_gradient(total, dy, x, True)
