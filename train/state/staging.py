"""How much host memory a save may take: two whole copies of a rank's shard where they fit, else waves.

Owns: what the node has to give (free memory and the limits of control groups) and the choice, as a pure function of
what all ranks say. Does not own: the memory itself (segment.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_PART = 0.8  # of what is free may be taken: training allocates too, and nothing is worse than to be killed by a save
_WAVES = 512 * 1024 * 1024  # bytes for both halves, where whole copies do not fit
_LEAST = 16 * 1024 * 1024  # bytes for both halves
_UNLIMITED = 1 << 60  # what version 1 says where there is no limit is a little less than 2**63


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that this process can still take: MemAvailable, or less where a control group (version 1 or 2) says
    so. Page cache counts as free. What cannot be read limits nothing.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    return min([_UNLIMITED, *_free_memory(proc), *_limits(proc, groups)])


def choose(ranks: Sequence[Mapping[str, Any]], staging: int) -> int:
    """Bytes of host memory for each rank's two memories; 0: two whole copies, whatever they need.

    Args:
        ranks: of every rank `host`, `size` (bytes of one copy), `held` (bytes of its memories that are present
            already) and `available` (`available_bytes` there).
        staging: bytes as asked for; 0: as it fits. Then all ranks take two copies, or none does.
    """
    if staging:
        return staging
    hosts = {str(r["host"]) for r in ranks}
    there = [[r for r in ranks if r["host"] == host] for host in sorted(hosts)]
    room = [_PART * min(r["available"] for r in mine) + sum(r["held"] for r in mine) for mine in there]
    if all(sum(2 * r["size"] for r in mine) <= free for mine, free in zip(there, room, strict=True)):
        return 0
    least = min(free / len(mine) for mine, free in zip(there, room, strict=True))
    return max(_LEAST, min(_WAVES, int(least / 2)))


def _free_memory(proc: Path) -> Iterator[int]:
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _limits(proc: Path, groups: Path) -> Iterator[int]:
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _free_in(groups, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _free_in(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _free_in(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Of the group and all above it: each has its own limit. In a container the names above it may not exist here."""
    group = root / path.lstrip("/")
    for directory in [group, *group.parents]:
        most, used = _read(directory / limit).strip(), _read(directory / usage).strip()
        if most.isdecimal() and used.isdecimal() and int(most) < _UNLIMITED:
            cache = sum(_field(directory / "memory.stat", f"{prefix}{kind}_file") for kind in ("active", "inactive"))
            yield max(int(most) - max(int(used) - cache, 0), 0)
        if directory == root:
            return


def _field(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
