"""`stoker checkpoint verify` for checkpoints whose bytes lie in an object store, where reading takes a client.

Owns: the read function over such a source. The check itself is launcher/run/verification.py's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ...launcher.run.manifest import InvalidCheckpointError, read_manifest
from ...launcher.run.outcome import EXIT_FAILED, EXIT_FINISHED
from ...launcher.run.verification import THREADS, told, verify_directory
from ..state.source import ByteSource
from ..storage.posix import source_at
from .bar import Bar


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("stoker checkpoint verify")
    p.add_argument("directories", nargs="+", type=Path)
    p.add_argument("--threads", type=int, default=THREADS)
    p.add_argument("--json", action="store_true")
    arguments = p.parse_args(argv)
    verdicts = []
    for directory in arguments.directories:
        total = _size_of(directory)
        with Bar(directory.name) as bar:
            seen = partial(_advance, bar, total)
            verdicts.append(verify_directory(directory, arguments.threads, seen, reads_of(source_at(directory))))
        if not arguments.json:
            print("\n".join(told(verdicts[-1])), flush=True)
    if arguments.json:
        print(json.dumps([asdict(v) | {"directory": str(v.directory), "good": v.is_good} for v in verdicts]))
    return EXIT_FINISHED if all(v.is_good for v in verdicts) else EXIT_FAILED


def _advance(bar: Bar, total: int, count: int) -> None:
    bar.advance(count, total)


def _size_of(directory: Path) -> int:
    try:
        return sum(f.size for f in read_manifest(directory).files)
    except InvalidCheckpointError:
        return 0


def reads_of(source: ByteSource) -> Callable[[str, int, int], bytes]:
    """Of any source. What it cannot read is an OSError here."""

    def read(file: str, at: int, size: int) -> bytes:
        data = bytearray(size)
        try:
            source.read(file, at, memoryview(data))
        except InvalidCheckpointError as e:
            raise OSError(None, str(e)) from e
        return bytes(data)

    return read
