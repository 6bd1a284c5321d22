"""Turning parts of text into token files, in this process or in several.

Owns one part's work and its record, which makes a part done, and running parts in worker processes. What the parts are
and what becomes of them is tokenize.py's.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .indexed_writer import IndexWriter
from .meta import write_text
from .text import Part, Tally, documents

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SLICE_CHARACTERS, _BATCH_CHARACTERS, _BATCH_SLICES = 1 << 18, 1 << 20, 1000


@dataclass(frozen=True)
class Encoding:
    """All that decides which tokens a text becomes, and where to."""

    tokenizer: Path
    tokenizer_sha256: str
    json_key: str
    eod: int
    dtype: str
    directory: Path

    def part_prefix(self, part: Part) -> Path:
        """Where a part's tokens lie; named by its content, so that a changed input or option never meets old tokens."""
        pieces = [(piece.path, piece.start, piece.stop, piece.mtime_ns) for piece in part]
        identity = [1, self.tokenizer_sha256, self.json_key, self.eod, self.dtype, pieces]
        return self.directory / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class PartRecord:
    documents: int
    tokens: int
    empty: int
    replaced: int


def read_record(prefix: Path) -> PartRecord | None:
    """The record of a part that is done; None if it is not."""
    try:
        return PartRecord(**json.loads(Path(f"{prefix}.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def encode_part(part: Part, encoding: Encoding, tokenizer: Tokenizer) -> PartRecord:
    """Write a part's tokens, each document with eod at its end, and its record. Raises ValueError for bad input."""
    prefix, tally, dtype = encoding.part_prefix(part), Tally(), np.dtype(encoding.dtype)
    begun: list[npt.NDArray[Any]] = []  # of a document whose last slice is still to come
    with IndexWriter(prefix, dtype) as writer:
        for slices in _batches(documents(part, encoding.json_key, tally)):
            done: list[npt.NDArray[Any]] = []
            encoded = tokenizer.encode_batch_fast([text for text, _ in slices], add_special_tokens=False)
            for (_, is_last), found in zip(slices, encoded, strict=True):
                begun.append(np.array([*found.ids, encoding.eod] if is_last else found.ids, dtype))
                if is_last:
                    done.append(np.concatenate(begun))
                    begun = []
            if done:
                writer.add_documents(np.concatenate(done), [len(tokens) for tokens in done])
    record = PartRecord(writer.documents, writer.tokens, tally.empty, tally.replaced)
    write_text(Path(f"{prefix}.json"), json.dumps(asdict(record)))
    return record


def _batches(texts: Iterator[str]) -> Iterator[list[tuple[str, bool]]]:
    """Slices of documents in lists that are worth a call; True marks a document's last."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for text in texts:
        for piece, is_last in _slices(text):
            batch.append((piece, is_last))
            characters += len(piece)
            if len(batch) >= _BATCH_SLICES or characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _slices(text: str) -> Iterator[tuple[str, bool]]:
    """A text in slices that the tokenizer's memory (some 100 bytes per character) can bear; True marks the last.

    Cuts are made behind a single line end that has no other space around it: there the usual tokenizers neither join
    nor look ahead. Only a text without any for long is cut anywhere.
    """
    begin = 0
    while len(text) - begin > _SLICE_CHARACTERS:
        earliest, end = begin + _SLICE_CHARACTERS // 2, begin + _SLICE_CHARACTERS
        newline = text.rfind("\n", earliest, end)
        while newline >= 0 and (text[newline - 1].isspace() or text[newline + 1].isspace()):
            newline = text.rfind("\n", earliest, newline)
        end = newline + 1 if newline >= 0 else end
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def encode_parts(parts: Sequence[Part], encoding: Encoding, workers: int) -> Iterator[tuple[Part, PartRecord]]:
    """Encode parts as they come, yielding each when it is done (in any order). The first error ends it."""
    if workers <= 1 or len(parts) <= 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer = _tokenizer(encoding)
        for part in parts:
            yield part, encode_part(part, encoding, tokenizer)
        return
    # Spawned, not forked: the tokenizer library's threads, running after a training, do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(parts)), context, _begin_worker, (encoding,))
    try:
        pending = {pool.submit(_encode_in_worker, part): part for part in parts}
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                yield pending.pop(future), future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a worker process died (out of memory?): run again with fewer --workers; what is done is kept"
        ) from None
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _tokenizer(encoding: Encoding) -> Tokenizer:
    from .vocabulary import load_tokenizer

    return load_tokenizer(encoding.tokenizer)


_worker: tuple[Encoding, Tokenizer] | None = None  # of a worker process: set once, before its first part


def _begin_worker(encoding: Encoding) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    _worker = encoding, _tokenizer(encoding)


def _die_with(sentinel: int) -> None:
    """A parent killed with -9 tells nobody, and its workers would wait for work for ever."""
    wait_for_any([sentinel])
    os._exit(1)


def _encode_in_worker(part: Part) -> PartRecord:
    assert _worker is not None
    return encode_part(part, *_worker)
