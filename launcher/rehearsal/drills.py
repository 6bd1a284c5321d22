"""The drills: a table of names and functions. Each launches the small run, disturbs it, and says when.

Owns: the disturbances and what each may cost. The runner (rehearse.py) waits for the end, compares, and mends. A drill
is added by a function and a row.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..process import loop_process
from ..run.layout import CheckpointName
from ..run.outcome import Cause
from ..run.submissions import submissions
from . import measure
from .lab import PAUSE, SAVE_EVERY, Lab
from .trial import Trial, wait_for
from .verdict import Expected

_SOON = 12  # the step at which most are disturbed: two after a checkpoint
_RISES = 12.0  # seconds in which nothing may rise after a scancel; a requeued job waits 5 s on the rehearsal cluster


class Needs(Enum):
    """What a drill needs of its place, each more than the one before."""

    NOTHING = 0
    REQUEUE = 1  # somebody who starts an ended attempt again
    SLURM = 2  # a cluster of our own
    CABLES = 3  # with isolated nodes


@dataclass(frozen=True)
class Disturbed:
    """`at`: Unix seconds. `mend` undoes what was done to the cluster; `also` says what else is wrong at the end."""

    trial: Trial
    at: float
    mend: Callable[[], None] = lambda: None
    also: Callable[[], Sequence[str]] = lambda: ()


@dataclass(frozen=True)
class Drill:
    name: str
    what: str
    act: Callable[[Lab, str], Disturbed]  # the lab, and the name of the run
    expected: Expected
    needs: Needs = Needs.NOTHING
    nodes_broken: int = 0  # nodes that are lost until mended
    seconds: int = 30  # roughly, to begin with the longest


def _wait(trial: Trial, is_there: Callable[[], object], what: str) -> None:
    """Poll; raises TimeoutError with the run's story, at once if the run is over without it."""
    wait_for(lambda: is_there() or trial.is_over(), lambda: f"{what} of {trial.story()}")
    if not is_there():
        raise TimeoutError(f"the run ended before {what}: {trial.story()}")


# The allocation's end.


def time_limit(lab: Lab, name: str) -> Disturbed:
    # Slurm looks at time limits every 30 s: the warning comes 60 to 90 s before the end of these two minutes.
    trial = lab.launch(name, "cluster.time=2", failpoints="step@attempt=1:pause-2000")
    _wait(trial, lambda: trial.events("warned"), "a warning")
    return Disturbed(trial, trial.events("warned")[0]["time"])


def warning(lab: Lab, name: str) -> Disturbed:
    trial = lab.launch(name)
    trial.wait_step(_SOON)
    at = time.time()
    if lab.cluster is not None:
        lab.slurm("scancel", "--batch", "--signal=USR1", trial.job_id)
    else:
        process = loop_process(submissions(trial.dir)[-1])
        assert process is not None
        os.kill(process.pid, signal.SIGUSR1)
    return Disturbed(trial, at)


def preempt(lab: Lab, name: str, *overrides: str) -> Disturbed:
    trial = lab.launch(name, *overrides)
    trial.wait_step(_SOON)
    at = time.time()
    lab.own_cluster.preempt(trial.job_id)
    return Disturbed(trial, at)


def preempt_at_once(lab: Lab, name: str) -> Disturbed:
    return preempt(lab, name, "cluster.partition=grace0")


def scancel(lab: Lab, name: str) -> Disturbed:
    """Cancelled, nothing rises again; then a person resumes it, and from there on the time counts."""
    trial = lab.launch(name)
    trial.wait_step(_SOON)
    job = trial.job_id
    lab.slurm("scancel", job)
    trial.wait_outcome(1)
    time.sleep(_RISES)
    risen = [f"job {job} rose again after scancel"] if lab.slurm("squeue", "-h", "-j", job, "-t", "PD,R") else []
    risen += ["a new attempt rose after scancel"] if len(trial.dir.all_attempts()) > 1 else []
    at = time.time()
    lab.stoker("resume", str(trial.dir.path), failpoints=PAUSE)
    # The old attempt's outcome says that the run is over until the new one has begun.
    wait_for(lambda: len(trial.dir.all_attempts()) > 1, lambda: f"a second attempt of {trial.story()}")
    return Disturbed(trial, at, also=lambda: risen)


