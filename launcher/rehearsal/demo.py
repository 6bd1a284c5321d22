"""`stoker demo` (`make demo`): train a small Llama on a private Slurm, switch a node off, watch the run finish.

Owns: the stages and their order, and what makes the demonstration fail. Everything it does is a command that it
prints; what happens meanwhile is told by narrate.py, what it cost is measured by measure.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, environment_error
from ..protocol import NODE
from ..run.effective import effective_config
from ..run.files import read_json
from ..run.layout import RunDir, open_run
from . import processes
from .cluster import Cluster
from .demo_summary import problems, screen, shown
from .ground import Ground, choose, orderly_end, short_directory, stoker_argv, temporary_cluster
from .narrate import Narrator, Terminal
from .spec import ClusterSpec
from .trial import Trial

NODES = 4
VOCABULARY = 2048  # model.vocab_size of experiment=demo
PATIENCE = 600.0  # seconds; a bound against waiting for ever
_LOOK_EVERY = 0.2
_OVER_IN_SLURM = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "stoker demo",
        description="Train a small Llama on a private 4-node Slurm, switch a node off, watch the run finish.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to experiment=demo")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="keeps the run (%(default)s)")
    parser.add_argument("--local", action="store_true", help="without Slurm: cluster=local")
    options = parser.parse_intermixed_args(argv)
    out = options.out.expanduser()
    with orderly_end():
        try:
            return demonstrate(out, options.local, options.overrides)
        except KeyboardInterrupt as e:
            print(
                f"\nstoker demo: stopped by {str(e) or 'Ctrl-C'}; nothing that it started runs any more",
                file=sys.stderr,
            )
            return 130


def demonstrate(out: Path, is_local: bool, overrides: list[str]) -> int:
    """All stages. Raises UserError naming the stage that did not happen."""
    terminal = Terminal()
    ground, lacking = (Ground.LOCAL, "") if is_local else choose()
    print(_TITLES[ground])
    if lacking:
        print(f"({lacking}: so it is done {_INSTEAD[ground]})")
    out.mkdir(parents=True, exist_ok=True)
    with _cluster(ground, out, terminal) as cluster:
        stage = Stage(terminal, cluster, out)
        data = stage.tokenize()
        try:
            run = stage.launch(data, overrides)
            stage.watch(run)
        except BaseException:
            stage.stop()
            raise
        return conclude(run, stage, terminal)


_TITLES = {
    Ground.ISOLATED: "stoker demo: a small Llama on a private Slurm of 4 nodes on this machine; one loses its power",
    Ground.PLAIN: "stoker demo: a small Llama on a private Slurm of 4 nodes on this machine; one is killed",
    Ground.LOCAL: "stoker demo: a small Llama on two local agents; one is killed",
}
_INSTEAD = {Ground.PLAIN: "with nodes that share this machine's network", Ground.LOCAL: "with cluster=local"}


@contextmanager
def _cluster(ground: Ground, out: Path, terminal: Terminal) -> Iterator[Cluster | None]:
    if ground is Ground.LOCAL:
        yield None
        return
    base = short_directory("stoker-demo")
    is_isolated = ground is Ground.ISOLATED
    shared = [str(out.resolve())] if is_isolated and Path("/tmp") in out.resolve().parents else []
    options = ["--isolate"] * is_isolated + [word for path in shared for word in ("--share", path)]
    terminal.command(["stoker", "cluster", "up", "--nodes", str(NODES), *options, "--dir", str(base / "c")])
    with temporary_cluster(ClusterSpec(nodes=NODES, isolate=is_isolated, share=tuple(shared)), base) as cluster:
        terminal.say(f"Slurm is up: {', '.join(f'{n} {s}' for n, s in cluster.node_states().items())}")
        terminal.say(f'$ eval "$(stoker cluster env --dir {cluster.layout.root})"')
        yield cluster
        terminal.command(["stoker", "cluster", "down", "--dir", str(cluster.layout.root)])
    terminal.say("the cluster is gone without a trace")


@dataclass
class Event:
    """The disturbance. `node` is the victim; `at` Unix seconds; `step` the highest completed step then."""

    node: str
    at: float
    step: int


class Stage:
    """The stages; each prints its commands and raises UserError if it does not come about."""

    def __init__(self, terminal: Terminal, cluster: Cluster | None, out: Path) -> None:
        self.terminal, self.cluster, self.out = terminal, cluster, out
        self.event: Event | None = None
        self.others = self._runs()
        self.env = {**(dict(os.environ) if cluster is None else cluster.env), "OMP_NUM_THREADS": "1"}

    def stoker(self, *argv: str, what: str) -> str:
        """Run a stoker command, printing it; its output."""
        self.terminal.command(["stoker", *argv])
        done = subprocess.run(
            stoker_argv(argv), env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
            raise environment_error(f"{what} failed (exit code {done.returncode}):\n{said}")
        return done.stdout

    # Data.

    def tokenize(self) -> Path:
        """Real text that every machine has: the sources of Python's standard library."""
        library = Path(sysconfig.get_path("stdlib"))
        files = sorted(library.glob("*.py"))
        size = sum(f.stat().st_size for f in files)
        version = ".".join(map(str, sys.version_info[:3]))
        prefix = self.out / "data" / f"stdlib-{version}-{VOCABULARY}"
        self.terminal.say(f"text: Python's own standard library, {len(files)} files, {size / 1e6:.1f} MB")
        if prefix.with_name(f"{prefix.name}.meta.json").exists():
            self.terminal.say(f"tokenised already: {prefix}")
            return prefix
        options = ["--train-vocab", str(VOCABULARY), "--workers", "2", "--out", str(prefix)]
        said = self.stoker("data", "tokenize", f"{library}/*.py", *options, what="tokenising")
        self.terminal.say(said.strip().splitlines()[-1].rpartition(": ")[2])
        return prefix

    # The run.

    def launch(self, data: Path, overrides: list[str]) -> RunDir:
        where = "local" if self.cluster is None else "slurm"
        arguments = ["experiment=demo", f"cluster={where}", "cluster.nodes=2", f"data.sources.0.prefix={data}"]
        said = self.stoker("launch", *arguments, f"run_root={self.out}", *overrides, what="the launch")
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in said.splitlines())}
        run = open_run(fields["run directory"])
        self.terminal.say(f"submitted as job {fields['job']}" if "job" in fields else "started in the background")
        self.terminal.say(f"run directory: {run.path}")
        return run

    def watch(self, run: RunDir) -> None:
        """Follow the run to its end and disturb it on the way."""
        trial, narrator = Trial(run.path), Narrator(run, self.terminal)
        config = effective_config(run)
        saved, when = disturbance(config["train"]["steps"], config["checkpoint"]["interval"])

        # Saves are asynchronous: with short steps, one may be on its way for longer than half an interval.
        def is_time() -> bool:
            return trial.step() >= when and any(c.step >= saved for c in trial.dir.all_checkpoints())

        self._follow(trial, narrator, is_time, f"step {when} and the checkpoint of step {saved}")
        self.event = self._break_a_node(trial)
        narrator.broken_at, narrator.reached = self.event.at, self.event.step
        self._follow(trial, narrator, lambda: False, "its end")

    def _follow(self, trial: Trial, narrator: Narrator, is_there: Callable[[], bool], what: str) -> None:
        """Narrate until `is_there`, or to the run's end if that is what is waited for."""
        deadline, ask_slurm = time.monotonic() + PATIENCE, time.monotonic() + 10.0
        while True:
            is_over = trial.is_over()
            narrator.look()
            if is_there() or (is_over and what == "its end"):
                return
            if is_over:
                raise environment_error(f"the run ended before {what}: {_how_it_stands(trial)}")
            if time.monotonic() > deadline:
                raise environment_error(
                    f"the run did not get to {what} within {PATIENCE:.0f} s: {_how_it_stands(trial)}"
                )
            if self.cluster is not None and time.monotonic() > ask_slurm:
                ask_slurm = time.monotonic() + 10.0
                state = self.cluster.job(trial.job_id).state
                if state in _OVER_IN_SLURM and not trial.is_over():
                    raise environment_error(f"job {trial.job_id} ended as {state}: {_how_it_stands(trial)}")
            time.sleep(_LOOK_EVERY)

    def _break_a_node(self, trial: Trial) -> Event:
        victim = trial.nodes()[-1]
        if self.cluster is not None:
            self.terminal.command(["stoker", "cluster", "crash", victim, "--dir", str(self.cluster.layout.root)])
            at = time.time()
            self.cluster.crash(victim)
            how = "switched off"
        else:
            pid = local_agent(trial.dir, victim)
            self.terminal.command(["kill", "-9", str(pid)])
            at = time.time()
            os.kill(pid, signal.SIGKILL)
            how = f"killed (process {pid}, with all that runs below it)"
        event = Event(victim, at, trial.step())
        self.terminal.say(f"{victim} is {how} at step {event.step}", at=at)
        return event

    def stop(self) -> None:
        """Nothing of the run may go on after a demonstration that failed; on a cluster that goes down, nothing can."""
        if self.cluster is None:
            for path in sorted(self._runs() - self.others):
                subprocess.run(stoker_argv(["cancel", str(path)]), stdin=subprocess.DEVNULL, check=False)

    def _runs(self) -> set[Path]:
        return {found.parent for found in self.out.glob("*/run.json")}


