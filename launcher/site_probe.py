"""What only a machine itself knows: its commands, container runtimes, network devices, local storage, clock.

Owns: one POSIX shell script that tells it in lines, run here and, with srun, on a node; and reading them. No file is
written anywhere. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import environment_error
from .slurm import call

RUNTIMES = ("apptainer", "singularity", "enroot", "podman", "podman-hpc", "ch-run", "bwrap")
COMMANDS = ("scontrol", "sbatch", "srun", "squeue", "scancel", "python3", "nvidia-smi", "module", *RUNTIMES)
PATIENCE = 60  # seconds that a node is waited for
_LONGEST = 2  # minutes that the job may take

# Each line is one fact: a word, then its value. /sys/class/infiniband holds RoCE and EFA devices, too; the script's
# argument, usually none, is the root of another tree than the machine's.
SCRIPT = rf"""
echo host $(uname -n)
echo time $(date +%s)
echo kernel $(uname -r)
for c in {" ".join(COMMANDS)}; do p=$(command -v $c 2>/dev/null) && echo command $c $p; done
[ -n "$LMOD_CMD$MODULESHOME" ] && echo command module ${{LMOD_CMD:-$MODULESHOME}}
v=$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null) && echo python $v
echo memlock $(ulimit -l)
for p in "$1"/sys/class/infiniband/*/ports/*; do
  [ -r $p/state ] || continue
  d=${{p%/ports/*}}; echo device ${{d##*/}} ${{p##*/}} $(cat $p/link_layer 2>/dev/null || echo ?) \
    $(cut -d: -f2 $p/state 2>/dev/null) $(cat $p/rate 2>/dev/null)
done
for d in "$SLURM_TMPDIR" "$TMPDIR" /tmp /dev/shm /local /localscratch /scratch/local /mnt/local /raid; do
  [ -n "$d" ] && [ -d "$d" ] && [ -w "$d" ] && df -Pk "$d" 2>/dev/null | awk -v d="$d" 'NR==2 {{print "disk", $4, d}}'
done
nvidia-smi -L 2>/dev/null | sed -n 's/^GPU [0-9]*: \(.*\) (UUID.*/gpu \1/p'
"""


@dataclass(frozen=True)
class Device:
    """A port of /sys/class/infiniband."""

    name: str
    port: str
    layer: str  # InfiniBand, Ethernet (RoCE), or ? where the kernel does not say (EFA)
    state: str  # ACTIVE, DOWN, ...
    rate: str


@dataclass(frozen=True)
class Machine:
    host: str
    kernel: str
    commands: dict[str, str]  # name -> path
    python: str | None  # version of python3
    memlock: str  # KiB that may be locked, or unlimited; RDMA needs much
    devices: tuple[Device, ...]
    disks: tuple[tuple[str, int], ...]  # directory, MiB free
    gpus: tuple[str, ...]  # as nvidia-smi names them
    skew: float | None = None  # seconds by which its clock is ahead of ours, as far as that is sure


def here() -> Machine:
    done = subprocess.run(
        ["sh", "-c", SCRIPT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )
    return parse(os.fsdecode(done.stdout))


def on_a_node(partition: str | None, options: Sequence[str] = ()) -> Machine:
    """The same on one node, by a job of one task.

    Raises:
        UserError: no node was to be had within PATIENCE, or Slurm refused.
    """
    where = [f"--partition={partition}"] if partition else []
    command = ["srun", "--nodes=1", "--ntasks=1", f"--time={_LONGEST}", f"--immediate={PATIENCE}", *where]
    command += ["--job-name=stoker-site", "--mpi=none", "--quiet", *options, "sh", "-c", SCRIPT]
    asked = time.time()
    reply = call(command, PATIENCE + 60.0 * _LONGEST)
    answered = time.time()
    if reply.code != 0 or "host " not in reply.out:
        said = " ".join(reply.err.split()) or "no answer"
        raise environment_error(
            f"no node to look at: {said}; try another partition (--probe NAME) or more options (--srun=--account=...)"
        )
    return parse(reply.out, asked, answered)


def parse(text: str, asked: float = 0.0, answered: float = 0.0) -> Machine:
    """From the lines of SCRIPT. `asked` and `answered`: our clock before and after, for the difference between both."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, value = line.partition(" ")
        facts.setdefault(word, []).append(value.strip())
    commands = [value.split(" ", 1) for value in facts.get("command", [])]
    disks: dict[str, int] = {}
    for value in facts.get("disk", []):
        size, _, directory = value.partition(" ")
        disks.setdefault(directory, int(size) // 1024 if size.isdigit() else 0)
    return Machine(
        host=_one(facts, "host") or "?",
        kernel=_one(facts, "kernel") or "?",
        commands={words[0]: words[-1] for words in reversed(commands)},
        python=_one(facts, "python"),
        memlock=_one(facts, "memlock") or "?",
        devices=tuple(_device(value) for value in facts.get("device", [])),
        disks=tuple(disks.items()),
        gpus=tuple(facts.get("gpu", [])),
        skew=_skew(_one(facts, "time"), asked, answered) if answered else None,
    )


def _one(facts: dict[str, list[str]], word: str) -> str | None:
    return facts[word][0] if facts.get(word) and facts[word][0] else None


def _device(value: str) -> Device:
    name, port, layer, state, rate = [*value.split(None, 4), "", "", "", ""][:5]
    return Device(name, port, layer, state, rate)


def _skew(there: str | None, asked: float, answered: float) -> float | None:
    """The node looked at its clock between the two moments; what lies outside of that is its clock's."""
    if there is None or not there.isdigit():
        return None
    earliest, latest = int(there), int(there) + 1
    return max(0.0, earliest - answered) or min(0.0, latest - asked)
