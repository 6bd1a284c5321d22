"""How long each implementation took on a device, measured by `stoker bench kernels`: reading, writing, looking up.

One JSON file per device in the kernels' cache: {"device": NAME, "torch": VERSION, "library": HASH, "results":
{OP: {IMPLEMENTATION: microseconds}}}. `inductor` stands for the reference under torch.compile. Measuring is not here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .native.cache import places, user_cache

COMPILED = "inductor"


@dataclass(frozen=True)
class Measured:
    """device: its name. torch: version. library: name of the object (native/cache.Built.name), empty without one.
    results: op -> implementation -> microseconds."""

    device: str
    torch: str
    library: str
    results: Mapping[str, Mapping[str, float]]

    def of(self, op: str) -> dict[str, float]:
        return dict(self.results.get(op, {}))


def write(measured: Measured, folder: Path | None = None) -> Path:
    """In place of earlier results for the same ops; all, where device, torch or object are others. folder: default: the
    user's cache. Returns the file."""
    folder = user_cache() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    before = read(measured.device, measured.library, [folder]) if measured.torch == torch.__version__ else None
    results = {**(before.results if before else {}), **measured.results}
    text = json.dumps({**vars(measured), "results": results}, indent=1) + "\n"
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=folder)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, folder / file_name(measured.device))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return folder / file_name(measured.device)


def read(device: str, library: str, folders: Iterable[Path] | None = None) -> Measured | None:
    """Results for a device by name, with this torch and the object `library`; None if there are none that still hold.

    folders: default: what was frozen with the run, then the caches.
    """
    for folder in places() if folders is None else folders:
        try:
            found = _parse(json.loads((folder / file_name(device)).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        if (found.device, found.torch, found.library) == (device, torch.__version__, library):
            return found
    return None


def file_name(device: str) -> str:
    """`measured-nvidia-h200.json`."""
    return f"measured-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-') or 'device'}.json"


def _parse(plain: Any) -> Measured:
    results = {
        str(op): {str(name): float(us) for name, us in times.items() if math.isfinite(us) and us > 0}
        for op, times in plain["results"].items()
    }
    return Measured(plain["device"], plain["torch"], plain["library"], results)
