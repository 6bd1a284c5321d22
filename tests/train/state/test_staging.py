"""How much host memory a save takes, from what a node has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stoker.train.state.staging import available_bytes, choose

GIB = 1024**3
MIB = 1024**2


def rank(host: str, size: int, available: int, held: int = 0) -> dict[str, Any]:
    return {"host": host, "size": size, "available": available, "held": held}


@pytest.mark.parametrize(
    ("ranks", "asked", "chosen"),
    [
        ([rank("a", GIB, 3 * GIB)], 0, 0),
        ([rank("a", GIB, 2 * GIB)], 0, 512 * MIB),  # 2 of 2 GiB: a part of what is free must stay
        ([rank("a", GIB, 3 * GIB)], 64 * MIB, 64 * MIB),
        # Ranks of one node share it.
        ([rank("a", GIB, 5 * GIB), rank("a", GIB, 5 * GIB)], 0, 0),
        ([rank("a", GIB, 4 * GIB), rank("a", GIB, 5 * GIB)], 0, 512 * MIB),
        ([rank("a", GIB, 3 * GIB), rank("b", GIB, 3 * GIB)], 0, 0),
        # One node without the room, and all go in waves.
        ([rank("a", GIB, 9 * GIB), rank("b", GIB, GIB)], 0, int(0.4 * GIB)),
        ([rank("a", GIB, 9 * GIB), rank("b", GIB, 0)], 0, 16 * MIB),
        # What the memories hold already, of a worker before, is not free and not needed either.
        ([rank("a", GIB, GIB // 4, held=2 * GIB)], 0, 0),
    ],
)
def test_two_copies_where_they_fit_on_every_node_else_waves(
    ranks: list[dict[str, Any]], asked: int, chosen: int
) -> None:
    assert choose(ranks, asked) == chosen


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:   12000 kB\n"


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert available_bytes(tmp_path / "proc", tmp_path / "cgroup") == 12000 * 1024


def test_the_tightest_group_above_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    job = "cgroup/system.slice/slurmstepd.scope/job_7"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
            f"{job}/step_0/memory.max": "max\n",
            f"{job}/step_0/memory.current": "3000000\n",
            f"{job}/memory.max": "9000000\n",
            f"{job}/memory.current": "5000000\n",
            f"{job}/memory.stat": "anon 3000000\nfile 2100000\nactive_file 1000000\ninactive_file 500000\n",
        },
    )
    assert available_bytes(tmp_path / "proc", tmp_path / "cgroup") == 5_500_000


def test_version_1_of_groups_is_asked_too(tmp_path: Path) -> None:
    group = "cgroup/memory/slurm/uid_1/job_7"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/slurm/uid_1/job_7\n0::/\n",
            f"{group}/memory.limit_in_bytes": "7000000\n",
            f"{group}/memory.usage_in_bytes": "6500000\n",
            f"{group}/memory.stat": "cache 1\ntotal_active_file 100000\ntotal_inactive_file 200000\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "99999999\n",
        },
    )
    assert available_bytes(tmp_path / "proc", tmp_path / "cgroup") == 800_000


def test_this_machine_has_some() -> None:
    assert 0 < available_bytes() < 2**60
