"""Megatron's .bin/.idx token files: reading in constant time and memory, writing atomically, joining parts.

Owns the byte layout and every access to these files. It does not know what a sample is, nor which tokenizer made the tokens.
All reads are preads: a failing disk or a shrunken file is an exception here, where a memory map would be a SIGBUS.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

# Layout, little endian: HEADER, int32 lengths[sequences], int64 pointers[sequences] (byte offsets into .bin),
# int64 document_indices[documents + 1] (first sequence of each document, then the number of sequences), and for multimodal data
# int8 modes[sequences]. The .bin is the tokens and nothing else. As written by Megatron-LM's IndexedDataset, version 1.
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
_LENGTH = np.dtype("<i4")
_POINTER = np.dtype("<i8")

_PAGE = 512  # documents looked at by one read at the end of a search
_FENCES = 4096  # about how many probes of the search's upper levels are remembered
_PROBES = 16  # neighbouring sequences checked at opening, spread over the file
_CHUNK = 1 << 20  # entries (or bytes, times 8) moved at once when writing


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron gives a vocabulary: uint16 below 65,500 tokens, int32 from there."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def pread_exact(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill buffer (bytes) from offset (bytes). Raises ValueError where the file ends early, OSError where the disk fails."""
    done = os.preadv(fd, [buffer], offset)
    while done < len(buffer):  # a single read moves at most 2 GiB, and network file systems return less when they like
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if got == 0:
            raise ValueError(
                f"{path}: ends at byte {offset + done}, expected at least {offset + len(buffer)}: was it replaced or cut?"
            )
        done += got


