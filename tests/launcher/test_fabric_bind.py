"""Which CPUs a worker gets, on the trees in sysfs/ and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stoker.launcher.fabric import choose
from stoker.launcher.fabric_bind import format_cpus, gpus_of_workers, is_given, seats, split
from stoker.launcher.fabric_sysfs import Facts, read_facts

Machine = Callable[..., Path]
HALVES = ({"SLURM_CPUS_ON_NODE": "32"}, frozenset(range(32)))


def cpus_of(facts: Facts, environ: dict[str, str], allowed: frozenset[int], count: int) -> list[str | None]:
    found = seats(facts, choose(facts).rails, environ, allowed, count)
    return [None if s.cpus is None else format_cpus(s.cpus) for s in found]


def test_each_worker_gets_its_part_of_the_cpus_near_its_gpu(machine: Machine) -> None:
    facts = read_facts(machine("dual-rail-dead-port"))
    assert cpus_of(facts, *HALVES, 4) == ["0-7", "8-15", "16-23", "24-31"]
    # Two GPUs given by Slurm, one on each side: each has its side for itself.
    given = HALVES[0] | {"SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert cpus_of(facts, given, HALVES[1], 2) == ["0-15", "16-31"]


def test_never_outside_of_what_slurm_gave(machine: Machine) -> None:
    facts = read_facts(machine("dual-rail-dead-port"))
    allowed = frozenset(range(8, 20))
    environ = {"SLURM_CPUS_ON_NODE": "12"}
    assert cpus_of(facts, environ, allowed, 4) == ["8-11", "12-15", "16-17", "18-19"]
    # Nothing near the last two GPUs, and nothing left: they may run where the agent may.
    assert cpus_of(facts, {"SLURM_CPUS_ON_NODE": "8"}, frozenset(range(8)), 4) == ["0-3", "4-7", None, None]


def test_threads_of_one_core_stay_together() -> None:
    cores = [frozenset({c, c + 8}) for c in range(8)]
    near = [frozenset(range(16))] * 4
    found = [format_cpus(s) for s in split(cores, near) if s]
    assert found == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]


def test_where_a_site_does_not_confine_its_jobs_workers_keep_to_their_side(machine: Machine) -> None:
    facts = read_facts(machine("dual-rail-dead-port"))
    everything = frozenset(range(32))
    assert cpus_of(facts, {"SLURM_CPUS_ON_NODE": "8"}, everything, 4) == ["0-15", "0-15", "16-31", "16-31"]
    assert cpus_of(facts, {}, everything, 2) == ["0-15", "0-15"]


@pytest.mark.parametrize(
    ("environ", "allowed", "count", "expected"),
    [
        ({"SLURM_CPUS_ON_NODE": "8"}, 8, 2, ["0-3", "4-7"]),
        ({"SLURM_CPUS_ON_NODE": "8"}, 8, 3, ["0-1", "2-4", "5-7"]),
        ({"SLURM_CPUS_ON_NODE": "8"}, 8, 1, [None]),  # it has them all anyhow
        ({"SLURM_CPUS_ON_NODE": "2"}, 2, 4, [None] * 4),  # fewer than workers
        ({"SLURM_CPUS_ON_NODE": "2"}, 2, 2, [None] * 2),  # one core is too few for a worker's threads
        ({"SLURM_CPUS_ON_NODE": "8"}, 2, 2, [None, None]),  # a test cluster declares more than there are
        ({"SLURM_CPUS_ON_NODE": "1"}, 2, 2, [None, None]),  # not confined
        ({}, 8, 2, [None, None]),  # without Slurm others may be at work here
    ],
)
def test_without_gpus_only_what_is_surely_ours_is_split(
    environ: dict[str, str], allowed: int, count: int, expected: list[str | None]
) -> None:
    facts = Facts(siblings=tuple(frozenset({c}) for c in range(allowed)))
    assert cpus_of(facts, environ, frozenset(range(allowed)), count) == expected


def test_whole_cores_rounded_up_are_ours() -> None:
    assert is_given(allowed=4, threads=2, environ={"SLURM_CPUS_ON_NODE": "3"})
    assert not is_given(allowed=4, threads=1, environ={"SLURM_CPUS_ON_NODE": "3"})


def test_a_machine_that_does_not_tell_its_nodes_is_split_evenly(machine: Machine) -> None:
    facts = read_facts(machine("none"))
    assert cpus_of(facts, {"SLURM_CPUS_ON_NODE": "8"}, frozenset(range(8)), 2) == ["0-1,4-5", "2-3,6-7"]


@pytest.mark.parametrize(
    ("environ", "buses"),
    [
        ({}, ["1b", "43", "52", "61"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ["9d", "c3", "d1", "df"]),
        ({"CUDA_VISIBLE_DEVICES": "7,0"}, ["df", "1b", None, None]),
        # Confined to devices 4 to 7, which CUDA then counts from 0.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_STEP_GPUS": "4,5,6,7"}, ["9d", "c3", "d1", "df"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7", "SLURM_STEP_GPUS": "4,5,6,7"}, ["9d", "c3", "d1", "df"]),
        ({"SLURM_JOB_GPUS": "2,3"}, ["52", "61", None, None]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3a2b3c4d-0000-4000-8000-000000000003,GPU-0a2b"}, ["61", "1b", None, None]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-8c7c2b1e-0000-5000-8000-000000000000"}, [None] * 4),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, [None] * 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, [None] * 4),
        ({"CUDA_VISIBLE_DEVICES": "99"}, [None] * 4),
    ],
)
def test_the_gpu_of_each_worker(machine: Machine, environ: dict[str, str], buses: list[str | None]) -> None:
    gpus = gpus_of_workers(read_facts(machine("infiniband")).gpus, environ, 4)
    assert [None if g is None else g.address[5:7] for g in gpus] == buses


def test_the_map_names_gpu_and_nearest_rail(machine: Machine) -> None:
    cores = tuple(frozenset({c, c + 112}) for c in range(112))
    facts = replace(read_facts(machine("infiniband")), siblings=cores)
    found = seats(facts, choose(facts).rails, {"SLURM_CPUS_ON_NODE": "224"}, frozenset(range(224)), 8)
    assert found[5].describe() == {"cpus": "70-83,182-195", "gpu": "0000:c3:00.0", "port": "mlx5_9:1"}


def test_shares_of_any_machine_are_allowed_and_do_not_meet() -> None:
    """Random machines: parts of whole cores, disjoint unless a group has fewer than two for each worker."""
    rng = random.Random(7)
    for _ in range(300):
        threads, count = rng.choice((1, 2)), rng.randint(1, 9)
        cores = [frozenset({c + 64 * t for t in range(threads)}) for c in range(rng.randint(1, 40))]
        allowed = frozenset().union(*cores)
        sides = [
            frozenset(c for c in allowed if c % 64 < 20),
            frozenset(c for c in allowed if c % 64 >= 20),
            frozenset(),
        ]
        near = [rng.choice(sides) for _ in range(count)]
        found = split(cores, near)
        for share, side in zip(found, near, strict=True):
            assert share is None or (share and share <= (side or allowed))
        for i, a in enumerate(found):
            for j, b in enumerate(found[:i]):
                group = [n for n in near if n == near[i]]
                is_scarce = len([c for c in cores if c & near[i]]) < 2 * len(group)
                assert not a or not b or not a & b or (near[i] == near[j] and is_scarce)
