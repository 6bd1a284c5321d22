"""Ops by NVIDIA apex's CUDA extensions, one file per extension module; whether they are there is told here.

An extension counts when the module itself is found: `import apex` proves nothing, since a Python-only build lacks them
and PyPI's `apex` is another project. None of this has run on hardware yet.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

SOURCE = "github.com/NVIDIA/apex"


def lacks(module: str, switch: str) -> str | None:
    """Why the extension `module` cannot be used, as a clause; None if it is there.

    switch: the variable that has apex's build make it.
    """
    spec = importlib.util.find_spec(module)
    if spec is not None and isinstance(spec.loader, ExtensionFileLoader):
        return None
    if spec is not None:
        return f"{module} at {spec.origin} is no compiled extension, so not NVIDIA apex's"
    found = importlib.util.find_spec("apex")
    build = f"build it from {SOURCE} with {switch}=1"
    if found is None:
        return f"needs {module} of NVIDIA apex, which PyPI does not have: {build}"
    where = [Path(folder) for folder in found.submodule_search_locations or ()]
    if any((folder / "multi_tensor_apply").is_dir() for folder in where):
        return f"apex at {where[0]} was built without {module}: {build}"
    place = where[0] if where else found.origin
    return f"the apex at {place}{_version()} is another project of that name, not NVIDIA's: remove it, and {build}"


def _version() -> str:
    try:
        found = importlib.metadata.metadata("apex")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f" (PyPI's apex {found['Version']}: {found['Summary']})"
