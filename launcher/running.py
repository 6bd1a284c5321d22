"""Where a run runs right now: its newest attempt, the job, the nodes, and how a command is started beside its workers.

Owns: that question and the srun line, for `stoker shell`, `stacks` and `report`. Standard library only.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from .errors import environment_error
from .run.effective import effective_config
from .run.files import read_json
from .run.layout import AttemptDir, RunDir
from .run.submissions import submissions
from .run.views import attempt_events
from .state import State, look, queue_of


@dataclass(frozen=True)
class Running:
    """A run with a living attempt. `job_id`: None where there is no Slurm."""

    run: RunDir
    attempt: AttemptDir
    submission: int
    job_id: str | None
    cluster: str | None  # Slurm's name of it, where the submission named one
    nodes: tuple[str, ...]  # by rank; () until all have joined
    node_count: int
    python: str  # of the job, on the hosts
    config: dict[str, Any]

    def node_of(self, rank: int) -> str | None:
        """The node of a rank; None while that is not known."""
        at = rank // int(self.config["cluster"]["procs_per_node"])
        return self.nodes[at] if 0 <= at < len(self.nodes) else None


def running(run: RunDir) -> Running:
    """What works on the run.

    Raises:
        UserError: nothing does, or not from here; says what the run's state is.
    """
    state = look(run, queue_of([run]))
    attempts = run.all_attempts()
    if state.state not in (State.RUNNING, State.SUSPENDED) or not attempts:
        detail = f" ({state.detail})" if state.detail else ""
        raise environment_error(f"{run.path}: not running: {state.state.value}{detail}; `stoker status` shows it")
    attempt = attempts[-1]
    try:
        start = read_json(attempt.start)
    except FileNotFoundError:
        raise environment_error(f"{run.path}: attempt {attempt.number} is only starting; try again") from None
    job_id = str(start["job_id"]) if start.get("job_id") else None
    host = str(start.get("host", ""))
    if job_id is None and host != socket.gethostname():
        raise environment_error(f"{run.path}: runs without Slurm on {host}; do this there")
    number = int(start.get("submission", submissions(run)[-1].number))
    config = effective_config(run, number)
    return Running(
        run,
        attempt,
        number,
        job_id,
        _cluster(run, number),
        nodes_of(attempt),
        int(config["cluster"]["nodes"]),
        _python(run, config),
        config,
    )


def nodes_of(attempt: AttemptDir) -> tuple[str, ...]:
    """Nodes of the newest generation, by rank; before the first, those that have joined."""
    found: tuple[str, ...] = ()
    for event in attempt_events(attempt):
        if event["event"] in ("form", "gathered") and isinstance(event.get("nodes"), list):
            found = tuple(map(str, event["nodes"]))
    return found


def culprit_node(attempt: AttemptDir) -> str | None:
    """The node that the supervisor named last, since the newest generation was formed."""
    node = None
    for event in attempt_events(attempt):
        if event["event"] == "form":
            node = None
        elif event["event"] in ("slow", "trouble", "agent_lost") and event.get("node"):
            node = str(event["node"])
    return node


def _cluster(run: RunDir, submission: int) -> str | None:
    try:
        name = read_json(run.submissions / f"{submission:04d}.job.json").get("cluster")
    except (FileNotFoundError, ValueError):
        return None
    return str(name) if name else None


def _python(run: RunDir, config: dict[str, Any]) -> str:
    chosen = config["cluster"].get("python")
    if chosen:
        return str(chosen)
    try:
        return str(read_json(run.env)["python"])
    except (FileNotFoundError, ValueError, KeyError):
        return "python3"


def srun_command(r: Running, nodes: list[str], *options: str) -> list[str]:
    """srun beside the agents, one task on each of `nodes` (all of the job's, if empty), up to the program's name.

    --overlap: it takes no CPU, memory or GPU away from the workers.
    """
    assert r.job_id is not None
    count = str(len(nodes) or r.node_count)
    command = ["srun", f"--jobid={r.job_id}", "--overlap", f"--nodes={count}", f"--ntasks={count}"]
    cpus = f"--cpus-per-task={r.config['cluster']['cpus_per_task']}"
    command += ["--ntasks-per-node=1", cpus, "--mpi=none", "--cpu-bind=none", "--export=ALL"]
    command += [f"--clusters={r.cluster}"] if r.cluster else []
    command += [f"--nodelist={','.join(nodes)}"] if nodes else []
    return [*command, f"--chdir={r.run.path}", *options]


def helper(r: Running, module: str, *arguments: str) -> list[str]:
    """The words that run a module of the run's frozen code."""
    return [r.python, str(r.run.path / "bootstrap.py"), module, str(r.run.path), *arguments]
