"""kernels/apex/fused_weight_gradient_mlp_cuda.py against float64, through a stand-in (fused_wgrad_stand_in.py)."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
from stoker.kernels import reference

sys.path.append(str(Path(__file__).parent))

import fused_wgrad_stand_in as stand_in

MODULE = "fused_weight_gradient_mlp_cuda"
OUR_MODULE = f"stoker.kernels.apex.{MODULE}"


@pytest.fixture
def weight_gradient(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, stand_in)
    monkeypatch.delitem(sys.modules, OUR_MODULE, raising=False)
    stand_in.calls.clear()
    yield importlib.import_module(OUR_MODULE).weight_gradient
    monkeypatch.delitem(sys.modules, OUR_MODULE)


def test_its_signature_is_the_ops(weight_gradient):
    assert inspect.signature(weight_gradient) == inspect.signature(reference.weight_gradient)


@pytest.mark.parametrize("holds_sum", [False, True])
@pytest.mark.parametrize(
    ("dtype", "total_dtype", "limit", "called"),
    [
        (torch.float32, torch.float32, 2e-6, "fp32"),
        (torch.bfloat16, torch.float32, 2e-6, "fp32"),
        (torch.float16, torch.float32, 2e-6, "fp32"),
        (torch.bfloat16, torch.bfloat16, 2.0**-7, "fp16"),
        (torch.float16, torch.float16, 2.0**-9, "fp16"),
    ],
)
def test_the_product_is_added_or_takes_the_place(weight_gradient, dtype, total_dtype, limit, called, holds_sum):
    dy, x = torch.randn(37, 5).to(dtype), torch.randn(37, 3).to(dtype)
    before = torch.randn(5, 3).to(total_dtype) if holds_sum else torch.full((5, 3), float("nan"), dtype=total_dtype)
    total = before.clone()
    weight_gradient(total, dy, x, holds_sum)
    exact = dy.double().t() @ x.double() + (before.double() if holds_sum else 0)
    torch.testing.assert_close(total.double(), exact, rtol=limit, atol=limit * 8)
    assert stand_in.calls == [called]


def test_strided_tensors_come_contiguous_and_the_sum_goes_back(weight_gradient):
    dy, x = torch.randn(5, 7).t(), torch.randn(7, 6)[:, ::2]
    total = torch.ones(3, 5).t()
    weight_gradient(total, dy, x, True)
    torch.testing.assert_close(total, 1 + dy.t() @ x)


def test_without_tokens_or_features_nothing_is_called(weight_gradient):
    total = torch.ones(5, 3)
    weight_gradient(total, torch.zeros(0, 5), torch.zeros(0, 3), True)
    assert torch.equal(total, torch.ones(5, 3))
    weight_gradient(total, torch.zeros(0, 5), torch.zeros(0, 3), False)
    assert torch.equal(total, torch.zeros(5, 3))
    weight_gradient(torch.zeros(0, 3), torch.zeros(7, 0), torch.zeros(7, 3), False)
    assert stand_in.calls == []


def test_what_apex_has_not_is_refused(weight_gradient):
    wide = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"torch.float64 added to torch.float64; .*; choose kernels.weight_gradient=reference$"
    ):
        weight_gradient(wide, wide, wide, True)
    huge = torch.zeros(1).expand(2**31, 1)
    with pytest.raises(ValueError, match=r"apex counts each in 32 bits"):
        weight_gradient(torch.zeros(1, 1), huge, huge, True)
    with pytest.raises(ValueError, match=r"^weight_gradient: grad_output is"):
        weight_gradient(torch.zeros(5, 3), torch.zeros(7, 5), torch.zeros(6, 3), True)
