"""The one object of native kernels in a process. Building and finding it: build.py, cache.py."""

from __future__ import annotations

from pathlib import Path

import torch

_loaded: list[Path] = []


def load(path: Path) -> None:
    """Load an object and with it register its ops. Raises OSError, RuntimeError."""
    torch.ops.load_library(str(path))
    _loaded.append(path)


def loaded() -> Path | None:
    """The object that is loaded, None before."""
    return _loaded[0] if _loaded else None
