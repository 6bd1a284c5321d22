"""Lustre: over how many targets a checkpoint's large files are striped, and which of them have no room.

Owns: what `lfs` is asked and told. Where it is missing, fails or does not answer, the file system's own defaults hold and
a note says so. Sources: Lustre Operations Manual, "Managing File Layout (Striping) and Free Space" and "User
Utilities"; the letters of target states are those of `lfs df` in lustre/utils/lfs.c.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .filesystem import no_room, with_margin

MIB, GIB = 2**20, 2**30
LARGE = 64 * MIB  # bytes from which the place of a file matters
_MOST = 64  # stripes per file: beyond that, the many objects cost more than another target brings
_TIMEOUT = 20.0  # seconds for a call of lfs
_NO_ROOM = frozenset("RNSI")  # read-only, no new objects, out of space, out of inodes

_TARGET = re.compile(r"^(\S+)-OST[0-9a-f]{4}_UUID\s+(\d+)\s+(\d+)\s+(\d+)\s+\S+\s+\S.*\[OST:(\d+)\]\s*([A-Za-z]*)\s*$")
_POOL = re.compile(r"(?:stripe_|lmm_)?pool:\s*(\S+)")


class LfsError(Exception):
    """`lfs` is not there, failed, or said what nobody understands."""


@dataclass(frozen=True)
class StorageTarget:
    """An object storage target (OST) as `lfs df` shows it."""

    fsname: str
    index: int
    free: int  # bytes
    states: str = ""  # letters

    @property
    def takes_files(self) -> bool:
        return not _NO_ROOM & set(self.states)


@dataclass(frozen=True)
class Layout:
    """How large files are laid out. `targets`: those that have room; None: all, and the file system chooses."""

    stripes: int
    stripe_size: int  # bytes
    targets: tuple[int, ...] | None = None

    def chosen(self, number: int) -> tuple[int, ...]:
        """Targets for large file `number`: neighbours begin at different ones."""
        assert self.targets
        begin = number * self.stripes
        return tuple(self.targets[(begin + at) % len(self.targets)] for at in range(self.stripes))


def parse_targets(text: str) -> list[StorageTarget]:
    """The targets in the output of `lfs df`. Those that are inactive have no numbers, and are not among them."""
    found = (_TARGET.match(line) for line in text.splitlines())
    return [StorageTarget(m[1], int(m[5]), int(m[4]) * 1024, m[6]) for m in found if m]


def parse_quota(text: str) -> int | None:
    """Bytes that are left below the hard limit in the output of `lfs quota -u|-g NAME PATH`; None: no limit."""
    _, header, rest = text.rpartition("grace")
    words = [w.strip("*[]") for w in rest.split()]
    if not header or len(words) < 4 or not words[1].isdecimal():
        raise LfsError(f"lfs quota: cannot be read: {text.strip()[-200:]!r}")
    used, limit = int(words[1]), int(words[3]) if words[3].isdecimal() else 0
    return max(limit - used, 0) * 1024 if limit else None


def stripes_for(shard: int, shards: int, targets: int) -> int:
    """Stripes for each of `shards` files of `shard` bytes that are written at the same time.

    Many files fill the targets without stripes; a few are spread until each target has about one writer, but no stripe
    gets less than 256 MiB. A file of more than 16 GiB per target is spread in any case.
    """
    to_fill = min(targets // max(shards, 1), shard // (256 * MIB))
    return max(1, min(max(to_fill, -(-shard // (16 * GIB))), targets, _MOST))


def plan(directory: Path, targets: Sequence[StorageTarget], total: int, shards: int, wanted: int) -> Layout:
    """A layout with room on each target that it uses.

    Args:
        total: bytes of all files.
        wanted: stripes; -1: all targets, 0: by size.

    Raises:
        OSError: ENOSPC; says which targets are short of it.
    """
    shard = -(-total // max(shards, 1))
    able = [t for t in targets if t.takes_files]
    while able:
        stripes = min(len(able) if wanted == -1 else wanted or stripes_for(shard, shards, len(able)), len(able))
        # The most objects that lie on one target, if they are dealt out evenly.
        needed = with_margin(-(-shards * stripes // len(able)) * -(-shard // stripes))
        roomy = [t for t in able if t.free >= needed]
        if len(roomy) == len(able):
            size = 16 * MIB if shard >= GIB else 4 * MIB
            return Layout(stripes, size, None if len(able) == len(targets) else tuple(t.index for t in able))
        able = roomy  # the others must take more then
    fullest = sorted(targets, key=lambda t: t.free)[:5]
    shown = ", ".join(f"OST:{t.index} {t.free / 1e6:,.0f} MB{' ' + t.states if t.states else ''}" for t in fullest)
    raise no_room(directory, f"{total / 1e6:,.0f} MB do not fit on {len(targets)} storage targets; least free: {shown}")


def lay_out(directory: Path, total: int, shards: int, wanted: int) -> tuple[Layout | None, list[str]]:
    """Check the room on each target and stripe what will be written into the new `directory`.

    Returns the layout if files must be placed one by one (`place`), and notes on what could not be done.

    Raises:
        OSError: ENOSPC or EDQUOT: it would not fit.
    """
    try:
        found = lfs("getstripe", "-d", str(directory))
        targets = parse_targets(lfs("df", str(directory)))
        pool = _POOL.search(found)
        if pool and targets:
            targets = parse_targets(lfs("df", "-p", f"{targets[0].fsname}.{pool[1]}", str(directory)))
        if not targets:
            raise LfsError("lfs df: shows no targets")
        layout = plan(directory, targets, total, shards, wanted)
        is_sites = wanted == 0 and "lcm_entry_count" in found  # a progressive layout, made by who knows the place
        if layout.targets is None and not is_sites:
            keep = ["-p", pool[1]] if pool else []
            lfs("setstripe", "-c", str(layout.stripes), "-S", str(layout.stripe_size), *keep, str(directory))
        notes: list[str] = []
    except LfsError as e:
        layout, notes = Layout(1, MIB), [f"{directory.parent}: not striped, and targets not checked for room: {e}"]
    notes += _check_quota(directory, total) if not notes else []
    return layout if layout.targets else None, notes


def _check_quota(directory: Path, total: int) -> list[str]:
    status = os.stat(directory)
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
    try:
        for kind, option, number in (("user", "-u", os.geteuid()), ("group", "-g", group)):
            left = parse_quota(lfs("quota", option, str(number), str(directory)))
            if left is not None and left < with_margin(total):
                detail = f"{kind} {number}: {total / 1e6:,.0f} MB needed, {left / 1e6:,.0f} MB left"
                raise no_room(directory.parent, detail, errno.EDQUOT)
    except LfsError as e:
        return [f"{directory.parent}: quota not known: {e}"]
    return []


def place(path: Path, layout: dict[str, Any]) -> bool:
    """Make the empty file `path` on targets that have room. False: it could not be done (and it is not there)."""
    plain = Layout(layout["stripes"], layout["stripe_size"], tuple(layout["targets"]))
    number = re.search(r"\d+", path.name)
    chosen = ",".join(map(str, plain.chosen(int(number[0]) if number else 0)))
    try:
        lfs("setstripe", "-o", chosen, "-S", str(plain.stripe_size), str(path))
    except LfsError:
        return False
    return path.exists()


def lfs(*words: str) -> str:
    """What `lfs` prints. Raises LfsError."""
    try:
        done = subprocess.run(["lfs", *words], capture_output=True, text=True, timeout=_TIMEOUT, errors="replace")
    except FileNotFoundError:
        raise LfsError("lfs is not on the PATH") from None
    except OSError as e:
        raise LfsError(f"lfs: {e.strerror}") from e
    except subprocess.TimeoutExpired:
        raise LfsError(f"lfs {words[0]}: no answer in {_TIMEOUT:.0f} s") from None
    if done.returncode != 0:
        raise LfsError(f"lfs {words[0]}: exit {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout
