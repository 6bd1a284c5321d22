"""The compiled object in this process: loaded once, its ops found, its refusals told as the op's own.

    load(path)                      # then, and only then, import stoker.kernels.native.rmsnorm and its like
    forward = raw("rmsnorm")        # torch.ops.stoker.rmsnorm

Does not build or look for the object.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

NAMESPACE = "stoker"
_F = TypeVar("_F", bound=Callable[..., Any])
_registrations = torch.library.Library(NAMESPACE, "IMPL")
_loaded: list[Path] = []  # at most one: what is registered with torch's dispatcher stays for the life of the process


def load(path: Path) -> None:
    """Register the object's ops; again with the same path does nothing.

    Raises OSError when it cannot be loaded, ValueError when another one is there already.
    """
    path = path.resolve()
    if _loaded and _loaded[0] != path:
        raise ValueError(f"kernels: {_loaded[0]} is loaded in this process, {path} cannot be beside it")
    if not _loaded:
        torch.ops.load_library(str(path))
        _loaded.append(path)


def loaded() -> Path | None:
    """The object that this process has."""
    return _loaded[0] if _loaded else None


def raw(name: str) -> Any:
    """The op without autograd. Calling the overload itself saves a third of the way through torch's Python."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def fake(name: str) -> Callable[[_F], _F]:
    """Decorator: what an op returns for tensors without data, which torch.compile and meta tensors ask for."""
    register: Callable[[_F], _F] = torch.library.register_fake(f"{NAMESPACE}::{name}")
    return register


def raw_without_gradient(name: str) -> Any:
    """`raw` for an op that no gradient goes through: autograd passes over it, where it would be asked each time."""
    _registrations.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return raw(name)


def refuse(op: str, error: RuntimeError, check: Callable[[], object]) -> NoReturn:
    """For a raw op's error: the ValueError of the op's own check, or what the kernel said with a way out, or the error.

    check: the reference's look at the arguments; it raises ValueError if they are wrong for any implementation.
    Wrappers look only once the raw op has refused, as looking takes longer than a call may.
    """
    check()
    text = str(error).splitlines()[0] if str(error) else ""
    if text.startswith(f"{op}: "):
        raise ValueError(f"{text}; or choose kernels.{op}=reference") from None
    if isinstance(error, NotImplementedError):
        raise ValueError(f"{op}: kernels.{op}=native has no kernel for tensors on this device: {text}") from None
    raise error
