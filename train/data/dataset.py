"""From sample numbers to batches of tensors: windows of one or several token files.

Owns what a batch is, reading windows, and document boundaries within them. Which samples a rank takes is loader.py's
concern, which window a sample is sampling.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .indexed import IndexedTokens
from .sampling import Blend, Int64s, WindowOrder, window_count

IGNORE = -100  # target that counts in no loss, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class RowPart:
    """Which tokens of each row a batch holds, where context parallelism cuts rows; and what it knows of the others."""

    indices: torch.Tensor  # [S] int64: places within the row, ascending
    row_length: int
    doc_ids: torch.Tensor | None  # [n, row_length], of the whole rows
    starts: tuple[tuple[int, ...], ...] | None  # per row, where documents begin: 0 and others; None: not told apart


@dataclass(frozen=True)
class Batch:
    """One micro-batch of n rows of S tokens; all tensors int64, contiguous, not to be written (some are shared)."""

    tokens: torch.Tensor  # [n, S]
    targets: torch.Tensor  # [n, S]: the next token; IGNORE in the rows that only fill up the batch
    positions: torch.Tensor  # [n, S]: 0 .. S-1, or starting over at each document
    doc_ids: torch.Tensor | None  # [n, S]: number of the document within its row; None: documents are not told apart
    samples: torch.Tensor  # [n]: sample number in the whole run, -1 in the rows that only fill up
    part: RowPart | None = None  # None: whole rows

    @property
    def token_numbers(self) -> torch.Tensor:
        """[n, S]: the same token has the same number however batches are split over ranks and micro-steps."""
        if self.part is not None:
            return self.samples.unsqueeze(1) * self.part.row_length + self.part.indices
        length = self.tokens.shape[1]
        return self.samples.unsqueeze(1) * length + torch.arange(length, device=self.tokens.device)

    def to(self, device: torch.device | str) -> Batch:
        """On another device; the copy is asynchronous from pinned memory."""
        return self._each(lambda t: t.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """In page-locked memory; needs CUDA."""
        return self._each(lambda t: t.pin_memory())

    def split(self, parts: int) -> list[Batch]:
        """Equal parts along the rows, without a copy."""
        rows = len(self.samples) // parts
        assert rows * parts == len(self.samples), f"{len(self.samples)} rows in {parts} parts"
        return [self._rows(slice(i * rows, (i + 1) * rows)) for i in range(parts)]

    def _rows(self, rows: slice) -> Batch:
        part = self.part
        if part is not None:
            doc_ids = None if part.doc_ids is None else part.doc_ids[rows]
            part = replace(part, doc_ids=doc_ids, starts=None if part.starts is None else part.starts[rows])
        doc_ids = None if self.doc_ids is None else self.doc_ids[rows]
        tokens, targets, positions, samples = (
            t[rows] for t in (self.tokens, self.targets, self.positions, self.samples)
        )
        return Batch(tokens, targets, positions, doc_ids, samples, part)

    def _each(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        part = self.part
        if part is not None:
            whole = None if part.doc_ids is None else move(part.doc_ids)
            part = replace(part, indices=move(part.indices), doc_ids=whole)
        doc_ids = None if self.doc_ids is None else move(self.doc_ids)
        return Batch(move(self.tokens), move(self.targets), move(self.positions), doc_ids, move(self.samples), part)


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a file, read as windows of sequence_length + 1."""

    file: IndexedTokens
    start: int
    stop: int
    sequence_length: int

    @property
    def windows(self) -> int:
        return window_count(self.stop - self.start, self.sequence_length)

    def first_tokens(self, windows: Int64s) -> Int64s:
        """Offset in the file at which each window begins."""
        return self.start + windows * self.sequence_length

    def read(self, windows: Int64s) -> npt.NDArray[Any]:
        """Rows [n, sequence_length + 1] in the file's dtype; neighbours that follow one another are read at once."""
        length, firsts = self.sequence_length, self.first_tokens(windows).tolist()
        rows = np.empty((len(windows), length + 1), self.file.dtype)
        follows = np.diff(windows) == 1
        if not follows.any():
            self.file.read_rows(rows, firsts)
            return rows
        breaks = (np.flatnonzero(~follows) + 1).tolist()
        for begin, end in zip([0, *breaks], [*breaks, len(firsts)], strict=True):
            flat = self.file.read(firsts[begin], (end - begin) * length + 1)
            rows[begin:end] = np.lib.stride_tricks.sliding_window_view(flat, length + 1)[::length]
        return rows


