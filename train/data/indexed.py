"""Megatron's .bin/.idx token files: the byte layout, and reading in constant time and memory.

Owns every read of these files (writing: indexed_writer.py). It does not know what a sample is, nor who made the tokens.
All reads are preads: a failing disk or a shrunken file is an exception here, where a memory map would be a SIGBUS.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Layout, little endian: HEADER, int32 lengths[sequences], int64 pointers[sequences] (byte offsets into .bin),
# int64 document_indices[documents + 1] (first sequence of each document, then the number of sequences), and for
# multimodal data int8 modes[sequences]. The .bin is the tokens and nothing else. As written by Megatron-LM's
# IndexedDataset, version 1.
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LENGTH = np.dtype("<i4")
POINTER = np.dtype("<i8")

_PAGE = 512  # documents looked at by one read of a search
_PROBES = 16  # neighbouring sequences checked at opening, spread over the file
_CHUNK = 1 << 20  # entries read at once when everything is asked for


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron gives a vocabulary: uint16 below 65,500 tokens, int32 from there."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The memory of a contiguous array, as bytes to read into."""
    return array.reshape(-1).view(np.uint8).data


def pread_exact(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill buffer (bytes) from offset (bytes). Raises ValueError if the file ends early, OSError if the disk fails."""
    done = os.preadv(fd, [buffer], offset)
    while done < len(buffer):  # a single read moves at most 2 GiB, and network file systems return less when they like
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if got == 0:
            raise ValueError(
                f"{path}: {os.fstat(fd).st_size} bytes, expected at least {offset + len(buffer)}: "
                "it was cut or replaced since it was opened"
            )
        done += got


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as e:
        raise ValueError(f"{path}: cannot be read ({e.strerror}); give the user of the run the right to") from e


class IndexedTokens:
    """A .bin/.idx pair opened for reading; tokens are addressed by their offset in the whole stream (64 bit).

    Opening reads the header and a fixed number of entries, whatever the number of documents. Raises FileNotFoundError
    for a missing file and ValueError, naming file, value and expectation, for a damaged one. Threads may share it.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file (data prefix {str(prefix)!r} needs both .bin and .idx)")
        self._fds: list[int] = []
        try:
            self._fds = [_opened(self._bin), _opened(self._idx)]
            self._read_header()
            self._check_edges()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._fds[1]).st_size
        if size < HEADER.size:
            raise ValueError(f"{self._idx}: {size} bytes, shorter than the {HEADER.size}-byte header: truncated")
        raw = bytearray(HEADER.size)
        pread_exact(self._fds[1], memoryview(raw), 0, self._idx)
        magic, version, code, self.sequences, indices = HEADER.unpack(raw)
        if magic != MAGIC:
            raise ValueError(f"{self._idx}: starts with {magic!r}, expected {MAGIC!r}: not a Megatron index")
        if version != VERSION:
            raise ValueError(f"{self._idx}: version {version}, only {VERSION} is known")
        if code not in DTYPES:
            raise ValueError(f"{self._idx}: dtype code {code}, expected an integer type, one of {sorted(DTYPES)}")
        self.dtype = DTYPES[code]
        self.documents = indices - 1
        self._pointers_at = HEADER.size + 4 * self.sequences
        self._indices_at = self._pointers_at + 8 * self.sequences
        expected = self._indices_at + 8 * indices
        if size not in (expected, expected + self.sequences):
            raise ValueError(
                f"{self._idx}: {size} bytes, but {self.sequences} sequences and {indices} document indices "
                f"take {expected}: truncated, or the header is damaged"
            )
        if self.sequences < 1 or self.documents < 1:
            raise ValueError(f"{self._idx}: {self.sequences} sequences in {self.documents} documents: no data")

    def _check_edges(self) -> None:
        """Beginning, end and a few places between: a full scan would make opening depend on the number of documents."""
        size = os.fstat(self._fds[0]).st_size
        self.tokens = size // self.dtype.itemsize
        first, last = (int(self._entries(self._indices_at, d, 1)[0]) for d in (0, self.documents))
        if first != 0 or last != self.sequences:
            raise ValueError(
                f"{self._idx}: document indices run from {first} to {last}, expected from 0 to {self.sequences} "
                "(the number of sequences): damaged"
            )
        end = self._sequence(self.sequences - 1)[1]
        if end != size:
            raise ValueError(
                f"{self._bin}: {size} bytes, but the last sequence of {self._idx} ends at byte {end}: "
                "truncated, or not written together"
            )
        if not self.tokens:
            raise ValueError(f"{self._bin}: empty, all {self.sequences} sequences have length 0: no data")
        for i in sorted({k * (self.sequences - 1) // _PROBES for k in range(_PROBES)}):
            begin, previous_end = self._sequence(i)[0], self._sequence(i - 1)[1] if i else 0
            if begin != previous_end:
                raise ValueError(
                    f"{self._idx}: sequence {i} starts at byte {begin}, expected {previous_end}, the end of the one "
                    "before: damaged, or not a plain token stream"
                )

    def _entries(self, base: int, first: int, count: int) -> npt.NDArray[np.int64]:
        out = np.empty(count, POINTER)
        pread_exact(self._fds[1], bytes_of(out), base + 8 * first, self._idx)
        return out

    def _sequence(self, i: int) -> tuple[int, int]:
        """First byte and end byte, in the .bin, of sequence i."""
        length = np.empty(1, LENGTH)
        pread_exact(self._fds[1], bytes_of(length), HEADER.size + 4 * i, self._idx)
        begin = int(self._entries(self._pointers_at, i, 1)[0])
        return begin, begin + int(length[0]) * self.dtype.itemsize

    def read_rows(self, rows: npt.NDArray[Any], starts: Sequence[int]) -> None:
        """Fill each row of rows [n, m], contiguous, of the file's dtype, with the m tokens from starts[row] on."""
        buffer, width, size, fd = bytes_of(rows), rows.strides[0], self.dtype.itemsize, self._fds[0]
        for row, start in enumerate(starts):
            view = buffer[row * width : (row + 1) * width]
            if os.preadv(fd, [view], start * size) != width:
                pread_exact(fd, view, start * size, self._bin)

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens [start, start + count) in the file's dtype. Raises ValueError outside the file."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise ValueError(f"{self._bin}: tokens {start} to {start + count} asked for, it has {self.tokens}")
        out = np.empty(count, self.dtype)
        if count:
            pread_exact(self._fds[0], bytes_of(out), start * self.dtype.itemsize, self._bin)
        return out

    def document(self, d: int) -> npt.NDArray[Any]:
        """All tokens of document d, in the file's dtype."""
        if not 0 <= d < self.documents:
            raise ValueError(f"{self._idx}: document {d} asked for, it has {self.documents}")
        bounds = self._starts(d, min(d + 2, self.documents))
        stop = int(bounds[1]) if len(bounds) > 1 else self.tokens
        return self.read(int(bounds[0]), stop - int(bounds[0]))

    def _starts(self, lo: int, hi: int) -> npt.NDArray[np.int64]:
        """Token offsets at which documents [lo, hi) start, int64 [hi - lo]."""
        indices = self._entries(self._indices_at, lo, hi - lo)
        if indices[0] < 0 or indices[-1] > self.sequences or (indices[1:] < indices[:-1]).any():
            raise ValueError(
                f"{self._idx}: document indices {lo} to {hi} do not ascend within 0 to {self.sequences}: damaged"
            )
        base = int(indices[0])
        pointers = np.empty(int(indices[-1]) + 1 - base, np.int64)
        stored = min(int(indices[-1]) + 1, self.sequences) - base
        pointers[:stored] = self._entries(self._pointers_at, base, stored)
        pointers[stored:] = self.tokens * self.dtype.itemsize  # empty documents at the end have no sequence to point at
        starts: npt.NDArray[np.int64] = pointers[indices - base] // self.dtype.itemsize
        if starts[0] < 0 or starts[-1] > self.tokens or (starts[1:] < starts[:-1]).any():
            raise ValueError(
                f"{self._idx}: documents {lo} to {hi} do not start in ascending order within the .bin: damaged"
            )
        return starts

    def _page(self, token: int) -> tuple[int, npt.NDArray[np.int64]]:
        """First document and starts of a few documents, of which all before start by token and all after later.

        May be empty, if all start by token. Found by interpolation, as documents of like length lie evenly, with
        a bisection after each step that was wrong, as they may not; nothing is loaded whole or kept.
        """
        lo, hi, begin, end = 0, self.documents, 0, self.tokens
        is_guess = True
        while hi - lo > _PAGE:
            share = (token - begin) / max(1, end - begin) if is_guess else 0.5
            first = min(max(lo + int(share * (hi - lo)) - _PAGE // 2, lo), hi - _PAGE)
            page = self._starts(first, first + _PAGE)
            if page[0] > token:
                hi, end = first, int(page[0])
            elif page[-1] <= token:
                lo, begin = first + _PAGE, int(page[-1])
            else:
                return first, page
            is_guess = not is_guess
        return lo, self._starts(lo, hi) if hi > lo else np.empty(0, np.int64)

    def last_start_up_to(self, token: int) -> int:
        """Offset of the last document start at or before token (0 <= token)."""
        lo, page = self._page(token)
        d = lo + int(np.searchsorted(page, token, side="right")) - 1
        return int(self._starts(d, d + 1)[0])

    def starts_within(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Offsets where documents start, after start and before stop, ascending int64 (empty documents repeat one)."""
        lo, page = self._page(start)
        first = int(np.searchsorted(page, start, side="right"))
        found = [page[first : first + int(np.searchsorted(page[first:], stop, side="left"))]]
        lo += len(page)
        # Up to the page's last document lies before stop: what follows the page may do so, too.
        while lo < self.documents and (not len(page) or page[-1] < stop):
            page = self._starts(lo, min(lo + _PAGE, self.documents))
            found.append(page[: int(np.searchsorted(page, stop, side="left"))])
            lo += len(page)
        return np.concatenate(found) if len(found) > 1 else found[0]

    def lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        """Lengths of all sequences in order, in pieces of int32."""
        for first in range(0, self.sequences, _CHUNK):
            out = np.empty(min(_CHUNK, self.sequences - first), LENGTH)
            pread_exact(self._fds[1], bytes_of(out), HEADER.size + 4 * first, self._idx)
            yield out

    def document_ends(self) -> Iterator[npt.NDArray[np.int64]]:
        """Per document the number of sequences up to its end, in pieces of int64."""
        for first in range(0, self.documents, _CHUNK):
            yield self._entries(self._indices_at, first + 1, min(_CHUNK, self.documents - first))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> IndexedTokens:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
