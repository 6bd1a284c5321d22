"""Submitting one run: `stoker launch` beside submitit, hydra-submitit-launcher and slurmforge.

    python benchmarks/launch.py [--rounds 11] [--report FILE] [--peers DIR]

All of them submit to one private Slurm cluster with a real sbatch. A small program named sbatch stands in front of it
and notes when the real one has returned, so that the clock is the same for all: from the start of the command to the
answer of its last sbatch. hydra-submitit-launcher returns only when its job ends; it is stopped once sbatch has
answered. Each round starts every tool once, so that what else the machine does falls on all alike; the first round
fills the file cache and does not count. The peers live in a virtual environment of their own, made in --peers.

What they do differs: stoker resolves and checks the configuration, holds it against the site, freezes the code and
makes the run directory; submitit pickles a function; hydra-submitit-launcher composes and pickles a job; slurmforge
compiles a plan and writes its files.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.spec import ClusterSpec

PEERS = ("submitit==1.5.4", "hydra-core==1.3.8", "hydra-submitit-launcher==1.2.0", "slurmforge==1.2.3")
AIM = 1.0  # seconds, wall time of `stoker launch` with a warm file cache

_SUBMITIT = """
import submitit
executor = submitit.SlurmExecutor(folder="submitit", max_num_timeout=1)
executor.update_parameters(partition="main", time=60, cpus_per_task=1, additional_parameters={"hold": True})
executor.submit(print, "done")
"""
_HYDRA_APP = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    print("done")

main()
"""
_HYDRA_OPTIONS = (
    "--multirun",
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=main",
    "hydra.launcher.cpus_per_task=1",
    "+hydra.launcher.additional_parameters={hold: true}",
    "+x=1",
)


