"""The small run that drills break: launched again and again, always the same, on a cluster or here.

Owns: its configuration, its text, and how it is started in each place. Breaking it is drills.py's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import environment_error
from .cluster import Cluster
from .ground import stoker_argv
from .trial import Trial

STEPS, SAVE_EVERY = 40, 10
PAUSE = "step:pause-60"  # milliseconds per step, so that there is time to break something in the middle
HANG_TIMEOUT, LEASE = 6, 8  # seconds
_TEXT = ("argparse.py", "ast.py", "inspect.py", "tarfile.py", "typing.py")  # of Python's standard library
_START_LIMIT = 120.0  # seconds for a command that does not wait for the run

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
    _mine: list[subprocess.Popen[bytes]] = field(default_factory=list)
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
        done = subprocess.run(
            stoker_argv(argv),
            env=self._env(failpoints),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_LIMIT,
            check=False,
        )
        if done.returncode != 0:
            raise environment_error(
                f"stoker {argv[0]}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            )
        return done.stdout

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
            process = subprocess.Popen(
                stoker_argv(["run", *arguments]),
                env=self._env(failpoints),
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with self._lock:
            self._mine.append(process)
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
        """End what is left of a drill's run (`*`: of every run); the run directories stay."""
        for found in self.root.glob(f"{name}-*/run.json"):
            if not Trial(found.parent).is_over():
                subprocess.run(
                    stoker_argv(["cancel", str(found.parent)]),
                    env=self._env(""),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=sys.stderr,
                    timeout=_START_LIMIT,
                    check=False,
                )

    def close(self) -> None:
        """End what still runs here."""
        if self._mine:
            self.stop("*")
        for process in self._mine:
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
