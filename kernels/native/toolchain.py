"""The compilers of this machine: nvcc from a toolkit or from PyPI's wheels, the host's C++ compiler, CUDA's headers.

Owns: where they are looked for and what a missing one is called. How they are used is build.py's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WAYS = (
    "`stoker kernels build` on a machine with nvcc (a login node: no GPU is needed) before the launch, "
    "`pip install 'stoker[cuda]'` beside a C++ compiler, or kernels=reference"
)


class NoCompilerError(ValueError):
    """There is no nvcc or no C++ compiler; says where it was looked for and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """What compiles. nvcc: None for the CPU alone. include: CUDA's headers. torch: the package's directory."""

    host: Path
    nvcc: Path | None
    include: Path
    torch: Path
    version: str  # of the compilers: part of an object's hash

    def compresses(self) -> bool:
        """Whether nvcc can pack machine code for size (from 12.8 on), to a third."""
        found = re.search(r"release (\d+)\.(\d+)", self.version)
        return found is not None and (int(found[1]), int(found[2])) >= (12, 8)

    def known(self) -> tuple[int, ...]:
        """Architectures that nvcc has code for, as 90."""
        assert self.nvcc is not None
        listed = _output([str(self.nvcc), "--list-gpu-code"])
        return tuple(sorted({int(n) for n in re.findall(r"^sm_(\d+)$", listed, re.MULTILINE)}))


def find_toolchain(emulated: bool = False, environ: Mapping[str, str] = os.environ) -> Toolchain:
    """The compilers for GPUs, or (emulated) those for the CPU, which still need CUDA's headers.

    Raises NoCompilerError.
    """
    host = _host(environ)
    nvcc = next(_nvccs(environ), None)
    if nvcc is None and not emulated:
        raise NoCompilerError(
            "no nvcc in $CUDA_HOME/bin, on the PATH, in /usr/local/cuda/bin, or among this Python's packages "
            f"(nvidia-cuda-nvcc); what helps: {WAYS}"
        )
    include = _headers(nvcc)
    if include is None:
        raise NoCompilerError(
            f"no cuda_runtime.h beside {nvcc or 'any nvcc'}: the toolkit lacks its headers; what helps: {WAYS}"
        )
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    lines = [_output([str(host), "--version"]).partition("\n")[0]]
    if not emulated:
        said = _output([str(nvcc), "--version"]).strip().splitlines()
        lines.insert(0, "nvcc " + next((line for line in said if "release" in line), said[-1]).rpartition("tools, ")[2])
    return Toolchain(host, None if emulated else nvcc, include, Path(spec.origin).parent, "; ".join(lines))


def _host(environ: Mapping[str, str]) -> Path:
    names = [environ.get("NVCC_CCBIN"), environ.get("CXX"), "g++", "c++", "clang++"]
    for name in filter(None, names):
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return Path(found)
    raise NoCompilerError(f"no C++ compiler ($CXX, g++, c++, clang++); what helps: {WAYS}")


def _nvccs(environ: Mapping[str, str]) -> Iterator[Path]:
    """Those that exist, best first."""
    places = [Path(environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    places += [Path(on_path)] if on_path else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    for folder in sys.path:
        places += sorted(Path(folder or ".", "nvidia").glob("cu*/bin/nvcc"), reverse=True)
    yield from (path for path in places if os.access(path, os.X_OK) and path.is_file())


def _headers(nvcc: Path | None) -> Path | None:
    """The directory of cuda_runtime.h: the toolkit's, also where nvcc is a script or link elsewhere, or a wheel's."""
    roots = [nvcc.resolve().parent.parent] if nvcc is not None else []
    roots.append(Path("/usr/local/cuda"))
    for folder in sys.path:
        roots += [p for p in Path(folder or ".", "nvidia").glob("cu*") if p.is_dir()]
    for root in roots:
        for include in (root / "include", *root.glob("targets/*/include")):
            if (include / "cuda_runtime.h").is_file():
                return include
    return None


def _output(command: list[str]) -> str:
    """Raises NoCompilerError: it does not even tell its version."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        raise NoCompilerError(f"{command[0]} does not run ({e}); what helps: {WAYS}") from e
    return done.stdout