class IndexedTokens:
    """A .bin/.idx pair opened for reading; tokens are addressed by their offset in the whole stream (64 bit).

    Opening reads the header and a fixed number of entries, whatever the number of documents. Raises FileNotFoundError for a
    missing file and ValueError, naming file, value and expectation, for a damaged one. Safe to use from several threads.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file (data prefix {str(prefix)!r} needs both .bin and .idx)")
        self._fds: list[int] = []
        try:
            self._fds = [os.open(self._bin, os.O_RDONLY | os.O_CLOEXEC), os.open(self._idx, os.O_RDONLY | os.O_CLOEXEC)]
            self._read_header()
            self._check_edges()
        except BaseException:
            self.close()
            raise
        self._fences: dict[int, int] = {}

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
                f"{self._idx}: {size} bytes, but {self.sequences} sequences and {indices} document indices take {expected}: "
                "truncated, or a header that does not belong to it"
            )
        if self.sequences < 1 or self.documents < 1:
            raise ValueError(f"{self._idx}: {self.sequences} sequences in {self.documents} documents: no data")

    def _check_edges(self) -> None:
        """Beginning, end and a few places between: a full scan would make opening depend on the number of documents."""
        size = os.fstat(self._fds[0]).st_size
        self.tokens, rest = divmod(size, self.dtype.itemsize)
        first, last = self._entries(self._indices_at, 0, 1)[0], self._entries(self._indices_at, self.documents, 1)[0]
        if first != 0 or last != self.sequences:
            raise ValueError(
                f"{self._idx}: document indices run from {first} to {last}, expected from 0 to {self.sequences} (the number of sequences)"
            )
        end = self._sequence(self.sequences - 1)[1]
        if end != size or rest:
            raise ValueError(
                f"{self._bin}: {size} bytes, but the last sequence of {self._idx} ends at byte {end}: truncated, or not a pair"
            )
        expected = 0
        for i in sorted({k * (self.sequences - 1) // _PROBES for k in range(_PROBES)}):
            begin, stop = self._sequence(i)
            if i and begin != self._sequence(i - 1)[1] or not i and begin != 0 or stop < begin or begin < expected:
                raise ValueError(
                    f"{self._idx}: sequence {i} covers bytes {begin} to {stop}, which does not follow on its neighbours: damaged, "
                    "or written with gaps (sequences must lie in order and without gaps)"
                )
            expected = stop

    def _entries(self, base: int, first: int, count: int) -> npt.NDArray[np.int64]:
        out = np.empty(count, _POINTER)
        pread_exact(self._fds[1], memoryview(out).cast("B"), base + 8 * first, self._idx)
        return out

    def _sequence(self, i: int) -> tuple[int, int]:
        """First byte and end byte, in the .bin, of sequence i."""
        length = np.empty(1, _LENGTH)
        pread_exact(self._fds[1], memoryview(length).cast("B"), HEADER.size + 4 * i, self._idx)
        begin = int(self._entries(self._pointers_at, i, 1)[0])
        return begin, begin + int(length[0]) * self.dtype.itemsize

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill buffer (bytes, a whole number of tokens) with the tokens from offset start on."""
        pread_exact(self._fds[0], buffer, start * self.dtype.itemsize, self._bin)

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens [start, start + count) in the file's dtype. Raises ValueError outside the file."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise ValueError(f"{self._bin}: tokens {start} to {start + count} asked for, it has {self.tokens}")
        out = np.empty(count, self.dtype)
        if count:
            self.read_into(memoryview(out).cast("B"), start)
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
        if indices[0] < 0 or indices[-1] > self.sequences or (np.diff(indices) < 0).any():
            raise ValueError(
                f"{self._idx}: document indices {lo} to {hi} do not ascend within 0 to {self.sequences}: damaged"
            )
        base = int(indices[0])
        pointers = np.empty(int(indices[-1]) + 1 - base, np.int64)
        stored = min(int(indices[-1]) + 1, self.sequences) - base
        pointers[:stored] = self._entries(self._pointers_at, base, stored)
        pointers[stored:] = self.tokens * self.dtype.itemsize  # empty documents at the end have no sequence to point at
        starts: npt.NDArray[np.int64] = pointers[indices - base] // self.dtype.itemsize
        if starts[0] < 0 or starts[-1] > self.tokens or (np.diff(starts) < 0).any():
            raise ValueError(
                f"{self._idx}: documents {lo} to {hi} do not start in ascending order within the .bin: damaged"
            )
        return starts

    def _fence(self, d: int, width: int) -> int:
        start = self._fences.get(d)
        if start is None:
            start = int(self._starts(d, d + 1)[0])
            if width * _FENCES > self.documents:
                self._fences[d] = start
        return start

    def documents_up_to(self, token: int) -> int:
        """How many documents start at or before token, by bisection on the file (nothing is loaded whole)."""
        lo, hi = 0, self.documents
        while hi - lo > _PAGE:
            mid = (lo + hi) // 2
            if self._fence(mid, hi - lo) <= token:
                lo = mid + 1
            else:
                hi = mid
        return lo + int(np.searchsorted(self._starts(lo, hi), token, side="right")) if hi > lo else lo

    def starts_within(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Offsets at which documents start, strictly after start and before stop, ascending int64 (empty documents repeat one)."""
        d, found = self.documents_up_to(start), []
        while d < self.documents:
            page = self._starts(d, min(d + _PAGE, self.documents))
            inside = page[: int(np.searchsorted(page, stop, side="left"))]
            found.append(inside)
            if len(inside) < len(page):
                break
            d += len(page)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        """Lengths of all sequences in order, in pieces of int32."""
        for first in range(0, self.sequences, _CHUNK):
            out = np.empty(min(_CHUNK, self.sequences - first), _LENGTH)
            pread_exact(self._fds[1], memoryview(out).cast("B"), HEADER.size + 4 * first, self._idx)
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


class IndexWriter:
    """Writes a .bin/.idx pair, streaming: memory does not grow with the data. Use it in a `with`.

    Both files are written under temporary names in the same directory and renamed when the block ends without an exception, the
    .idx last; an exception removes them and leaves an older pair as it was. Raises ValueError for tokens that do not fit dtype.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"dtype {dtype}: tokens are stored as one of {sorted(str(d) for d in CODES)}")
        self.tokens = self.sequences = self.documents = 0
        self._temporary = {
            part: Path(f"{self.prefix}.{os.getpid()}.{part}.tmp") for part in ("bin", "idx", "lengths", "ends")
        }
        self._files = {part: open(self._temporary[part], "w+b") for part in ("bin", "lengths", "ends")}

    def _put(self, tokens: npt.ArrayLike, lengths: npt.NDArray[np.int64]) -> None:
        array = np.asarray(tokens)
        if array.ndim != 1 or (lengths < 0).any() or int(lengths.sum()) != len(array):
            raise ValueError(
                f"tokens of shape {array.shape} with lengths that sum to {int(lengths.sum())}: expected a flat array of that length"
            )
        if (lengths > np.iinfo(_LENGTH).max).any():
            raise ValueError(
                f"a sequence of {int(lengths.max())} tokens: the .idx holds lengths as int32, split the document"
            )
        if len(array) and array.dtype != self.dtype:
            if array.dtype.kind not in "iu":
                raise ValueError(f"tokens of dtype {array.dtype}, expected integers")
            limits = np.iinfo(self.dtype)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise ValueError(
                    f"token ids {array.min()} to {array.max()} do not fit {self.dtype} ({limits.min} to {limits.max})"
                )
        self._files["bin"].write(array.astype(self.dtype, copy=False).tobytes())
        self._files["lengths"].write(lengths.astype(_LENGTH).tobytes())
        self.tokens += len(array)
        self.sequences += len(lengths)

    def add(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike | None = None) -> None:
        """Append one document: its tokens, flat; lengths cuts it into sequences (default: one)."""
        self._put(tokens, np.asarray([len(np.asarray(tokens))] if lengths is None else lengths, np.int64).reshape(-1))
        self.documents += 1
        self._files["ends"].write(np.asarray([self.sequences], _POINTER).tobytes())

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append many documents of one sequence each: all their tokens, flat, and their lengths."""
        sizes = np.asarray(lengths, np.int64).reshape(-1)
        first = self.sequences
        self._put(tokens, sizes)
        self.documents += len(sizes)
        self._files["ends"].write(np.arange(first + 1, self.sequences + 1, dtype=_POINTER).tobytes())

    def append(self, part: IndexedTokens) -> None:
        """Append a finished pair of the same dtype."""
        if part.dtype != self.dtype:
            raise ValueError(f"{part.prefix}: dtype {part.dtype}, expected {self.dtype}")
        for start in range(0, part.tokens, 8 * _CHUNK):
            self._files["bin"].write(part.read(start, min(8 * _CHUNK, part.tokens - start)).tobytes())
        for lengths in part.lengths():
            self._files["lengths"].write(lengths.tobytes())
        for ends in part.document_ends():
            self._files["ends"].write((ends + self.sequences).astype(_POINTER).tobytes())
        self.tokens += part.tokens
        self.sequences += part.sequences
        self.documents += part.documents

    def _spilled(self, part: str, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
        spill = self._files[part]
        spill.seek(0)
        while raw := spill.read(_CHUNK * dtype.itemsize):
            yield np.frombuffer(raw, dtype)

    def _write_idx(self) -> None:
        with open(self._temporary["idx"], "wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.sequences, self.documents + 1))
            for lengths in self._spilled("lengths", _LENGTH):
                idx.write(lengths.tobytes())
            at = 0
            for lengths in self._spilled("lengths", _LENGTH):
                ends = at + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
                idx.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype(_POINTER).tobytes())
                at = int(ends[-1])
            idx.write(np.zeros(1, _POINTER).tobytes())
            for indices in self._spilled("ends", _POINTER):
                idx.write(indices.tobytes())
            idx.flush()
            os.fsync(idx.fileno())

    def publish(self) -> None:
        """Complete both files and give them their names; `with` calls it."""
        self._write_idx()
        self._files["bin"].flush()
        os.fsync(self._files["bin"].fileno())
        # An older index must not stand beside the new tokens, not even for a moment that a crash could freeze.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._temporary["bin"], bin_path(self.prefix))
        os.replace(self._temporary["idx"], idx_path(self.prefix))
        directory = os.open(self.prefix.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def discard(self) -> None:
        """Close and remove what is still under a temporary name."""
        for file in self._files.values():
            file.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()


def merge(prefix: str | Path, parts: list[Path], dtype: npt.DTypeLike) -> tuple[int, int]:
    """Join finished pairs, in order, into one at prefix; returns (documents, tokens). The parts stay."""
    with IndexWriter(prefix, dtype) as writer:
        for part in parts:
            with IndexedTokens(part) as tokens:
                writer.append(tokens)
    return writer.documents, writer.tokens
