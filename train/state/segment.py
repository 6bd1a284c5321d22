"""A shard's layout, and the host memory that holds it exactly as its file will hold it (safetensors).

Owns: where each slice lies in a shard, and memory that other processes can map too. A checkpoint is such memory that a
writer persists; checksums are computed from it. Does not own: copying tensors in (packing.py), or files (writer.py).
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...launcher.run.files import naming
from .entry import DTYPES, Slice

_ALIGN = 64  # bytes; where tensors begin in file and memory
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, <linux/mman.h>
_AT_ONCE = 64 * 1024 * 1024  # bytes made present by one call: the kernel's lock on the mappings is free in between
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Placed:
    """A slice and the bytes `at : at + size` of the shard that hold it, row-major, little-endian."""

    slice: Slice
    at: int
    size: int


def layout(slices: Sequence[Slice]) -> tuple[bytes, tuple[Placed, ...]]:
    """The shard's header (length and JSON, padded) and where each slice lies."""
    # Wide types first: the format allows no gaps, and so each tensor is aligned to its own element size.
    ordered = sorted(slices, key=lambda s: (-s.tensor.element_size(), s.key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for s in ordered:
        end = at + s.tensor.nbytes
        header[s.key] = {"dtype": DTYPES[s.tensor.dtype], "shape": list(s.box.shape), "data_offsets": [at, end]}
        at = end
    assert len(header) == len(slices) + 1, "two slices of one shard have the same key"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    head = len(text).to_bytes(8, "little") + text
    placed, at = [], len(head)
    for s in ordered:
        placed.append(Placed(s, at, s.tensor.nbytes))
        at += s.tensor.nbytes
    return head, tuple(placed)


class Memory:
    """A state segment: memory behind a descriptor (memfd), so that the node's writer maps the same pages and an agent
    keeps them when a worker ends. Kept and used again: it grows when a larger shard comes, and never shrinks."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: of a memfd, whose content is void and which is from now on this object's; None: a new one."""
        self.fd = os.memfd_create("stoker-state") if fd is None else fd
        self.capacity = 0
        self._close = weakref.finalize(self, os.close, self.fd)
        self._map: mmap.mmap | None = None
        self._tensor: torch.Tensor | None = None
        self._pinned, self._pinning = 0, threading.Lock()  # address registered with CUDA

    @property
    def data(self) -> memoryview:
        """All of it. Views are dropped before the next `reserve`."""
        assert self._map is not None
        return memoryview(self._map)

    @property
    def tensor(self) -> torch.Tensor:
        """The same as uint8 [capacity]."""
        assert self._tensor is not None
        return self._tensor

    @property
    def held(self) -> int:
        """Bytes of it that are present in memory already."""
        return os.fstat(self.fd).st_blocks * 512

    def reserve(self, size: int) -> None:
        """Hold at least `size` bytes; what was in it may be lost.

        Raises:
            OSError, MemoryError: there is not so much.
        """
        if 0 < size <= self.capacity:
            return
        self.unpin()
        self._tensor, self._map, self.capacity = None, None, 0
        size = max(size, os.fstat(self.fd).st_size, 1)
        with naming(Path("memory for a copy of the state")):
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.capacity = size

    def populate(self) -> None:
        """Make all pages present: the first copy into it is then as fast as the next. Changes no byte; on an older
        kernel, or without the memory, it does nothing."""
        held = self._tensor  # the mapping stays while this is at work
        if held is None:
            return
        for at in range(0, held.numel(), _AT_ONCE):
            size = min(_AT_ONCE, held.numel() - at)
            # Not mmap.madvise: that would keep the interpreter's lock.
            if _libc.madvise(ctypes.c_void_p(held.data_ptr() + at), ctypes.c_size_t(size), _POPULATE_WRITE):
                return

    def pin(self) -> None:
        """Register it with CUDA, so that copies from the device run beside it. Where that fails copies are slower."""
        with self._pinning, contextlib.suppress(RuntimeError):
            if self._tensor is None or self._pinned:
                return
            address = self._tensor.data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, self.capacity, 0)) == 0:
                self._pinned = address

    def unpin(self) -> None:
        """Undo `pin`; before the mapping goes."""
        if self._pinned:
            with contextlib.suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0

    def close(self) -> None:
        """Give it back. Safe twice."""
        self.unpin()
        self._tensor, self._map, self.capacity = None, None, 0
        self._close()


def populate(memories: Sequence[Memory], device: torch.device) -> threading.Thread:
    """Make all pages of these present, and pin them where `device` wants that, in a thread of its own."""

    def work() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for memory in memories:
            memory.populate()
            if device.type == "cuda":
                memory.pin()

    thread = threading.Thread(target=work, name="stoker-populate", daemon=True)
    thread.start()
    return thread