@dataclass(frozen=True)
class Source:
    """One data set of a mixture: its tokens and the order they are visited in (None: as they lie, once)."""

    tokens: TokenRange
    order: WindowOrder | None


@dataclass(frozen=True)
class TokenDataset:
    """Batches by sample number. Without a blend the sources follow one another (one source: the plain case).

    vocab_size: token ids outside it raise ValueError, here and not as an illegal access on a device; None: unchecked.
    cut: what each batch is passed through, where ranks share the tokens of a row.
    """

    sources: Sequence[Source]
    blend: Blend | None = None
    vocab_size: int | None = None
    mask_documents: bool = False
    reset_positions: bool = False
    cut: Callable[[Batch], Batch] | None = None
    _positions: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def sequence_length(self) -> int:
        return self.sources[0].tokens.sequence_length

    @property
    def windows(self) -> int:
        return sum(source.tokens.windows for source in self.sources)

    def batch(self, samples: Int64s) -> Batch:
        """Samples int64 [n], each a sample number or -1 for a row that only fills up (token 0, no target)."""
        n, length = len(samples), self.sequence_length
        tokens, targets = np.empty((n, length), np.int64), np.empty((n, length), np.int64)
        starts = np.zeros((n, length), np.bool_) if self.mask_documents or self.reset_positions else None
        fillers = samples < 0
        tokens[fillers], targets[fillers] = 0, IGNORE
        for rows, part, windows in self._locate(samples, np.flatnonzero(~fillers)):
            raw = part.read(windows)
            self._check_vocabulary(raw, part, windows)
            tokens[rows], targets[rows] = raw[:, :-1], raw[:, 1:]
            if starts is not None:
                starts[rows] = self._document_starts(part, windows)
        batch = Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            self._position_tensor(n, starts),
            torch.from_numpy(np.cumsum(starts, axis=1)) if self.mask_documents and starts is not None else None,
            torch.from_numpy(samples),
        )
        return batch if self.cut is None else self.cut(batch)

    def _locate(self, samples: Int64s, rows: Int64s) -> list[tuple[Any, TokenRange, Int64s]]:
        """Where the samples in these rows are read from: per source (index of its rows, tokens, windows int64)."""
        if not len(rows):
            return []
        if len(rows) < len(samples):
            samples = samples[rows]
        if len(self.sources) == 1:  # rows as a slice where that does: much cheaper to assign to
            index = rows if len(rows) < rows[-1] + 1 else slice(0, len(rows))
            return [(index, self.sources[0].tokens, _ordered(self.sources[0], samples))]
        if self.blend is not None:
            source, local = self.blend.take(samples)
        else:
            ends = np.cumsum([s.tokens.windows for s in self.sources])
            source = np.searchsorted(ends, samples, side="right")
            local = samples - np.concatenate([[0], ends])[source]
        found = []
        for j in np.unique(source).tolist():
            chosen = source == j
            found.append((rows[chosen], self.sources[j].tokens, _ordered(self.sources[j], local[chosen])))
        return found

    def _check_vocabulary(self, raw: npt.NDArray[Any], part: TokenRange, windows: Int64s) -> None:
        if self.vocab_size is None or (raw.max() < self.vocab_size and raw.min() >= 0):
            return
        row, column = np.argwhere((raw >= self.vocab_size) | (raw < 0))[0].tolist()
        at = int(part.first_tokens(windows)[row]) + column
        raise ValueError(
            f"{part.file.prefix}.bin: token {at} is {raw[row, column]}, outside model.vocab_size = {self.vocab_size}: "
            "the data was made with another tokenizer, or is damaged"
        )

    def _document_starts(self, part: TokenRange, windows: Int64s) -> npt.NDArray[np.bool_]:
        """True where a document begins, [n, S]; never in the first column, where the row's first one begins anyway."""
        marks = np.zeros((len(windows), self.sequence_length), np.bool_)
        for row, first in enumerate(part.first_tokens(windows).tolist()):
            marks[row, part.file.starts_within(first, first + self.sequence_length) - first] = True
        return marks

    def _position_tensor(self, rows: int, starts: npt.NDArray[np.bool_] | None) -> torch.Tensor:
        if self.reset_positions and starts is not None:
            columns = np.arange(self.sequence_length)
            return torch.from_numpy(columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1))
        if rows not in self._positions:
            self._positions[rows] = torch.arange(self.sequence_length).repeat(rows, 1)
        return self._positions[rows]


def _ordered(source: Source, samples: Int64s) -> Int64s:
    return samples if source.order is None else source.order.take(samples)
