"""`stoker data tokenize`: text and JSONL files into PREFIX.bin, .idx, .meta.json and .tokenizer.json.

Owns the command line, resuming and publishing. The output is the same bytes whatever the number of workers and however
often it was killed and run again; nothing has its final name until all is done, .meta.json coming last.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ... import __version__
from .encode import Encoding, PartRecord, encode_parts, read_record
from .indexed import bin_path, idx_path, token_dtype
from .indexed_writer import merge
from .meta import DataMeta, check_tokenizer, file_sha256, read_meta, write_meta, write_text
from .text import Part, cut, find_files, part_bytes
from .vocabulary import EOD_TOKEN, eod_id, load_tokenizer, train_tokenizer, vocab_size

__all__ = ["TokenizeOptions", "check_tokenizer", "main", "tokenize"]


@dataclass(frozen=True)
class TokenizeOptions:
    inputs: tuple[str, ...]  # files, globs, directories
    out: Path  # prefix of the files written
    tokenizer: Path | None = None  # tokenizer.json to use, or
    train_vocab: int | None = None  # train a byte-level BPE of this many tokens
    train_bytes: int = 64 << 20  # on at most so much text
    extensions: tuple[str, ...] = (".txt", ".jsonl")  # taken from directories
    json_key: str = "text"
    eod_token: str | None = None
    workers: int = 1
    overwrite: bool = False


class Progress:
    """One line on a terminal, rewritten; elsewhere a line now and then."""

    def __init__(self, total_bytes: int, done_bytes: int, every: float = 30.0) -> None:
        self._total, self._done, self._tokens = max(total_bytes, 1), done_bytes, 0
        self._done_before = done_bytes
        self._is_terminal = sys.stderr.isatty()
        self._began = self._last = time.monotonic()
        self._every = 0.1 if self._is_terminal else every

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def add(self, part: Part, record: PartRecord) -> None:
        self._done += part_bytes([part])
        self._tokens += record.tokens
        now = time.monotonic()
        if now - self._last >= self._every or (self._is_terminal and self._done >= self._total):
            self._last = now
            rate = (self._done - self._done_before) / max(now - self._began, 1e-9)
            line = (
                f"tokenise: {100 * self._done // self._total:3d} %, {self._tokens:,} tokens, {rate / 1e6:.1f} MB/s, "
                f"{(self._total - self._done) / max(rate, 1e-9):.0f} s left"
            )
            print(
                f"\r{line:<78}" if self._is_terminal else line, end="" if self._is_terminal else "\n", file=sys.stderr
            )
            sys.stderr.flush()

    def end(self) -> None:
        if self._is_terminal:
            self.say("")


def tokenize(options: TokenizeOptions) -> DataMeta:
    """Do it all, or what is left of it; returns what was made. Raises ValueError or OSError, naming file or option."""
    _check_options(options)
    parts = cut(find_files(options.inputs, options.extensions))
    job = _job(options, parts)
    done = _already_done(options, job)
    if done is not None:
        print(f"{options.out}: already made from these inputs and options, nothing to do", file=sys.stderr)
        return done
    work = Path(f"{options.out}.parts")
    work.mkdir(parents=True, exist_ok=True)
    with _alone_in(work):
        try:
            write_text(work / "job", job)
            encoding, size = _prepare(options, parts, job, work)
            return _publish(options.out, job, encoding, size, _encode_all(parts, encoding, options.workers))
        except BaseException:
            records = [read_record(path.with_suffix("")) for path in work.glob("*.json")]
            if not any(record and record.documents for record in records):  # nothing worth keeping for another try
                shutil.rmtree(work, ignore_errors=True)
            raise


def _check_options(options: TokenizeOptions) -> None:
    if (options.tokenizer is None) == (options.train_vocab is None):
        raise ValueError("give either --tokenizer FILE or --train-vocab N")
    if options.workers < 1 or options.train_bytes < 1:
        raise ValueError(f"--workers {options.workers} and --train-mib must be at least 1")
    if options.out.suffix in (".bin", ".idx"):
        raise ValueError(f"--out {options.out}: expected a prefix, without {options.out.suffix}")
    if options.tokenizer is not None:
        eod_id(load_tokenizer(options.tokenizer), options.eod_token)


def _job(options: TokenizeOptions, parts: Sequence[Part]) -> str:
    """Digest of everything that decides the output."""
    made_by: object = [options.train_vocab, options.train_bytes]
    if options.tokenizer is not None:
        made_by = file_sha256(options.tokenizer)
    pieces = [(piece.path, piece.start, piece.stop, piece.mtime_ns) for part in parts for piece in part]
    identity = [1, made_by, options.json_key, options.eod_token, pieces]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _already_done(options: TokenizeOptions, job: str) -> DataMeta | None:
    """The result if it is there; ValueError if something else is, unless it may be overwritten or is our own half."""
    if options.overwrite or not (idx_path(options.out).exists() or bin_path(options.out).exists()):
        return None
    meta = read_meta(options.out)
    if meta is not None and meta.job == job and idx_path(options.out).exists():
        return meta
    left = Path(f"{options.out}.parts") / "job"
    if left.is_file() and left.read_text() == job:
        return None
    raise ValueError(
        f"--out {options.out}: exists, made from other inputs or options: choose another prefix, or give --overwrite"
    )


@contextmanager
def _alone_in(work: Path) -> Iterator[None]:
    """Hold the work directory's lock; ValueError if another process does."""
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{work}: another `stoker data tokenize` is writing there: wait, or stop it") from None
        except OSError:  # a file system without locks: parts are written atomically, so at worst work is done twice
            pass
        yield


