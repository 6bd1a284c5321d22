"""Bytes of live tensors, now and at their highest: the one measure for what a plan says and what a run does.

Owns: watching storages come and go. Works on every device, meta too, where nothing is allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages from when an operation first returns them to when nobody refers to them any more.

    Storages that exist already are counted when given to `watch`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these, each storage once."""
        for tensor in tensors:
            self._count(tensor)

    def reset_peak(self) -> None:
        """Begin a new highest value."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        weakref.finalize(storage, self._gone, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, size: int) -> None:
        self.now -= size
