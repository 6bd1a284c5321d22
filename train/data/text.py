"""Text inputs: finding files, cutting them into parts of work, and reading documents from a part.

Owns what counts as a document (a text file, or one line of a JSONL file) and its decoding. It knows no tokenizer. The
cut into parts depends on the files alone, never on the number of workers, so that the output cannot either.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PART_BYTES = 4 << 20  # smallest part; larger where there would be more than PART_LIMIT parts
PART_LIMIT = 2048


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a file; of a JSONL file, the lines that begin there. A .gz file is one piece."""

    path: str
    start: int
    stop: int
    mtime_ns: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Part = tuple[Piece, ...]


def part_bytes(parts: Iterable[Part]) -> int:
    return sum(piece.size for part in parts for piece in part)


@dataclass
class Tally:
    """What happened to documents while they were read."""

    empty: int = 0  # left out
    replaced: int = 0  # had bytes or surrogates that are not UTF-8, replaced by U+FFFD


def _bare(path: str) -> str:
    return path[:-3] if path.endswith(".gz") else path


def is_jsonl(path: str) -> bool:
    return _bare(path).endswith(JSONL_SUFFIXES)


def find_files(inputs: Sequence[str], extensions: Sequence[str]) -> list[str]:
    """Absolute paths: inputs in the order given, glob matches and directory trees sorted, each file once.

    extensions (with the dot) filter what directories hold, .gz aside; a file that is named is always taken. Raises
    ValueError for an input that gives no file.
    """
    found: dict[str, None] = {}
    for name in inputs:
        if os.path.isfile(name):
            files = [name]
        elif os.path.isdir(name):
            files = sorted(
                os.path.join(parent, file)
                for parent, _, names in os.walk(name)
                for file in names
                if _bare(file).endswith(tuple(extensions))
            )
        else:
            files = sorted(match for match in glob.glob(name, recursive=True) if os.path.isfile(match))
        if not files:
            raise ValueError(
                f"input {name!r}: no such file, no match, or no file with {', '.join(extensions)} (--ext) in it"
            )
        found.update(dict.fromkeys(os.path.abspath(file) for file in files))
    return list(found)


def cut(files: Sequence[str]) -> list[Part]:
    """All files as parts of about equal size (bytes), in order. Large plain JSONL files are cut at lines."""
    stats = [os.stat(file) for file in files]
    target = max(PART_BYTES, sum(stat.st_size for stat in stats) // PART_LIMIT)
    parts: list[Part] = []
    pending: list[Piece] = []
    for path, stat in zip(files, stats, strict=True):
        whole = path.endswith(".gz") or not is_jsonl(path)
        step = max(stat.st_size, 1) if whole else target
        for start in range(0, max(stat.st_size, 1), step):
            pending.append(Piece(path, start, min(start + step, stat.st_size), stat.st_mtime_ns))
            if sum(piece.size for piece in pending) >= target:
                parts.append(tuple(pending))
                pending = []
    return [*parts, tuple(pending)] if pending else parts


def documents(part: Part, json_key: str, tally: Tally) -> Iterator[str]:
    """Texts of a part in order, without the empty ones.

    Raises ValueError with file and line for a line that is not a JSON object with a string under json_key, and with the
    file for a .gz that cannot be unpacked or a file that changed since it was cut.
    """
    for piece in part:
        stat = os.stat(piece.path)
        if stat.st_mtime_ns != piece.mtime_ns:
            raise ValueError(f"{piece.path}: changed while it was being read; run again")
        try:
            with _opened(piece.path) as file:
                texts = _lines(file, piece, json_key, tally) if is_jsonl(piece.path) else iter([file.read()])
                for raw in texts:
                    text = _decoded(raw, tally)
                    if text:
                        yield text
                    else:
                        tally.empty += 1
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{piece.path}: cannot be unpacked as gzip: {error}") from None


def _opened(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


def _decoded(raw: bytes | str, tally: Tally) -> str:
    try:
        return raw.decode() if isinstance(raw, bytes) else raw.encode().decode()
    except UnicodeError:
        tally.replaced += 1
        raw = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
        return raw.decode("utf-8", "replace")


def _lines(file: BinaryIO, piece: Piece, key: str, tally: Tally) -> Iterator[str]:
    """Values under key of the lines that begin in the piece."""
    at = piece.start
    if at:
        file.seek(at - 1)
        at += len(file.readline()) - 1
    is_packed = piece.path.endswith(".gz")
    begin_of_line, number = at, 0
    while is_packed or begin_of_line < piece.stop:
        line = file.readline()
        if not line:
            return
        number += 1
        if line.strip():
            try:
                yield _value(_decoded(line, tally), key)
            except ValueError as error:
                before = 0 if is_packed else _newlines(piece.path, at)
                raise ValueError(f"{piece.path}:{before + number}: {error}") from None
        begin_of_line += len(line)


def _value(line: str, key: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(found, dict) or key not in found:
        keys = (
            f"an object with {', '.join(map(repr, found)) or 'no keys'}"
            if isinstance(found, dict)
            else type(found).__name__
        )
        raise ValueError(f"{keys}, expected an object with {key!r} (choose with --json-key)")
    text = found[key]
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {type(text).__name__}, expected a string")
    return text


def _newlines(path: str, stop: int) -> int:
    """Lines that end before byte stop; counted only when an error needs a line number."""
    count = 0
    with open(path, "rb") as file:
        while stop > 0 and (block := file.read(min(1 << 20, stop))):
            count += block.count(b"\n")
            stop -= len(block)
    return count