def _prepare(options: TokenizeOptions, parts: Sequence[Part], job: str, work: Path) -> tuple[Encoding, int]:
    """The tokenizer, trained unless it was before, as a copy in the work directory; and its vocabulary size."""
    path = work / f"{job[:32]}.tokenizer"
    if not path.is_file():
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        if options.tokenizer is not None:
            shutil.copyfile(options.tokenizer, temporary)
        else:
            assert options.train_vocab is not None
            eod = options.eod_token or EOD_TOKEN
            os.environ.setdefault("RAYON_NUM_THREADS", str(options.workers))
            print(f"training a tokenizer of {options.train_vocab} tokens", file=sys.stderr)
            train_tokenizer(parts, options.json_key, options.train_vocab, options.train_bytes, eod, temporary)
        os.replace(temporary, path)
    tokenizer = load_tokenizer(path)
    size = vocab_size(tokenizer)
    if options.train_vocab is not None and size < options.train_vocab:
        print(f"the text is too little for {options.train_vocab} tokens: the tokenizer has {size}", file=sys.stderr)
    encoding = Encoding(
        path,
        file_sha256(path),
        options.json_key,
        eod_id(tokenizer, options.eod_token),
        str(token_dtype(size)),
        work,
    )
    return encoding, size


def _encode_all(parts: Sequence[Part], encoding: Encoding, workers: int) -> list[tuple[Path, PartRecord]]:
    """Every part's prefix and record, in order; only what has no record yet is worked on."""
    records: dict[Path, PartRecord] = {}
    missing: list[Part] = []
    for part in parts:
        record = read_record(encoding.part_prefix(part))
        if record is None:
            missing.append(part)
        else:
            records[encoding.part_prefix(part)] = record
    progress = Progress(part_bytes(parts), part_bytes(parts) - part_bytes(missing))
    if records:
        progress.say(f"resuming: {len(records)} of {len(parts)} parts are done")
    for part, record in encode_parts(missing, encoding, workers):
        records[encoding.part_prefix(part)] = record
        progress.add(part, record)
    progress.end()
    return [(prefix, records[prefix]) for prefix in map(encoding.part_prefix, parts)]


def _publish(out: Path, job: str, encoding: Encoding, size: int, done: Sequence[tuple[Path, PartRecord]]) -> DataMeta:
    """Join the parts under the final names, the meta file last, and remove the work directory."""
    filled = [prefix for prefix, record in done if record.documents]
    if not filled:
        raise ValueError("the inputs hold no text: every document is empty")
    Path(f"{out}.meta.json").unlink(missing_ok=True)
    documents, tokens = merge(out, filled, encoding.dtype)
    write_text(Path(f"{out}.tokenizer.json"), encoding.tokenizer.read_text(encoding="utf-8"))
    meta = DataMeta(size, encoding.eod, encoding.tokenizer_sha256, encoding.dtype, documents, tokens, __version__, job)
    write_meta(out, meta)
    shutil.rmtree(encoding.directory, ignore_errors=True)
    empty, replaced = (sum(getattr(record, name) for _, record in done) for name in ("empty", "replaced"))
    print(
        f"{out}: {documents:,} documents, {tokens:,} tokens ({encoding.dtype}), vocabulary {size:,}, eod {encoding.eod}"
        + (f"; {empty:,} empty documents left out" if empty else "")
        + (f"; {replaced:,} documents were not UTF-8, bad bytes replaced" if replaced else "")
    )
    return meta


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stoker data tokenize",
        description="Text files (one document each) and JSONL files (one per line), plain or .gz, to PREFIX.bin/.idx.",
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, globs, directories")
    parser.add_argument("--out", required=True, type=Path, metavar="PREFIX", help="prefix of the files to write")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json to use")
    which.add_argument("--train-vocab", type=int, metavar="N", help="train a byte-level BPE of N tokens on the inputs")
    parser.add_argument(
        "--train-mib", type=int, default=64, metavar="N", help="text to train on at most, MiB (%(default)s)"
    )
    parser.add_argument(
        "--ext",
        action="append",
        help="what to take from directories, with or without .gz; may be repeated (.txt,.jsonl)",
    )
    parser.add_argument("--json-key", default="text", help="where a JSONL line has its text (%(default)s)")
    parser.add_argument("--eod-token", help="token put at the end of each document (default: the usual names)")
    parser.add_argument("--workers", type=int, default=min(len(os.sched_getaffinity(0)), 32), help="(%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace an output made from something else")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 bad input or a failing disk (one line on stderr), 2 usage, 130 interrupted."""
    args = _parser().parse_args(argv)
    named = ",".join(args.ext or [".txt,.jsonl"]).split(",")
    options = TokenizeOptions(
        tuple(args.inputs),
        args.out,
        args.tokenizer,
        args.train_vocab,
        args.train_mib << 20,
        tuple(ext if ext.startswith(".") else f".{ext}" for ext in named if ext),
        args.json_key,
        args.eod_token,
        args.workers,
        args.overwrite,
    )
    try:
        tokenize(options)
    except (ValueError, OSError) as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what is done is kept, run again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