# Nodes.


def _lose(lab: Lab, trial: Trial, victim: str) -> Disturbed:
    at = time.time()
    lab.own_cluster.crash(victim)
    return Disturbed(trial, at, lambda: lab.own_cluster.restart_node(victim), lambda: _took_part(trial, victim))


def _took_part(trial: Trial, victim: str) -> list[str]:
    return [f"{victim}, which was lost, took part at the end"] if victim in trial.nodes() else []


def node_power(lab: Lab, name: str) -> Disturbed:
    trial = lab.launch(name)
    trial.wait_step(_SOON)
    return _lose(lab, trial, trial.nodes()[-1])


def host_power(lab: Lab, name: str) -> Disturbed:
    trial = lab.launch(name)
    trial.wait_step(_SOON)
    return _lose(lab, trial, trial.nodes()[0])


def network_cut(lab: Lab, name: str) -> Disturbed:
    """The node's processes run on unseen, beside those of the next attempt."""
    trial = lab.launch(name)
    trial.wait_step(_SOON)
    victim = trial.nodes()[-1]
    at = time.time()
    lab.own_cluster.cut(victim)
    return Disturbed(trial, at, lambda: lab.own_cluster.heal(victim), lambda: _took_part(trial, victim))


def mid_save(lab: Lab, name: str) -> Disturbed:
    """The power goes while the last rank is writing its shard."""
    step = 2 * SAVE_EVERY
    slow = f"checkpoint.write@step={step}@rank={lab.last_rank}@attempt=1:pause-4000"
    trial = lab.launch(name, failpoints=f"{PAUSE},{slow}")
    unfinished = f".tmp-step-{step:08d}-*"
    _wait(trial, lambda: list(trial.dir.checkpoints.glob(unfinished)), "a save")
    lost = _lose(lab, trial, trial.nodes()[-1])

    def also() -> list[str]:
        left = sorted(path.name for path in trial.dir.checkpoints.iterdir() if path.name.startswith(".tmp"))
        return [*lost.also(), *(f"left behind: {name}" for name in left)]

    return Disturbed(trial, lost.at, lost.mend, also)


# Workers.


def _stopped_at(trial: Trial) -> float:
    """When the first generation ended its last step, after which a failpoint struck."""
    _wait(trial, lambda: trial.events("trouble"), "trouble")
    return measure.passes(trial.dir)[0].steps[-1][1]


def _blamed(trial: Trial, cause: str, rank: int) -> list[str]:
    """The trouble must be put down to the worker that had it."""
    said = [(e["cause"], e["rank"]) for e in trial.events("trouble")]
    return [] if said[:1] == [(cause, rank)] else [f"blamed {said}, expected {cause} of rank {rank}"]


def worker_kill(lab: Lab, name: str) -> Disturbed:
    rank, step = lab.last_rank, _SOON + 3
    trial = lab.launch(name, failpoints=f"{PAUSE},step@step={step}@rank={rank}@generation=1:kill")
    return Disturbed(trial, _stopped_at(trial), also=lambda: _blamed(trial, Cause.CRASH.value, rank))


def worker_hang(lab: Lab, name: str) -> Disturbed:
    step = _SOON + 3
    trial = lab.launch(name, failpoints=f"{PAUSE},step@step={step}@rank=0@generation=1:hang")
    return Disturbed(trial, _stopped_at(trial), also=lambda: _blamed(trial, Cause.HANG.value, 0))


# Checkpoints.


def truncate(checkpoint: Path) -> None:
    """Cut the end off the first shard."""
    shard = min(checkpoint.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)


def flip_one_bit(checkpoint: Path) -> None:
    """In the last shard, 64 bytes before its end."""
    with open(max(checkpoint.glob("*.safetensors")), "r+b") as f:
        f.seek(-64, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 0x10]))


