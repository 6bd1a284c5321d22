"""benchmarks/gpu.py where there is no GPU: that the command works, what it writes, and that it tells what is wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stoker.kernels import reference
from stoker.kernels.bench.cases import SMALL, cases
from stoker.kernels.device import Device

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu as script

    yield script
    del sys.modules["gpu"]


def run(*arguments, **environment):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_every_op_is_checked_in_three_dtypes_and_timed_and_a_model_trained(tmp_path):
    files = tmp_path / "out.json", tmp_path / "report.md"
    done = run("--small", "--no-compile", "--rounds", "1", "--json", str(files[0]), "--report", str(files[1]))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(files[0].read_text())
    every = {(case.op, case.title) for case in cases(SMALL)}
    for dtype, rows in (("float32", "checked"), ("float16", "checked"), ("bfloat16", "results")):
        of_dtype = [r for r in found[rows] if r["dtype"] == dtype and r["contender"] == "reference"]
        assert {(r["op"], r["title"]) for r in of_dtype} == every
        assert all(max(r["verdict"]["errors"]) <= r["verdict"]["bound"] for r in of_dtype)
    assert all(r["forward"] for r in found["results"])
    assert list(found["models"]) == ["kernels=auto", "kernels=reference"]
    for model in found["models"].values():
        first, last = model["losses"]
        assert last < first < 7
        assert model["tokens_per_second"] > 0
        assert model["kernels"]["rmsnorm"] == "reference"
    assert found["left_out"] == []
    assert f"float16: {len(every) + 2} of {len(every) + 2} right" in files[1].read_text()


def test_without_time_everything_is_listed_as_left_out(tmp_path):
    done = run("--minutes", "0", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["results"] == []
    assert {what.partition(",")[0] for what in found["left_out"]} == {*(case.op for case in cases(SMALL)), "model"}


def test_an_implementation_that_is_wrong_in_half_precision_is_told_apart(gpu, monkeypatch):
    def wrong(gate, up):
        found = reference.swiglu(gate, up)
        return found * 1.1 if gate.dtype == torch.float16 else found

    def ours(op, device):
        return {"native": wrong} if op == "swiglu" else {}

    monkeypatch.setattr(gpu, "ours", ours)
    single, half = gpu._check(Device("cpu"), CPU)
    assert (gpu._is_right(single), gpu._is_right(half)) == (True, False)
    assert gpu._checked_line("float16", [single, half]).splitlines() == [
        "float16: 0 of 1 right against float64 on small inputs",
        "  swiglu, 24 x 96: native: wrong",
    ]
    assert not gpu._is_right(replace(single, error="RuntimeError: an illegal memory access"))
