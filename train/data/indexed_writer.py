"""Writing Megatron's .bin/.idx token files: streaming, atomic, and joined from parts.

Owns how a pair comes into being on disk. The byte layout is indexed.py's; what the tokens mean is the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .indexed import CODES, HEADER, LENGTH, MAGIC, POINTER, VERSION, IndexedTokens, bin_path, idx_path

_CHUNK = 1 << 20  # entries moved at once
_SPILLS = ("bin", "lengths", "ends")


def index_bytes(
    dtype: np.dtype[Any],
    sequences: int,
    documents: int,
    lengths: Callable[[], Iterator[npt.NDArray[np.int32]]],
    ends: Callable[[], Iterator[npt.NDArray[np.int64]]],
) -> Iterator[bytes]:
    """An .idx in pieces, from pieces of the sequences' lengths (tokens) and the documents' ends (sequences)."""
    yield HEADER.pack(MAGIC, VERSION, CODES[dtype], sequences, documents + 1)
    for piece in lengths():
        yield piece.astype(LENGTH).tobytes()
    begin = 0
    for piece in lengths():
        stops = begin + np.cumsum(piece, dtype=np.int64) * dtype.itemsize
        yield np.concatenate([[begin], stops[:-1]]).astype(POINTER).tobytes()
        begin = int(stops[-1])
    yield np.zeros(1, POINTER).tobytes()
    for indices in ends():
        yield indices.astype(POINTER).tobytes()


class IndexWriter:
    """Writes a .bin/.idx pair, streaming: memory does not grow with the data. Use it in a `with`.

    Both files are written under temporary names in the same directory and renamed when the block ends without an
    exception, the .idx last; an exception removes them and leaves an older pair as it was.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"dtype {dtype}: tokens are stored as one of {sorted(str(d) for d in CODES)}")
        self.tokens = self.sequences = self.documents = 0
        self._temporary = {part: Path(f"{self.prefix}.{os.getpid()}.{part}.tmp") for part in (*_SPILLS, "idx")}
        self._files = {part: open(self._temporary[part], "w+b") for part in _SPILLS}  # noqa: SIM115 (closed in discard)

    def _checked(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Tokens in the file's dtype; ValueError for what the format or the dtype cannot hold."""
        if tokens.ndim != 1 or (lengths < 0).any() or int(lengths.sum()) != len(tokens):
            raise ValueError(
                f"tokens of shape {tokens.shape} with lengths that sum to {int(lengths.sum())}: "
                "expected a flat array and lengths that add up to it"
            )
        if len(lengths) and int(lengths.max()) > np.iinfo(LENGTH).max:
            raise ValueError(
                f"a sequence of {int(lengths.max())} tokens: the .idx holds int32 lengths, split the document"
            )
        if len(tokens) and tokens.dtype != self.dtype:
            if tokens.dtype.kind not in "iu":
                raise ValueError(f"tokens of dtype {tokens.dtype}, expected integers")
            limits, low, high = np.iinfo(self.dtype), int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                raise ValueError(f"token ids {low} to {high} do not fit {self.dtype} ({limits.min} to {limits.max})")
        return tokens.astype(self.dtype, copy=False)

    def _put(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        self._files["bin"].write(self._checked(tokens, lengths).tobytes())
        self._files["lengths"].write(lengths.astype(LENGTH).tobytes())
        self.tokens += len(tokens)
        self.sequences += len(lengths)

    def add(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike | None = None) -> None:
        """Append one document: its tokens, flat; lengths cuts it into sequences (default: one).

        Raises ValueError for tokens that are not integers or do not fit the dtype, and lengths that do not add up.
        """
        array = np.asarray(tokens)
        self._put(array, np.asarray([len(array)] if lengths is None else lengths, np.int64))
        self.documents += 1
        self._files["ends"].write(np.asarray([self.sequences], POINTER).tobytes())

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append many documents of one sequence each: all their tokens, flat, and their lengths."""
        sizes, first = np.asarray(lengths, np.int64), self.sequences
        self._put(np.asarray(tokens), sizes)
        self.documents += len(sizes)
        self._files["ends"].write(np.arange(first + 1, self.sequences + 1, dtype=POINTER).tobytes())

    def append(self, part: IndexedTokens) -> None:
        """Append a finished pair of the same dtype."""
        if part.dtype != self.dtype:
            raise ValueError(f"{part.prefix}: dtype {part.dtype}, expected {self.dtype}")
        for start in range(0, part.tokens, 8 * _CHUNK):
            self._files["bin"].write(part.read(start, min(8 * _CHUNK, part.tokens - start)).tobytes())
        for lengths in part.lengths():
            self._files["lengths"].write(lengths.tobytes())
        for ends in part.document_ends():
            self._files["ends"].write((ends + self.sequences).astype(POINTER).tobytes())
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
            idx.writelines(
                index_bytes(
                    self.dtype,
                    self.sequences,
                    self.documents,
                    lambda: self._spilled("lengths", LENGTH),
                    lambda: self._spilled("ends", POINTER),
                )
            )
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


def merge(prefix: str | Path, parts: Sequence[Path], dtype: npt.DTypeLike) -> tuple[int, int]:
    """Join finished pairs, in order, into one at prefix; returns (documents, tokens). The parts stay."""
    with IndexWriter(prefix, dtype) as writer:
        for part in parts:
            with IndexedTokens(part) as tokens:
                writer.append(tokens)
    return writer.documents, writer.tokens
