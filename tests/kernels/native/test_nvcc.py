"""Every kernel compiled by nvcc for three architectures: registers, spills, 16-byte accesses, and an object that torch
loads on a machine without a GPU. Nothing runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated_build import built
from stoker.kernels.native import report
from stoker.kernels.native.build import Target
from stoker.kernels.native.cache import CSRC, unit_names
from stoker.kernels.native.toolchain import NoCompilerError, find_toolchain

# One process builds; with several, the others would only wait for it.
pytestmark = pytest.mark.xdist_group("nvcc")


def _missing(what: str) -> None:
    """In CI a skipped test would be a hole that nobody sees."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        find_toolchain()
    except NoCompilerError as e:
        _missing(str(e))
    return built(Target())


@pytest.fixture(scope="module")
def examined(library: Path) -> report.Report:
    return report.examine(library)


def test_every_file_is_compiled_for_three_architectures(examined: report.Report) -> None:
    assert examined.built.architectures == (80, 90, 100)
    assert {u.unit for u in examined.used} == set(unit_names())
    kernels = {u.kernel for u in examined.used}
    assert {u.key for u in examined.used} == {(kernel, a) for kernel in kernels for a in (80, 90, 100)}


def test_no_kernel_spills_and_all_are_as_wide_as_they_claim(examined: report.Report) -> None:
    assert list(examined.violations) == []


def test_every_claim_was_held_against_machine_code(examined: report.Report) -> None:
    if not examined.disassembled:
        _missing("no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    assert {u.key for u in examined.used} <= set(examined.wide)
    assert any(claim.what == "loads and stores" for claim in report.claims(CSRC))


def _undefined(library: Path) -> set[str]:
    command = ["nm", "-D", "--undefined-only", "--format=just-symbols", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.partition("@")[0] for line in listed.split()}


def test_the_object_needs_only_torchs_stable_c_functions_of_2_11(library: Path) -> None:
    wanted = _undefined(library)
    of_torch = {name for name in wanted if re.match(r"(aoti_)?torch_|stable_", name)}
    # No C++ of torch's, neither ATen nor c10, in whatever namespace.
    assert [name for name in wanted if re.search(r"N2at|N3c10|5torch|caffe2", name)] == []
    assert not any(name.startswith(("cuda", "cu")) for name in wanted)
    include = Path(torch.__file__).parent / "include"
    shims = "\n".join(f"#include <torch/csrc/{p}>" for p in ("stable/c/shim.h", "inductor/aoti_torch/c/shim.h"))
    command = ["g++", "-E", "-P", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DUSE_CUDA"]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", "-x", "c++", "-"]
    declared = subprocess.run(command, input=shims, capture_output=True, text=True, check=True).stdout
    assert {name for name in of_torch if not re.search(rf"\b{name}\b", declared)} == set()
    assert len(of_torch) > 10


def test_the_object_needs_no_cuda_library(library: Path) -> None:
    listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", listed)
    assert "libtorch_cpu.so" in needed
    known = r"lib(torch_cpu|c10|stdc\+\+|m|gcc_s|c|dl|rt|pthread)\.so.*|ld-linux.*"
    assert [name for name in needed if not re.fullmatch(known, name)] == []


_LOAD = """
import json, sys, torch
before = set(torch._C._dispatch_get_all_op_names())
torch.ops.load_library(sys.argv[1])
found = {}
for name in sorted(set(torch._C._dispatch_get_all_op_names()) - before):
    found[name] = [key for key in ("CUDA", "CPU") if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
try:
    torch.ops.stoker.rmsnorm(torch.ones(2, 8), torch.ones(8), 1e-5, 0.0)
    said = "ran"
except NotImplementedError as e:
    said = str(e)
print(json.dumps([found, said]))
"""


def test_torch_without_cuda_loads_the_object_and_names_the_device_it_lacks(library: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LOAD, str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, said = json.loads(done.stdout)
    assert found["stoker::rmsnorm"] == ["CUDA"]
    assert {name for name, keys in found.items() if keys != ["CUDA"] or not name.startswith("stoker::")} == set()
    assert "Could not run 'stoker::rmsnorm' with arguments from the 'CPU' backend" in said
