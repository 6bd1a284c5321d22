"""Lustre: over how many targets a checkpoint's large files are striped, and which of them have no room.

Owns: what `lfs` is asked and told. Does not own: what happens without it (posix.py). Sources: Lustre Operations Manual,
"Managing File Layout (Striping) and Free Space" and "User Utilities"; the letters of target states are those of
`lfs df` in lustre/utils/lfs.c.
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
class Site:
    """What `lfs` says about a directory: its targets, and the layout that new files get there by themselves."""

    targets: tuple[StorageTarget, ...]  # of its pool, if it has one
    pool: str | None = None
    is_progressive: bool = False  # a layout that grows with the file, made by who knows the place


@dataclass(frozen=True)
class Layout:
    """How one file is laid out. `targets`: which; None: the file system chooses."""

    stripes: int
    stripe_size: int  # bytes
    targets: tuple[int, ...] | None = None


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


def check_targets(directory: Path, targets: Sequence[StorageTarget], total: int, shards: int, wanted: int) -> None:
    """Whether `shards` files, `total` bytes together, fit if each target gets its share and full ones none.

    Raises:
        OSError: ENOSPC; says which targets are short of room.
    """
    able = [t for t in targets if t.takes_files]
    while able:
        _, needed = _shares(-(-total // shards), shards, len(able), wanted)
        roomy = [t for t in able if t.free >= needed]
        if len(roomy) == len(able):
            return
        able = roomy  # the others must take more then
    raise _full(directory, targets, total)


def choose(
    path: Path, targets: Sequence[StorageTarget], size: int, shards: int, wanted: int, number: int = 0
) -> Layout:
    """The layout of one of `shards` files of `size` bytes, away from targets that have no room for their share.

    Args:
        number: of the file: neighbours begin at different targets.
        wanted: stripes; -1: all targets, 0: by size.

    Raises:
        OSError: ENOSPC: no target has room for it.
    """
    able = [t for t in targets if t.takes_files]
    if not able:
        raise _full(path, targets, size)
    stripes, share = _shares(size, shards, len(able), wanted)
    stripe_size = 16 * MIB if size >= GIB else 4 * MIB
    # While others write already, none may have room for a whole share any more, but still for this file.
    for needed, fewest in ((share, stripes), (with_margin(-(-size // stripes)), stripes), (with_margin(size), 1)):
        roomy = [t.index for t in able if t.free >= needed]
        if len(roomy) == len(targets):
            return Layout(stripes, stripe_size)
        if len(roomy) >= fewest:
            stripes = min(stripes, len(roomy))
            begin = number * stripes
            chosen = tuple(roomy[(begin + at) % len(roomy)] for at in range(stripes))
            return Layout(stripes, stripe_size, chosen)
    raise _full(path, targets, size)


def _shares(size: int, shards: int, targets: int, wanted: int) -> tuple[int, int]:
    """(stripes of each file, bytes on the fullest target if their objects are dealt out evenly)."""
    stripes = min(targets if wanted == -1 else wanted or stripes_for(size, shards, targets), targets)
    return stripes, with_margin(-(-shards * stripes // targets) * -(-size // stripes))


def _full(path: Path, targets: Sequence[StorageTarget], size: int) -> OSError:
    least = sorted(targets, key=lambda t: t.free)[:5]
    shown = ", ".join(f"OST:{t.index} {t.free / 1e6:,.0f} MB{' ' + t.states if t.states else ''}" for t in least)
    return no_room(path, f"{size / 1e6:,.0f} MB do not fit on {len(targets)} storage targets; least free: {shown}")


def ask(directory: Path) -> Site:
    """What `lfs` says about `directory`. Raises LfsError."""
    found = lfs("getstripe", "-d", str(directory))
    targets = parse_targets(lfs("df", str(directory)))
    pool = _POOL.search(found)
    if pool and targets:
        targets = parse_targets(lfs("df", "-p", f"{targets[0].fsname}.{pool[1]}", str(directory)))
    if not targets:
        raise LfsError("lfs df: shows no targets")
    return Site(tuple(targets), pool[1] if pool else None, "lcm_entry_count" in found)


def make_file(path: Path, site: Site, size: int, shards: int, wanted: int) -> None:
    """Make the empty file `path` where there is room; by the site's own layout, if it has one that is as good.

    Raises:
        LfsError: it was refused; there is no such file.
        OSError: ENOSPC.
    """
    number = re.search(r"\d+", path.name)
    layout = choose(path, site.targets, size, shards, wanted, int(number[0]) if number else 0)
    if layout.targets is not None:
        where = ["-o", ",".join(map(str, layout.targets))]
    elif wanted == 0 and site.is_progressive:
        return
    else:
        where = ["-c", str(layout.stripes), *(["-p", site.pool] if site.pool else [])]
    lfs("setstripe", *where, "-S", str(layout.stripe_size), str(path))


def check_quota(directory: Path, total: int) -> None:
    """Whether user and group may write `total` bytes more.

    Raises:
        OSError: EDQUOT; says whose quota it is, and what is left.
        LfsError: it cannot be found out.
    """
    status = os.stat(directory)
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
    for kind, option, number in (("user", "-u", os.geteuid()), ("group", "-g", group)):
        left = parse_quota(lfs("quota", option, str(number), str(directory)))
        if left is not None and left < with_margin(total):
            detail = f"{kind} {number}: {total / 1e6:,.0f} MB needed, {left / 1e6:,.0f} MB left"
            raise no_room(directory, detail, errno.EDQUOT)


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
