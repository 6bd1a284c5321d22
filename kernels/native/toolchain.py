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

_HOST_VARIABLES = ("NVCC_CCBIN", "CXX")  # the first that is set counts
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")


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

    Raises NoCompilerError; ValueError for a compiler that does not run, and for a variable that names none.
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
        release = next((line for line in said if "release" in line), None)
        if release is None:
            raise ValueError(f"{nvcc}: is no nvcc: its --version names no release; what helps: {WAYS}")
        lines.insert(0, "nvcc " + release.rpartition("tools, ")[2])
    return Toolchain(host, None if emulated else nvcc, include, Path(spec.origin).parent, "; ".join(lines))


def _host(environ: Mapping[str, str]) -> Path:
    for variable in _HOST_VARIABLES:
        name = environ.get(variable)
        if name:
            found = shutil.which(name, path=environ.get("PATH"))
            if found is None and variable == "NVCC_CCBIN":  # which nvcc also takes as the directory to look in
                found = shutil.which("g++", path=name)
            return _named(variable, name, found, "the C++ compiler")
    for name in ("g++", "c++", "clang++"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return Path(found)
    raise NoCompilerError(f"no C++ compiler ($CXX, g++, c++, clang++); what helps: {WAYS}")


def _named(variable: str, value: str, found: str | None, what: str) -> Path:
    """What a variable was set to find is used or refused: another compiler in its place is no answer."""
    if found is None:
        raise ValueError(
            f"{variable}={value}: no program of that name; expected {what}, by its path or by its name on the PATH and "
            f"without arguments; correct {variable}, or unset it"
        )
    return Path(found)


def _nvccs(environ: Mapping[str, str]) -> Iterator[Path]:
    """Those that exist, best first. Raises ValueError: a variable names a toolkit, and it has none."""
    for variable in _TOOLKIT_VARIABLES:
        if environ.get(variable):
            nvcc = Path(environ[variable], "bin", "nvcc")
            if not _runs(nvcc):
                raise ValueError(
                    f"{variable}={environ[variable]}: {_absence(nvcc)}; expected the directory of a CUDA toolkit; "
                    f"correct {variable}, or unset it, and nvcc is looked for on the PATH, in /usr/local/cuda and "
                    "among this Python's packages"
                )
            yield nvcc
            return
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    places = [Path(on_path)] if on_path else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    for folder in sys.path:
        places += sorted(Path(folder or ".", "nvidia").glob("cu*/bin/nvcc"), reverse=True)
    yield from filter(_runs, places)


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _absence(nvcc: Path) -> str:
    """What is missing, by the outermost that is."""
    toolkit = nvcc.parent.parent
    if not toolkit.is_dir():
        return "there is no such directory"
    return f"{nvcc} is not executable" if nvcc.exists() else f"there is no {nvcc}"


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
    """Raises ValueError: it does not even tell its version."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        problem = f"exit code {done.returncode}: {(done.stderr.strip() or done.stdout.strip() or 'no words')}"
        if not done.returncode:
            return done.stdout
    except OSError as e:
        problem = e.strerror or str(e)
    except subprocess.TimeoutExpired:
        problem = "no answer within 60 s"
    raise ValueError(f"{' '.join(command)}: {problem.splitlines()[0]}; it does not run here; what helps: {WAYS}")
