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
