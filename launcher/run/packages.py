"""Which packages an interpreter has: recorded when a run is frozen, compared when it starts or starts again.

Owns: the list and its fingerprint. The code of run and package is frozen (bootstrap.py); what is installed is not, so
a change is reported, never hidden.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from .files import read_json
from .layout import RunDir

# A distribution's record, by its specified name: `torch-2.13.0+cpu.dist-info`. Its METADATA says the same and takes a
# hundred times as long to read for all of them.
_RECORD = re.compile(r"([^-]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def installed() -> dict[str, str]:
    """Name -> version of every installed distribution but our own, sorted by name; the first on the path counts.

    Source: PyPA specification "Recording installed projects".
    """
    found: dict[str, str] = {}
    for name, version in _records():
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    found.pop("stoker", None)
    return dict(sorted(found.items()))


def _records() -> Iterator[tuple[str, str]]:
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or a directory that is gone
            continue
        yield from ((m[1], m[2]) for m in map(_RECORD.fullmatch, names) if m)


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
