"""Telling in constant time whether data is the data a run was started with.

Owns the fingerprint of a .bin/.idx pair and the comparison of fingerprints. It catches replaced, re-tokenised, grown or
truncated files; a change of a few bytes between the sampled blocks of a large file can escape it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .indexed import HEADER, bin_path, idx_path

BLOCKS = 64
BLOCK_BYTES = 4096

Fingerprint = dict[str, "str | int | float | bool"]


def _sampled_hash(path: Path) -> tuple[int, str]:
    """Size, and BLAKE2b over 64 blocks evenly spread from the first byte to the last (a small file: all of it)."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - BLOCK_BYTES)
        for begin in sorted({k * last // (BLOCKS - 1) for k in range(BLOCKS)}):
            digest.update(begin.to_bytes(8, "little"))
            digest.update(os.pread(file.fileno(), BLOCK_BYTES, begin))
    return size, digest.hexdigest()


def fingerprint(prefix: str | Path) -> Fingerprint:
    """What identifies a pair: header, sizes (bytes) and sampled hashes. Independent of its path. Raises OSError."""
    bin_size, bin_hash = _sampled_hash(bin_path(prefix))
    idx_size, idx_hash = _sampled_hash(idx_path(prefix))
    with open(idx_path(prefix), "rb") as file:
        header = file.read(HEADER.size).hex()
    return {
        "idx_header": header,
        "idx_bytes": idx_size,
        "idx_blocks": idx_hash,
        "bin_bytes": bin_size,
        "bin_blocks": bin_hash,
    }


def differences(stored: Mapping[str, object], current: Mapping[str, object], name: str) -> list[str]:
    """One line per entry that differs, for people; empty if all is as it was."""
    return [
        f"{name}: {key} was {stored.get(key, 'absent')}, is {current.get(key, 'absent')}"
        for key in [*stored, *(key for key in current if key not in stored)]
        if stored.get(key) != current.get(key)
    ]


def check_unchanged(stored: Sequence[Mapping[str, object]], current: Sequence[Mapping[str, object]]) -> None:
    """Raise ValueError, naming what differs, unless two lists of fingerprints (each with a "name") are the same."""
    if len(stored) != len(current):
        names = [[str(entry.get("name")) for entry in entries] for entries in (stored, current)]
        found = [f"data.sources were {names[0]}, are {names[1]}"]
    else:
        found = [
            line
            for was, now in zip(stored, current, strict=True)
            for line in differences(was, now, f"data set {now.get('name')!r}")
        ]
    if found:
        raise ValueError(
            "the data is not what the checkpoint was trained on, so the run would go on with other samples:\n  "
            + "\n  ".join(found)
            + "\nrestore the data and its settings, or start a new run"
        )
