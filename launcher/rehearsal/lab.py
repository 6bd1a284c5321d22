"""The small run that drills break: launched again and again, always the same, on a cluster or here.

Owns: its configuration, its text, and how it is started in each place. Breaking it is drills.py's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..errors import environment_error
from . import processes
from .cluster import Cluster
from .ground import stoker_argv
from .trial import Trial

STEPS, SAVE_EVERY = 40, 10
PAUSE = "step:pause-60"  # milliseconds per step, so that there is time to break something in the middle
HANG_TIMEOUT, LEASE = 6, 8  # seconds
_TEXT = ("argparse.py", "ast.py", "inspect.py", "tarfile.py", "typing.py")  # of Python's standard library
_START_LIMIT = 120.0  # seconds for a command that does not wait for the run
_END_LIMIT = 30.0  # seconds in which what was asked to end has to

BASE = (
    "model=tiny",
    "model.vocab_size=512",
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=128",
    "data.seq_len=64",
    f"train.steps={STEPS}",
    "train.micro_batch=2",
    "optim.warmup_steps=5",
    f"checkpoint.interval={SAVE_EVERY}",
    "checkpoint.keep=100",
    f"resilience.lease={LEASE}",
    "resilience.warning=60",
    "cluster.procs_per_node=1",
)


@dataclass
class Lab:
    """Where drills take place. `cluster`: one of our own; None: here, in this allocation (`in_allocation`) or on this
    machine. `nodes` is the number of nodes of a run, and of its ranks."""

    root: Path
    cluster: Cluster | None = None
    in_allocation: bool = False
    nodes: int = 2
    _mine: list[subprocess.Popen[str]] = field(default_factory=list)  # all that we have started and that may still run
    _is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def last_rank(self) -> int:
        return self.nodes - 1

    @property
    def text(self) -> Path:
        return self.root / "data" / "text"

    def prepare(self) -> None:
        """Tokenise the text."""
        library = Path(sysconfig.get_path("stdlib"))
        options = ["--train-vocab", "512", "--out", str(self.text), "--workers", "1"]
        self.stoker("data", "tokenize", *(str(library / name) for name in _TEXT), *options)

    def stoker(self, *argv: str, failpoints: str = "") -> str:
        """Run a stoker command; its output. Raises UserError when it fails."""
        code, said = self._run(argv, failpoints)
        if code != 0:
            raise environment_error(f"stoker {argv[0]}: exit code {code}: {said[-2000:]}")
        return said

    def _run(self, argv: Sequence[str], failpoints: str = "") -> tuple[int, str]:
        """Exit code and words of a stoker command. Raises subprocess.TimeoutExpired."""
        process = self._start(argv, failpoints, subprocess.PIPE)
        try:
            said, _ = process.communicate(timeout=_START_LIMIT)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        finally:
            with self._lock:
                self._mine.remove(process)
        return process.returncode, said

    def _start(self, argv: Sequence[str], failpoints: str, output: int | IO[bytes]) -> subprocess.Popen[str]:
        """Start a stoker command here. Raises UserError once the lab is closed: a drill's thread does not know that."""
        with self._lock:
            if self._is_closed:
                raise environment_error("the rehearsal is being stopped")
            process = subprocess.Popen(
                stoker_argv(argv),
                env=self._env(failpoints),
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self._mine.append(process)
        return process

    def slurm(self, *argv: str) -> str:
        """Run a command as a client of our own cluster."""
        return self.own_cluster.run(argv).stdout

    @property
    def own_cluster(self) -> Cluster:
        assert self.cluster is not None, "this drill needs a cluster of our own"
        return self.cluster

    def launch(self, name: str, *overrides: str, failpoints: str = PAUSE) -> Trial:
        """Start the run. `failpoints` reach its workers through the environment (run/failpoints.py)."""
        on_slurm = self.cluster is not None or self.in_allocation
        arguments = [*BASE, f"data.sources=[{{prefix: {self.text}}}]", f"name={name}", f"run_root={self.root}"]
        arguments += [f"cluster={'slurm' if on_slurm else 'local'}", f"cluster.nodes={self.nodes}"]
        arguments += [f"resilience.hang_timeout={HANG_TIMEOUT}", "cluster.omp_threads=1"]
        arguments.append(f"train.global_batch={4 * self.nodes}")  # two micro-steps on any number of nodes
        # Nodes are shared with no other drill: a node's fault must be one run's fault.
        arguments += ["cluster.exclusive=true", "cluster.time=60"] if self.cluster is not None else []
        arguments += overrides
        if self.cluster is not None:
            self.stoker("launch", *arguments, failpoints=failpoints)
        else:
            self._run_here(name, arguments, failpoints)
        return Trial(self._directory(name))

    def _run_here(self, name: str, arguments: list[str], failpoints: str) -> None:
        """`stoker run` in the background; it works in an allocation and without Slurm."""
        log = self.root / f"{name}.log"
        with open(log, "wb") as output:
            process = self._start(["run", *arguments], failpoints, output)
        deadline = time.monotonic() + _START_LIMIT
        while not list(self.root.glob(f"{name}-*/submissions/*.local.json")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise environment_error(
                    f"stoker run did not start; its words: {log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.1)

    def _directory(self, name: str) -> Path:
        (path,) = (found.parent for found in self.root.glob(f"{name}-*/run.json"))
        return path

    def _env(self, failpoints: str) -> dict[str, str]:
        env = dict(os.environ) if self.cluster is None else self.cluster.env
        return {**env, "OMP_NUM_THREADS": "1", "STOKER_FAILPOINTS": failpoints}

    def stop(self, name: str) -> None:
        """End what is left of a drill's run, unless `close` does; the run directory stays."""
        for run in [] if self._is_closed else self._unended(name):
            code, said = self._run(["cancel", str(run)])
            if code != 0:
                print(said, file=sys.stderr)

    def _unended(self, name: str) -> list[Path]:
        found = [path.parent for path in self.root.glob(f"{name}-*/run.json")]
        return [path for path in found if not Trial(path).is_over()]

    def close(self) -> None:
        """End what still runs here, and let nothing start any more."""
        with self._lock:
            self._is_closed = True
            mine = list(self._mine)
        # A run takes it as its end, and a command that has not got as far as a run just ends: no run is asked by name,
        # since one that is only being made has none yet.
        for process in mine:
            process.terminate()
        deadline = time.monotonic() + _END_LIMIT
        for process in mine:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        for process in mine:
            if process.poll() is None:
                # Its supervisor is in a session of its own, and would go on.
                below = processes.descendants(process.pid)
                process.kill()
                processes.send(signal.SIGKILL, below)
                process.wait()