def disturbance(steps: int, interval: int) -> tuple[int, int]:
    """A checkpoint's step near the middle of the run, and the step half an interval later, so that there is something
    to lose.

    Raises:
        UserError: the run is too short for a checkpoint before and steps after.
    """
    saved = max(1, steps // interval // 2) * interval
    when = saved + max(1, interval // 2)
    if when >= steps:
        raise UserError(
            f"train.steps={steps} with checkpoint.interval={interval} leaves no room for an interruption: "
            f"at least {interval + max(1, interval // 2) + 1} steps are needed"
        )
    return saved, when


def local_agent(run: RunDir, node: str) -> int:
    """Process id of a local run's agent."""
    supervisor = int(read_json(run.all_attempts()[-1].start)["pid"])
    for process in processes.descendants(supervisor):
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        if process.parent == supervisor and f"{NODE}={node}".encode() in environment:
            return process.pid
    raise environment_error(f"{run.path}: no agent {node} below the supervisor, process {supervisor}")


def _how_it_stands(trial: Trial) -> str:
    """In a line: the last word of its newest attempt, and where to look."""
    last = next((o for o in reversed(trial.outcomes()) if o is not None), None)
    word = f"{last.cause.value}: {last.reason}" if last else "no attempt has ended"
    return f"{word}; `stoker logs {shown(trial.dir.path)}` shows more"


def conclude(run: RunDir, stage: Stage, terminal: Terminal) -> int:
    """Picture, summary, verdict."""
    from ..plot import plot_loss  # matplotlib is an optional dependency, and slow to import

    terminal.command(["stoker", "plot", shown(run.path)])
    try:
        picture = shown(plot_loss(run, run.report / "loss.png"))
    except UserError as e:
        picture = f"none: {e}"
    assert stage.event is not None
    print(screen(run, picture, stage.event.at))
    wrong = problems(run, effective_config(run)["train"]["steps"], stage.event.node, stage.cluster is not None)
    for line in wrong:
        print(f"stoker demo: error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    from ..cli import main as stoker

    sys.exit(stoker(["demo", *sys.argv[1:]]))
