"""NVIDIA apex counts by its extension modules; a Python-only build, and another project of that name, do not."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import pytest
from stoker.kernels import apex

MODULE = "amp_C"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages, the first on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name == "apex" or name.startswith("apex.")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_without_any_apex_the_way_to_it_is_named(packages: Path) -> None:
    assert apex.lacks(MODULE, "APEX_CUDA_EXT") == (
        "needs amp_C of NVIDIA apex, which PyPI does not have: build it from github.com/NVIDIA/apex with "
        "APEX_CUDA_EXT=1"
    )


def test_pypis_namesake_is_recognised_and_named(packages: Path) -> None:
    write(packages, {"apex/__init__.py": "", "apex/views.py": "raise RuntimeError('imported')"})
    summary = "Pyramid toolkit to add Velruse, Flash Messages, CSRF, ReCaptcha and Sessions"
    metadata = f"Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\nSummary: {summary}\n"
    write(packages, {"apex-0.9.10.dev0.dist-info/METADATA": metadata})
    assert apex.lacks(MODULE, "APEX_CUDA_EXT") == (
        f"the apex at {packages}/apex (PyPI's apex 0.9.10.dev0: {summary}) is another project of that name, not "
        "NVIDIA's: remove it, and build it from github.com/NVIDIA/apex with APEX_CUDA_EXT=1"
    )


def test_a_build_without_extensions_is_told_apart(packages: Path) -> None:
    write(packages, {"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": ""})
    assert apex.lacks(MODULE, "APEX_CUDA_EXT") == (
        f"apex at {packages}/apex was built without amp_C: build it from github.com/NVIDIA/apex with APEX_CUDA_EXT=1"
    )


def test_a_python_module_of_the_extensions_name_is_none(packages: Path) -> None:
    write(packages, {"amp_C.py": ""})
    assert (apex.lacks(MODULE, "X") or "").endswith("amp_C.py is no compiled extension, so not NVIDIA apex's")


def test_the_extension_itself_is_enough(packages: Path) -> None:
    # Found, not imported: it would want a driver.
    write(packages, {f"amp_C{importlib.machinery.EXTENSION_SUFFIXES[0]}": "not read"})
    assert apex.lacks(MODULE, "APEX_CUDA_EXT") is None
