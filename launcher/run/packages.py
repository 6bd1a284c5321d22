"""Which packages an interpreter has: recorded when a run is frozen, compared when it starts or starts again.

Owns: the list and its fingerprint. The code of run and package is frozen (bootstrap.py); what is installed is not, so
a change is reported, never hidden.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from typing import Any

from .files import read_json
from .layout import RunDir


def installed() -> dict[str, str]:
    """Name -> version of every installed distribution but our own, sorted by name."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name.lower() != "stoker":
            found.setdefault(name.lower().replace("_", "-"), distribution.version)
    return dict(sorted(found.items()))


def fingerprint(packages: dict[str, str]) -> str:
    """SHA-256 over the sorted `name==version` lines."""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def changes(run: RunDir) -> list[str]:
    """What differs between this interpreter and the one the run was frozen for, e.g. `torch 2.11.0 -> 2.13.0`.

    Empty where nothing differs, or where the run uses another interpreter than the one that froze it.
    """
    frozen: Any = read_json(run.env).get("packages")
    if not isinstance(frozen, dict):
        return []
    now = installed()
    if fingerprint(now) == read_json(run.run).get("package_fingerprint"):
        return []
    names = sorted(frozen.keys() | now.keys())
    pairs = [(n, frozen.get(n, "none"), now.get(n, "none")) for n in names]
    return [f"{name} {before} -> {after}" for name, before, after in pairs if before != after]
