"""A rehearsal cluster as commands and tests use it: start or attach, run commands, break nodes, mend them, end it.

    with Cluster.start(ClusterSpec(nodes=4), directory) as cluster:
        job = cluster.submit(["--wrap=sleep 60"])
        cluster.crash("n1")

The cluster itself lives in its keeper (keeper.py). Faults act on processes directly, so they work while it is busy.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from . import files, nodes, observe, processes, programs
from .observe import Job
from .processes import Process
from .spec import ClusterSpec, Layout

_OF_ANOTHER_JOB = re.compile(r"(SLURM|SLURMD|SLURMCTLD|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|PMI|PMIX)_")


class ClusterError(Exception):
    """A cluster that cannot be brought up, reached or taken down. `log` holds the last lines of the daemon to blame."""

    def __init__(self, message: str, log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message, self.log = message, tuple(log)

    def __str__(self) -> str:
        """With the log: whoever meets the error as a traceback has nothing else, once the cluster's files are gone."""
        return "\n".join([self.message, *(f"    {line}" for line in self.log)])


class NotUp(ClusterError):
    """No cluster is up in the directory."""


class Cluster:
    """A cluster that is up. Make one with start or attach."""

    def __init__(self, layout: Layout, spec: ClusterSpec, keeper: int) -> None:
        self.layout = layout
        self.spec = spec
        self.keeper = keeper
        # Of the process that started the cluster only: its hold on the keeper.
        self._starter: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None

    # Life

    @staticmethod
    def start(spec: ClusterSpec, directory: str | Path) -> Cluster:
        """Bring a cluster up and wait until its nodes are idle. It ends with this process unless detached.

        Raises ClusterError when programs are missing, a cluster is up there already or a daemon fails (everything is
        taken down again then), ValueError for a directory that cannot be used.
        """
        layout = Layout.of(directory)
        files.refuse_foreign(layout)
        if lacking := programs.missing(spec):
            raise ClusterError(programs.how_to_install(spec, lacking))
        if spec.isolate:
            nodes.check_shared(spec, layout)
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as output:
            keeper = _start_keeper(layout, theirs, output)
            theirs.close()
            try:
                ours.sendall(spec.to_json().encode() + b"\n")
                report = json.loads(ours.makefile().readline() or "{}")
            except BaseException:
                # The keeper sees the end of the line and takes everything down; let it finish.
                ours.close()
                keeper.wait()
                raise
            if "pid" not in report:
                ours.close()
                keeper.wait()
                output.seek(0)
                said = output.read().decode(errors="replace").splitlines()
                raise ClusterError(report.get("error", "the keeper ended without a word"), report.get("log", said))
        cluster = Cluster(layout, spec, keeper.pid)
        cluster._starter, cluster._child = ours, keeper
        return cluster

    @staticmethod
    def attach(directory: str | Path) -> Cluster:
        """A cluster that is up in a directory. Raises NotUp when there is none."""
        layout = Layout.of(directory)
        report = _ask(layout, {"do": "status"})
        return Cluster(layout, ClusterSpec.from_json(layout.spec.read_text()), int(report["pid"]))

    def detach(self) -> None:
        """Let the cluster live on when this process ends."""
        if self._starter is not None:
            self._starter.sendall(b"detach\n")
            self._starter.close()
            self._starter = None

    def down(self, keep_logs: bool = False) -> None:
        """Kill everything, remove all files (with `keep_logs` all but DIR/log), check that nothing is left. Raises
        ClusterError naming what is."""
        if processes.find(self.keeper) is not None:
            _ask(self.layout, {"do": "down", "keep_logs": keep_logs}, timeout=60)
            processes.wait_until_gone(self.keeper, 10)
        if self._starter is not None:
            self._starter.close()
            self._starter = None
        if self._child is not None:
            self._child.wait()
        if left := remains(self.layout, keep_logs):
            raise ClusterError(f"not all of {self.layout.root} is gone: {'; '.join(left)}")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Commands

    @property
    def env(self) -> dict[str, str]:
        """This process's environment for clients of the cluster: its SLURM_CONF and PATH, no other job's settings."""
        kept = {key: value for key, value in os.environ.items() if not _OF_ANOTHER_JOB.match(key)}
        kept.pop(processes.MARKER, None)
        return {**kept, **self.exports()}

    def exports(self) -> dict[str, str]:
        """What a shell must export to use the cluster."""
        path = programs.search_path(self.spec)
        if self.spec.isolate:
            # Commands there enter the cluster's namespaces first.
            path = f"{self.layout.bin}{os.pathsep}{path}"
        return {"SLURM_CONF": str(self.layout.slurm_conf), "PATH": path}

    def argv_inside(self, argv: Sequence[str], cwd: str | Path | None = None) -> list[str]:
        """A command line that runs `argv` beside the controller, where its addresses can be reached."""
        if not self.spec.isolate:
            return list(argv)
        return [*files.enter_argv(self.layout, self.keeper), "env", f"--chdir={cwd or os.getcwd()}", *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout: float | None = 60,
        input: str | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a client of the cluster, output captured as text. `env` is added to the environment. Raises
        ClusterError with its output when `check` and it fails, subprocess.TimeoutExpired after `timeout` seconds."""
        done = subprocess.run(
            self.argv_inside(argv, cwd),
            env={**self.env, **(env or {})},
            cwd=cwd,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise ClusterError(f"{' '.join(argv)}: status {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done

    def submit(self, arguments: Sequence[str], *, cwd: str | Path | None = None) -> str:
        """sbatch; returns the job id."""
        return self.run(["sbatch", "--parsable", *arguments], cwd=cwd).stdout.strip().split(";")[0]

    def job(self, job_id: str | int) -> Job:
        """What Slurm knows of a job. Raises ClusterError when it does not know it."""
        return observe.parse_job(self.run(["scontrol", "show", "job", str(job_id)]).stdout)

    def node_states(self) -> dict[str, str]:
        """Node to state as sinfo says it, such as "idle", "mixed", "down*"."""
        return observe.parse_node_states(self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout)

    def wait_for_job(self, job_id: str | int, *states: str, timeout: float = 60) -> Job:
        """Poll until the job is in one of `states`. Raises TimeoutError with its last state."""
        seen: list[Job] = []

        def there() -> bool:
            seen[:] = [self.job(job_id)]
            return seen[0].state in states

        wait_until(there, timeout, lambda: f"job {job_id} to be {' or '.join(states)}: {seen}")
        return seen[0]

    def wait_for_nodes(self, state: str, *names: str, timeout: float = 60) -> None:
        """Poll until the nodes (all if none is named) are in `state`; a star at its end is not compared. Raises
        TimeoutError with what they are in."""
        wanted = names or self.spec.node_names()
        seen: dict[str, str] = {}

        def there() -> bool:
            seen.update(self.node_states())
            return all(seen[name].rstrip("*") == state for name in wanted)

        wait_until(there, timeout, lambda: f"{', '.join(wanted)} to be {state}: {seen}")

    # Nodes

    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, powered on or not."""
        return self.spec.node_names()

    def processes_on(self, node: str) -> list[Process]:
        """What runs on a node, first the process that stands for the machine. Empty when it is powered off."""
        root = self._root(node)
        return [] if root is None else nodes.members(root, self.spec.isolate)

    def argv_on(self, node: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` in a node's namespaces (on a plain cluster: with its name set)."""
        if not self.spec.isolate:
            self.spec.node_number(node)
            return ["env", f"SLURMD_NODENAME={node}", *argv]
        kinds = ["--net", "--mount", "--uts", "--ipc", "--pid"]
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self._powered(node)}", *kinds, *user, "env", "--chdir=/", *argv]

    def enter(self, node: str, argv: Sequence[str], timeout: float | None = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, output captured as text."""
        return subprocess.run(
            self.argv_on(node, argv),
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def crash(self, node: str) -> None:
        """Power cut: everything on the node dies at once, on an isolated one without a last word on the network."""
        root = self._powered(node)
        if self.spec.isolate:
            _ask(self.layout, {"do": "cut", "node": node})
        if left := nodes.power_off(root, self.spec.isolate):
            raise ClusterError(f"{node}: still running: {left}")

    def restart_node(self, node: str) -> None:
        """Power a crashed node on again, or start slurmd on a node that has lost only that. Slurm takes the node back
        by itself, in a few seconds. Raises ClusterError when slurmd runs there."""
        root = self._root(node)
        if root is not None and self._slurmd(root):
            raise ClusterError(f"{node} is up, with its slurmd")
        _ask(self.layout, {"do": "start", "node": node})

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL only the node's slurmd; steps and tasks go on."""
        root = self._powered(node)
        processes.kill_until_none(lambda: self._slurmd(root))

    def cut(self, node: str) -> None:
        """Pull the node's network cable: its processes go on, nobody is told. Isolated clusters only."""
        self._cable(node, "cut")

    def heal(self, node: str) -> None:
        """Plug the node's network cable in again."""
        self._cable(node, "heal")

    def freeze(self, node: str) -> None:
        """SIGSTOP everything on the node: it holds its connections and answers nothing."""
        if left := nodes.stop(self._powered(node), self.spec.isolate):
            raise ClusterError(f"{node}: would not stop: {left}")

    def thaw(self, node: str) -> None:
        """Let a frozen node go on."""
        nodes.resume(self._powered(node), self.spec.isolate)

    def preempt(self, job_id: str | int, seconds: int = 5) -> str:
        """Submit a job to partition `urgent` that needs all the nodes of a running job, for `seconds`. Returns its
        id. Other jobs on those nodes are preempted too. Raises ClusterError when the job is not running."""
        job = self.job(job_id)
        if job.state != "RUNNING":
            raise ClusterError(f"job {job_id} is {job.state}: only a running job can be preempted")
        where = [f"--nodelist={job.nodes}", f"--nodes={job.node_count}", "--exclusive", "--partition=urgent"]
        what = ["--no-requeue", "--job-name=preemptor", "--output=/dev/null", f"--wrap=exec sleep {seconds}"]
        return self.submit([*where, *what], cwd="/")

    # Controller

    def stop_controller(self, kill: bool = False) -> None:
        """End slurmctld: jobs go on, and Slurm's commands get no answer. It saves its state first, unless `kill` (a
        crash). Raises ClusterError when it does not run."""
        _ask(self.layout, {"do": "stop_controller", "kill": kill}, timeout=30)

    def start_controller(self, timeout: float = 30) -> None:
        """Start slurmctld again, with its state, and wait until it answers. Raises ClusterError when it runs already,
        TimeoutError when it does not answer."""
        _ask(self.layout, {"do": "start_controller"})
        wait_until(
            lambda: self.run(["scontrol", "show", "partition", "main"], check=False, timeout=None).returncode == 0,
            timeout,
            lambda: "slurmctld to answer",
        )

    def status(self) -> dict[str, Any]:
        """The keeper's own view: its pid, names of running daemons, names of those that ended."""
        return _ask(self.layout, {"do": "status"})

    def _root(self, node: str) -> int | None:
        self.spec.node_number(node)
        return nodes.roots(self.keeper).get(node)

    def _powered(self, node: str) -> int:
        root = self._root(node)
        if root is None:
            raise ClusterError(f"{node} is powered off: `stoker cluster start {node}` first")
        return root

    def _slurmd(self, root: int) -> list[Process]:
        return [process for process in nodes.members(root, self.spec.isolate) if process.name == "slurmd"]

    def _cable(self, node: str, verb: str) -> None:
        self._powered(node)
        if not self.spec.isolate:
            raise ClusterError(f"{verb}: nodes of a plain cluster have no cable: bring it up with --isolate")
        _ask(self.layout, {"do": verb, "node": node})


def wait_until(there: Callable[[], bool], timeout: float, what: Callable[[], str], pause: float = 0.2) -> None:
    """Poll; raises TimeoutError with what was waited for."""
    deadline = time.monotonic() + timeout
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what()}")
        time.sleep(pause)


def clear(directory: str | Path, keep_logs: bool = False) -> bool:
    """Remove what a cluster whose keeper is gone has left. Returns whether there was anything. Raises ClusterError when
    something stays."""
    layout = Layout.of(directory)
    if not layout.marker.exists() and not processes.belonging_to(layout.root):
        return False
    # slurmd's children change their environment and open files as they start: what was between two programs at one look
    # is found at the next.
    for _ in range(4):
        processes.kill_until_none(lambda: processes.belonging_to(layout.root))
        time.sleep(0.1)
    files.remove(layout, keep_logs)
    if not keep_logs:
        files.remove_marker(layout)
    if left := remains(layout, keep_logs):
        raise ClusterError(f"not all of {layout.root} is gone: {'; '.join(left)}")
    return True


def remains(layout: Layout, keep_logs: bool = False) -> list[str]:
    """Traces of a cluster on this machine: processes, mounts, files. Links between nodes are gone with the last process
    of their network namespace."""
    found = [f"process {process.pid} {process.command()}" for process in processes.belonging_to(layout.root)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line.split()[4]}" for line in mounts if f"{layout.root}/" in line]
    kept = {layout.log} if keep_logs else set()
    found += [str(path) for path in (*layout.directories(), layout.spec) if path.exists() and path not in kept]
    return found


def _start_keeper(layout: Layout, line: socket.socket, output: IO[bytes]) -> subprocess.Popen[bytes]:
    kept = ("PATH", "HOME", "LANG", "TZ", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.keeper", str(layout.root), str(line.fileno())],
        env={**environment, processes.MARKER: str(layout.root)},
        pass_fds=[line.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _ask(layout: Layout, request: Mapping[str, Any], timeout: float = 20) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(timeout)
        try:
            line.connect(str(layout.control))
        except (FileNotFoundError, ConnectionRefusedError):
            raise NotUp(f"no cluster is up in {layout.root}: `stoker cluster up` first") from None
        except PermissionError:
            raise ClusterError(f"the cluster in {layout.root} belongs to another user") from None
        line.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(line.makefile().readline() or '{"error": "the keeper hung up"}')
    if "error" in answer:
        raise ClusterError(str(answer["error"]))
    return answer
