"""The laboratory of the tests that break runs: a real cluster of isolated nodes, real text, and one small run.

Every test disturbs that run in its own way and compares it with the undisturbed one, bit by bit. A folder of tests
takes the fixtures over in its conftest.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.lab import BASE as SMALL_RUN
from stoker.launcher.rehearsal.lab import PAUSE, STEPS
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.layout import CheckpointName
from stoker.launcher.run.verification import verify

# The run that `stoker rehearse` breaks, on two nodes' worth of samples per step.
BASE = [*SMALL_RUN, "train.global_batch=8"]


@contextmanager
def once(directory: Path) -> Iterator[bool]:
    """True for the first of several test processes that comes here; the others wait until it is through."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = directory / "done"
        yield not done.exists()
        done.touch()


class Lab:
    def __init__(self, cluster: Cluster, data: Path, root: Path) -> None:
        self.cluster, self.data, self.root = cluster, data, root

    def argv(self, *argv: str) -> list[str]:
        """A stoker command's line."""
        return [sys.executable, "-m", "stoker.launcher.cli", *argv]

    def stoker(self, *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        done = self.cluster.run(self.argv(*argv), cwd=cwd or self.root, env=env, check=False, timeout=120)
        assert done.returncode == 0, f"stoker {' '.join(argv)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout + done.stderr)

    def launch(
        self,
        name: str,
        *overrides: str,
        failpoints: str = PAUSE,
        nodes: int = 2,
        cwd: Path | None = None,
        no_submit: bool = False,
        env: dict[str, str] | None = None,
    ) -> Trial:
        """Launch the small run; `failpoints` come to the job through the submitter's environment."""
        arguments = [*BASE, *self.source(), f"name={name}", f"run_root={self.root}", "cluster=slurm"]
        arguments += [f"cluster.nodes={nodes}", "cluster.time=60", *overrides]
        options = ["--no-submit"] if no_submit else []
        self.stoker("launch", *options, *arguments, env={**(env or {}), "STOKER_FAILPOINTS": failpoints}, cwd=cwd)
        (path,) = self.root.glob(f"{name}-*")
        return Trial(path)

    def queue(self) -> str:
        return self.cluster.run(["squeue", "-h", "-o", "%A %j %T"]).stdout

    def empty_queue(self) -> None:
        """Wait until nothing runs, waits or is being cleared up."""
        wait_for(lambda: not self.queue(), lambda: f"an empty queue: {self.queue()}", 60.0)

    @contextmanager
    def without_python(self, *nodes: str) -> Iterator[None]:
        """No Python starts on these nodes: as batch host they cannot start the supervisor, as others no agent."""
        program = os.path.realpath(sys.executable)
        for node in nodes:
            assert self.cluster.enter(node, ["mount", "--bind", "/bin/false", program]).returncode == 0
        try:
            yield
        finally:
            for node in nodes:
                self.cluster.enter(node, ["umount", program])

    def source(self) -> list[str]:
        return [f"data.sources=[{{prefix: {self.data}}}]"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory common to all test processes of this session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def text_data(shared: Path) -> Path:
    """A tokenised sample of real text: some of the standard library's sources."""
    directory = shared / "recovery-data"
    with once(directory) as is_first:
        if is_first:
            library = Path(os.__file__).parent
            sources = [str(library / n) for n in ("argparse.py", "typing.py", "inspect.py", "tarfile.py", "ast.py")]
            command = [sys.executable, "-m", "stoker.train.data.tokenize", *sources]
            command += ["--train-vocab", "512", "--out", str(directory / "text"), "--workers", "1"]
            subprocess.run(command, check=True, timeout=120)
    return directory / "text"


@pytest.fixture(scope="session")
def undisturbed(shared: Path, text_data: Path) -> tuple[dict[int, float], dict[str, str]]:
    """Losses by step and digests of the final weights of a run that nothing happened to: no Slurm, no fault."""
    directory = shared / "recovery-undisturbed"
    with once(directory) as is_first:
        if is_first:
            arguments = [*BASE, f"data.sources=[{{prefix: {text_data}}}]", "name=calm", f"run_root={directory}"]
            command = [sys.executable, "-m", "stoker.launcher.cli", "run", *arguments]
            command += ["cluster=local", "cluster.nodes=2"]
            subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL)
    (path,) = directory.glob("calm-*")
    run = Trial(path)
    losses = run.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses, run.weights(STEPS)


@pytest.fixture(scope="session")
def isolated_spec(shared: Path) -> ClusterSpec:
    return ClusterSpec(nodes=6, isolate=True, share=(str(shared.parent),))


@pytest.fixture
def lab_on(text_data: Path, tmp_path: Path) -> Callable[[Cluster], Lab]:
    """A laboratory on any cluster."""
    return lambda cluster: Lab(cluster, text_data, tmp_path)


@pytest.fixture
def lab(isolated_cluster: Cluster, lab_on: Callable[[Cluster], Lab]) -> Iterator[Lab]:
    yield lab_on(isolated_cluster)
    # Whatever a failed test has left must not take nodes away from the next.
    ids = isolated_cluster.run(["squeue", "-h", "-o", "%A"], check=False).stdout.split()
    if ids:
        isolated_cluster.run(["scancel", *ids], check=False)
    for node in isolated_cluster.nodes():
        if not isolated_cluster.processes_on(node):
            isolated_cluster.restart_node(node)
    for node, state in isolated_cluster.node_states().items():
        if "down" in state or "drain" in state:
            isolated_cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)


@pytest.fixture
def same(undisturbed: tuple[dict[int, float], dict[str, str]]) -> Callable[..., None]:
    """Asserts that a run went exactly as the undisturbed one: every loss and the final weights, bit by bit."""

    def check(run: Trial, except_for: CheckpointName | None = None) -> None:
        losses, weights = undisturbed
        assert run.losses() == losses, run.story()
        assert run.weights(STEPS) == weights, run.story()
        for name in run.dir.all_checkpoints():
            if name != except_for:
                verify(run.dir.checkpoint(name))

    return check
