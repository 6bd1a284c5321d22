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

    Storages that exist already are counted when given to `watch`. resizes: storages that shrink or grow in place (as
    FSDP2's do) are looked at after every operation; otherwise only `recount` sees it.
    """

    def __init__(self, resizes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._resizes = resizes
        self._known: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # to its bytes

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these, each storage once."""
        for tensor in tensors:
            self._count(tensor)

    def reset_peak(self) -> None:
        """Begin a new highest value."""
        self.peak = self.now

    def recount(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Storages that are counted may have another size now."""
        for storage in storages:
            size = self._known.get(storage)
            if size is not None and size[0] != storage.nbytes():
                self._add(storage.nbytes() - size[0])
                size[0] = storage.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._resizes:
            self.recount(list(self._known))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = self._known[storage] = [storage.nbytes()]
        weakref.finalize(storage, self._gone, size)
        self._add(size[0])

    def _gone(self, size: list[int]) -> None:
        self.now -= size[0]

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each counted once."""
    return sum({id(s): s.nbytes() for s in [t.untyped_storage() for t in tensors]}.values())
