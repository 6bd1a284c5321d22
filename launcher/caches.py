"""Where compilers and libraries put what they have compiled: on each node, beside the unpacked code.

Owns: which variables, merged into what a node's processes get. Below the directory of the frozen code, so that
another version of the code has caches of its own, other users cannot write there, and all go away together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from .protocol import INSIDE
from .run.bootstrap import CODE, ENV_DIR

_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "STOKER_KERNELS_CACHE": "kernels",
}


def is_compiled(package: str, path: Iterable[str]) -> bool:
    """Whether the compiled modules of a package lie beside its sources, for the first place of `path` that has it."""
    for folder in map(Path, path):
        if (folder / package / "__init__.py").exists():
            return (folder / package / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc").exists()
    return False


def cache_variables(environ: Mapping[str, str], has_compiled: bool) -> dict[str, str]:
    """Variables to add to `environ`; what is set there stays, and nothing is set where the code is not node-local.

    `has_compiled`: whether the large packages' compiled modules lie beside their sources.
    """
    code = environ.get(CODE)
    if not code:
        return {}
    wanted = {name: f"{code}/cache/{folder}" for name, folder in _CACHES.items()}
    # With another place to look for compiled modules, those beside the sources count for nothing: the first start on a
    # node would compile all of torch, and every start where nothing may be written (many images say so). It is for
    # environments on shared storage that nobody has compiled: nodes do not all write there.
    is_local = ENV_DIR in environ or INSIDE in environ
    if not (has_compiled or is_local or environ.get("PYTHONDONTWRITEBYTECODE")):
        wanted["PYTHONPYCACHEPREFIX"] = f"{code}/cache/python"
    return {name: value for name, value in wanted.items() if name not in environ}
