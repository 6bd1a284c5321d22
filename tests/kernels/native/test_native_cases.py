"""Every native op on the inputs that `stoker bench kernels` has for it, against float64."""

import importlib

import pytest
import torch
from stoker.kernels.bench.case import Maker
from stoker.kernels.bench.cases import SMALL, cases
from stoker.kernels.bench.check import check
from stoker.kernels.implementations import NATIVE

CASES = {f"{case.op}, {case.title}": case for case in cases(SMALL) if case.op in NATIVE}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right(emulated, name, dtype):
    case = CASES[name]
    native = getattr(importlib.import_module(f"stoker.kernels.native.{NATIVE[case.op]}"), case.op)
    verdict = check(case, native, Maker(torch.device("cpu"), dtype, 7))
    assert verdict.is_right, verdict


def without_data(values):
    """The same shapes, dtypes and strides, of no memory."""
    return [v.to("meta") if isinstance(v, torch.Tensor) else without_data(v) for v in values]


@pytest.mark.parametrize("name", CASES)
def test_tensors_without_data_give_the_shapes_and_dtypes_of_those_with(emulated, name):
    case = CASES[name]
    native = getattr(importlib.import_module(f"stoker.kernels.native.{NATIVE[case.op]}"), case.op)
    inputs = case.make(Maker(torch.device("cpu"), torch.bfloat16, 7))
    found = case.call(native, without_data(inputs))
    assert {t.device.type for t in found} == {"meta"}
    wanted = case.call(native, inputs)
    assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in wanted]
