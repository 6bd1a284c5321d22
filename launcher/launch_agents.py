"""How agents are started: by one srun over the allocation, or directly on this machine without Slurm.

Owns: the srun line (golden test) and the local stand-in. The pinned flags: see docs/architecture.md, "In the job".
What stands before the interpreter in a container is container.py's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from .container import Entry, entry, environment_inside
from .protocol import ADDRESSES, ATTEMPT, INSIDE, LEASE, NODE, TOKEN
from .run.bootstrap import LOCAL_DIR, local_parents
from .run.layout import AttemptDir, RunDir
from .srun_words import Failure, SrunWords

_PAUSE = 2.0  # seconds between two tries to get a step
_PATIENCE = 60.0  # seconds for which that is tried


class Launch(Protocol):
    def poll(self) -> int | None:
        """Exit code once all agents are gone, else None."""

    def failures(self) -> list[Failure]:
        """Agents that are said to have failed, since the last call."""

    def last_words(self) -> str:
        """What was said last of why nothing started; "" if nothing was."""

    def end(self) -> None:
        """Wait a moment for the agents to quit, then kill."""


def srun_command(run: RunDir, config: dict[str, Any], inside: Entry) -> list[str]:
    """One agent per node. Nothing here depends on srun's changing defaults."""
    cluster = config["cluster"]
    nodes = str(cluster["nodes"])
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cluster['cpus_per_task']}",
        "--wait=0",
        "--kill-on-bad-exit=0",
        "--mpi=none",
        "--input=none",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
        *inside.options,
        *agent_command(run, config, inside),
    ]


def agent_command(run: RunDir, config: dict[str, Any], inside: Entry) -> list[str]:
    staged = ["--staged"] if config["cluster"]["stage_env"] else []
    bootstrap = str(run.path / "bootstrap.py")
    return [*inside.words, inside.python, bootstrap, *staged, "stoker.launcher.agent", str(run.path)]


def local_nodes(count: int) -> list[str]:
    return [f"local{i}" for i in range(count)]


def launch_agents(
    run: RunDir, attempt: AttemptDir, config: dict[str, Any], addresses: str, token: str, job_id: str | None
) -> Launch:
    env = os.environ | {
        ADDRESSES: addresses,
        TOKEN: token,
        ATTEMPT: str(attempt.number),
        LEASE: str(config["resilience"]["lease"]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(config["cluster"]["omp_threads"])),
    }
    # Mounted at the same path, so that inside and outside agree on it.
    local = str(next((p for p in local_parents(os.environ) if p.is_dir()), "/tmp"))
    apptainer = next((p for p in ("apptainer", "singularity") if shutil.which(p)), "apptainer")
    inside = entry(config, str(run.path), sys.executable, local, apptainer)
    runtime = config["container"]["runtime"]
    if runtime != "none":
        env = environment_inside(env, config["cluster"]["env"], (sys.prefix,)) | {LOCAL_DIR: local, INSIDE: runtime}
    if job_id is not None:
        command = srun_command(run, config, inside)
        return _Srun(lambda: subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE))
    command = agent_command(run, config, inside)
    if runtime == "none":
        command = [sys.executable, "-m", "stoker.launcher.agent", str(run.path)]  # the frozen code is on our path
    # A session of their own: Ctrl-C in the terminal is the supervisor's to interpret.
    return _Processes(
        [
            subprocess.Popen(command, env=env | {NODE: n}, stdin=subprocess.DEVNULL, start_new_session=True)
            for n in local_nodes(config["cluster"]["nodes"])
        ]
    )


class _Processes:
    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._take(processes)

    def _take(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._words = [SrunWords(p.stderr) for p in processes if p.stderr is not None]

    def poll(self) -> int | None:
        codes = [p.poll() for p in self._processes]
        if any(c is None for c in codes):
            return None
        for words in self._words:
            words.join()
        return max(codes, key=lambda c: abs(c or 0))

    def failures(self) -> list[Failure]:
        return [failure for words in self._words for failure in words.take()]

    def last_words(self) -> str:
        return next((words.last for words in self._words if words.last), "")

    def end(self) -> None:
        for process in self._processes:
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Srun(_Processes):
    """srun, begun again as long as Slurm has not done with the job's start before this one: a requeued job's batch
    script may run already while no step can be had. A job that is really being ended hears of it by its signal."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        super().__init__([start()])
        self._start, self._until = start, time.monotonic() + _PATIENCE
        self._again_at: float | None = None

    def poll(self) -> int | None:
        now = time.monotonic()
        if self._again_at is None:
            code = super().poll()
            if not code or not self._words[0].is_too_early or now > self._until:
                return code
            self._again_at = now + _PAUSE
        elif now >= self._again_at:
            self._again_at = None
            self._take([self._start()])
        return None