def damaged(lab: Lab, name: str, damage: Callable[[Path], None]) -> Disturbed:
    """The newest checkpoint is damaged on the disk while training goes on; then a worker dies."""
    saved, step, rank = 2 * SAVE_EVERY, 2 * SAVE_EVERY + 5, lab.last_rank
    points = f"step@step={step - 1}@rank={rank}@generation=1:pause-5000,step@step={step}@rank={rank}@generation=1:kill"
    trial = lab.launch(name, failpoints=f"{PAUSE},{points}")
    newest = CheckpointName(saved, 1)
    _wait(trial, lambda: newest in trial.dir.all_checkpoints(), f"checkpoint {newest}")
    damage(trial.dir.checkpoint(newest))

    def also() -> list[str]:
        rejected = [e["name"] for e in trial.events("checkpoint_rejected")]
        restored = [e["step"] for e in trial.events("restored")]
        if rejected == [str(newest)] and restored == [saved - SAVE_EVERY]:
            return []
        return [f"rejected {rejected} and restored {restored}, expected [{newest}] and [{saved - SAVE_EVERY}]"]

    return Disturbed(trial, _stopped_at(trial), also=also)


def truncated_checkpoint(lab: Lab, name: str) -> Disturbed:
    return damaged(lab, name, truncate)


def flipped_byte(lab: Lab, name: str) -> Disturbed:
    return damaged(lab, name, flip_one_bit)


_INTERVAL = SAVE_EVERY + 1  # a step may be through that nobody has saved when the interval's save is due

DRILLS: tuple[Drill, ...] = (
    Drill(
        "time-limit",
        "the warning before the time limit, then a requeue",
        time_limit,
        Expected((Cause.TIME_LIMIT.value,), 0),
        Needs.SLURM,
        seconds=150,
    ),
    Drill(
        "warning",
        "the warning signal alone, in the middle of training",
        warning,
        Expected((Cause.TIME_LIMIT.value,), 0),
        Needs.REQUEUE,
    ),
    Drill(
        "preempt-grace",
        "a higher-priority job takes the nodes after 20 s of grace",
        preempt,
        Expected((Cause.PREEMPTED.value,), 0),
        Needs.SLURM,
        seconds=60,
    ),
    Drill(
        "preempt-now",
        "a higher-priority job takes the nodes at once",
        preempt_at_once,
        Expected((Cause.PREEMPTED.value,), _INTERVAL),
        Needs.SLURM,
        seconds=60,
    ),
    Drill(
        "node-power",
        "a node loses its power",
        node_power,
        Expected((Cause.NODE_FAILURE.value,), _INTERVAL),
        Needs.SLURM,
        nodes_broken=1,
        seconds=80,
    ),
    Drill(
        "host-power",
        "the node with the batch script loses its power",
        host_power,
        Expected((None,), _INTERVAL),
        Needs.SLURM,
        nodes_broken=1,
        seconds=80,
    ),
    Drill(
        "network-cut",
        "a node's network cable is pulled; what runs there runs on",
        network_cut,
        Expected((Cause.NODE_FAILURE.value,), _INTERVAL),
        Needs.CABLES,
        nodes_broken=1,
        seconds=80,
    ),
    Drill(
        "mid-save",
        "a node loses its power while it writes a checkpoint",
        mid_save,
        Expected((Cause.NODE_FAILURE.value,), _INTERVAL),
        Needs.SLURM,
        nodes_broken=1,
        seconds=80,
    ),
    Drill("worker-kill", "kill -9 of a worker", worker_kill, Expected((), _INTERVAL)),
    Drill("worker-hang", "a worker does nothing any more", worker_hang, Expected((), _INTERVAL), seconds=35),
    Drill(
        "truncated",
        "the newest checkpoint is cut short, then a worker dies",
        truncated_checkpoint,
        Expected((), 2 * SAVE_EVERY),
    ),
    Drill(
        "flipped-byte",
        "one bit of the newest checkpoint flips, then a worker dies",
        flipped_byte,
        Expected((), 2 * SAVE_EVERY),
    ),
    Drill(
        "scancel",
        "scancel of the job; `stoker resume` later, from where the time counts",
        scancel,
        Expected((Cause.CANCELLED.value,), _INTERVAL),
        Needs.SLURM,
        seconds=60,
    ),
)
