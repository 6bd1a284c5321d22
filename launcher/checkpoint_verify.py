"""`stoker checkpoint verify RUN|CHECKPOINT ... [--all]`: reads every block and checks it.

Owns: the arguments, and what is said. Does not own: the check, and the note beside a checkpoint of what was found
(run/verification.py). Bytes in an object store are read by the trainer's side, which takes over. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .checkpoint import hand_over
from .checkpoint_look import checkpoint_at
from .errors import UserError
from .find import find_run
from .run.chosen import NOTATION, is_checkpoint
from .run.manifest import InvalidCheckpointError, Manifest, read_manifest
from .run.outcome import EXIT_FAILED, EXIT_FINISHED
from .run.verification import THREADS, Verdict, told, verify_directory

EPILOG = """examples:
  stoker checkpoint verify runs/llama-261130-104733-x7q2               (its newest valid one)
  stoker checkpoint verify llama-261130-104733-x7q2 --all
  stoker checkpoint verify llama-261130-104733-x7q2:1000 --json
Exit code 1 if any of them is damaged. What was found is noted beside it (verified.json) and holds until a file is
written: `stoker checkpoint ls` shows it, retention never removes the newest good one, and counts no bad one."""


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "stoker checkpoint verify",
        description="Read every block of checkpoints and check it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("what", nargs="+", metavar="RUN|CHECKPOINT", help=NOTATION)
    p.add_argument("--all", action="store_true", help="of each RUN all checkpoints, not the newest alone")
    p.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help=f"that read and check (default: {THREADS})"
    )
    p.add_argument("--json", action="store_true", help="one JSON list, for programs")
    arguments = p.parse_intermixed_args(argv)
    if arguments.threads < 1:
        raise UserError(f"--threads {arguments.threads}: expected at least 1")
    directories = [d for text in arguments.what for d in _meant(text, arguments.all)]
    manifests = [_manifest(d) for d in directories]
    if any(m is not None and m.location is not None for m in manifests):
        options = ["--json"] * arguments.json + [f"--threads={arguments.threads}"]
        hand_over("verify", [*options, *map(str, directories)])
    return tell([_verify(d, arguments.threads) for d in directories], arguments.json)


def _meant(text: str, is_all: bool) -> list[Path]:
    if not is_all or is_checkpoint(Path(text)):
        return [checkpoint_at(text)]
    run = find_run(text)
    names = run.all_checkpoints()
    if not names:
        raise UserError(f"{text}: {run.checkpoints} has no checkpoint")
    return [run.checkpoint(name) for name in names]


def _manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except InvalidCheckpointError:
        return None


def _verify(directory: Path, threads: int) -> Verdict:
    with ProgressLine(directory.name) as line:
        return verify_directory(directory, threads, line)


def tell(verdicts: Sequence[Verdict], as_json: bool) -> int:
    """Print what was found; the exit code."""
    if as_json:
        print(json.dumps([_plain(v) for v in verdicts]))
    else:
        for v in verdicts:
            print("\n".join(told(v)), flush=True)
    return EXIT_FINISHED if all(v.is_good for v in verdicts) else EXIT_FAILED


def _plain(v: Verdict) -> dict[str, Any]:
    plain = asdict(v) | {"directory": str(v.directory), "good": v.is_good}
    return plain


class ProgressLine(contextlib.AbstractContextManager["ProgressLine"]):
    """`name: 1.2 GB, 1.9 GB/s` on a terminal's standard error, rewritten; nothing elsewhere. Called with byte counts.

    Here and not tqdm's: this module does with the standard library alone.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock, self._is_terminal = name, threading.Lock(), sys.stderr.isatty()
        self._done, self._began, self._last = 0, time.monotonic(), 0.0

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._is_terminal and now - self._last > 0.2:
                self._last = now
                rate = self._done / 1e9 / max(now - self._began, 1e-9)
                print(
                    f"\r{self._name}: {self._done / 1e9:.2f} GB, {rate:.2f} GB/s ", end="", file=sys.stderr, flush=True
                )

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