def install_peers(folder: Path) -> Path:
    """The peers' interpreter, in a virtual environment that is made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEERS], check=True)
    return python


def clocked_sbatch(folder: Path) -> Path:
    """A folder whose sbatch runs the real one and notes the time of its answer in $ANSWERED_AT."""
    folder.mkdir()
    path = folder / "sbatch"
    real = shutil.which("sbatch")
    path.write_text(f'#!/bin/bash\n{real} "$@"\ncode=$?\ndate +%s.%N >> "$ANSWERED_AT"\nexit $code\n')
    path.chmod(0o755)
    return folder


class Bench:
    def __init__(self, root: Path, cluster: Cluster, peers: Path) -> None:
        self.root, self.cluster = root, cluster
        self.answered = root / "answered"
        path = f"{clocked_sbatch(root / 'bin')}:{os.environ['PATH']}"
        self.env = cluster.env | {"PATH": path, "ANSWERED_AT": str(self.answered)}
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)
        self.peer_env = {k: v for k, v in self.env.items() if k != "PYTHONPATH"}
        self.turns = 0
        self.commands: dict[str, tuple[list[str], bool]] = {}  # name -> (command, whether it is ours)
        self._prepare(peers)

    def _prepare(self, peers: Path) -> None:
        stoker = [sys.executable, "-m", "stoker.launcher.cli"]
        text = Path(sysconfig.get_path("stdlib")) / "argparse.py"
        tokenize = [*stoker, "data", "tokenize", str(text), "--train-vocab", "512", "--out", "text", "--workers", "1"]
        subprocess.run(tokenize, cwd=self.root, env=self.env, check=True, stdout=subprocess.DEVNULL)
        ours = ["model=tiny", "model.vocab_size=512", "data.seq_len=64", "data.sources=[{prefix: text}]"]
        ours += ["cluster.time=60", "cluster.sbatch.hold=true", "cluster.partition=main"]
        (self.root / "one.py").write_text(_SUBMITIT)
        (self.root / "app.py").write_text(_HYDRA_APP)
        project = self.root / "forge"
        forge = str(peers.parent / "sforge")
        init = [forge, "init", "--template", "train-only", "--output", str(project)]
        subprocess.run(init, env=self.peer_env, check=True, stdout=subprocess.DEVNULL)
        sets = ("partition=main", "gpus_per_node=1", "cpus_per_task=1", "mem=100M")
        options = [word for s in sets for word in ("--set", f"stages.train.resources.{s}")]
        self.commands = {
            "python -c pass": ([sys.executable, "-c", "pass"], True),
            "stoker launch": ([*stoker, "launch", *ours], True),
            "submitit": ([str(peers), "one.py"], False),
            "hydra-submitit-launcher": ([str(peers), "app.py", *_HYDRA_OPTIONS], False),
            "slurmforge": ([forge, "train", "--config", str(project / "experiment.yaml"), *options], False),
        }

    def once(self, name: str) -> tuple[float | None, float]:
        """(seconds to sbatch's last answer, seconds to the end) of one command."""
        command, is_ours = self.commands[name]
        if name == "slurmforge":  # it refuses to submit the same thing twice
            self.turns += 1
            command = [*command, "--set", f"stages.train.entry.args.epochs={self.turns}"]
        self.answered.unlink(missing_ok=True)
        began, clock = time.time(), time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=self.env if is_ours else self.peer_env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        if name == "hydra-submitit-launcher":  # it waits for its job
            while not self.answered.exists() and process.poll() is None:
                time.sleep(0.005)
            process.terminate()
        error = process.communicate()[1].decode(errors="replace")
        seconds = time.perf_counter() - clock
        if name == "python -c pass":
            return None, seconds
        if not self.answered.exists():
            raise RuntimeError(f"{name} submitted nothing: {error[-2000:]}")
        return float(self.answered.read_text().split()[-1]) - began, seconds


def measure(bench: Bench, rounds: int, say: Callable[[str], None]) -> dict[str, list[tuple[float | None, float]]]:
    found: dict[str, list[tuple[float | None, float]]] = {name: [] for name in bench.commands}
    for turn in range(rounds + 1):
        for name in bench.commands:
            seconds = bench.once(name)
            if turn:
                found[name].append(seconds)
        bench.cluster.run(["scancel", "--user=root" if os.getuid() == 0 else "--me"])
        say(f"round {turn} of {rounds}")
    return found


def report(found: dict[str, list[tuple[float | None, float]]], rounds: int, version: str) -> str:
    lines = [
        f"# Submitting one run, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python benchmarks/launch.py --rounds {rounds}` on {platform.machine()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {version}. Seconds: median "
        "(fastest to slowest). The file cache is warm. " + (__doc__ or "").split("\n\n")[-1].replace("\n", " ").strip(),
        "",
        "| tool | start to sbatch's answer | start to end | as a multiple of stoker's |",
        "|---|---|---|---|",
    ]
    ours = statistics.median(end for _, end in found["stoker launch"])
    for name, pairs in found.items():
        answers, ends = [a for a, _ in pairs if a is not None], [end for _, end in pairs]
        if not answers:
            lines.append(f"| {name} | | {_spread(ends)} | |")
            continue
        base = statistics.median(a for a, _ in found["stoker launch"] if a is not None)
        end = "waits for its job" if name == "hydra-submitit-launcher" else _spread(ends)
        lines.append(f"| {name} | {_spread(answers)} | {end} | {statistics.median(answers) / base:.2f} |")
    verdict = "met" if ours < AIM else "missed"
    lines += ["", f"Aim: `stoker launch` in less than {AIM:.1f} s: {verdict} ({ours:.2f} s)."]
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--report", type=Path, help="also write the table to this file")
    parser.add_argument("--peers", type=Path, help="virtual environment of the peers, kept; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        peers = install_peers((arguments.peers or root / "peers").resolve())
        with Cluster.start(ClusterSpec(nodes=2), root / "slurm") as cluster:
            bench = Bench(root, cluster, peers)
            found = measure(bench, arguments.rounds, lambda text: print(text, file=sys.stderr))
            version = cluster.run(["sbatch", "--version"]).stdout.strip()
        text = report(found, arguments.rounds, version)
    print(text, end="")
    if arguments.report:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
