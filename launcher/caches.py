"""Where compilers and libraries put what they have compiled: on each node, beside the unpacked code.

Owns: one pure function, merged into what a node's processes get. Below the directory of the frozen code, so that
another version of the code has caches of its own, other users cannot write there, and all go away together.
"""

from __future__ import annotations

from collections.abc import Mapping

from .protocol import INSIDE
from .run.bootstrap import CODE, ENV_DIR

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}


def cache_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to `environ`; what is set there stays, and nothing is set where the code is not node-local."""
    code = environ.get(CODE)
    if not code:
        return {}
    wanted = {name: f"{code}/cache/{folder}" for name, folder in _CACHES.items()}
    # Compiled modules lie beside their sources where these are node-local, in a staged environment or an image.
    # Elsewhere the first start on a node compiles them anew (seconds), instead of writing to shared storage.
    # Where nothing may be written (many images say so) those beside the sources have to do: with another place to look
    # for them every start would compile all of torch.
    if ENV_DIR not in environ and INSIDE not in environ and not environ.get("PYTHONDONTWRITEBYTECODE"):
        wanted["PYTHONPYCACHEPREFIX"] = f"{code}/cache/python"
    return {name: value for name, value in wanted.items() if name not in environ}
