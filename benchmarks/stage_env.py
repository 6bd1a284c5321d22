"""What cluster.stage_env saves: file operations on shared storage, and seconds, until a node has the trainer imported.

    python benchmarks/stage_env.py [--rounds 3] [--report FILE]

Freezes a run, then starts what a node's zygote imports (torch and the trainer) the way srun starts an agent: from the
shared environment; staged, on a node that has nothing; staged, on a node that has unpacked it. Operations are counted
by strace (every system call that takes a path, of all threads and children) in a run of their own; seconds without it.
One machine with its files in the page cache: the seconds say what unpacking costs, not what a busy file server does.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.launcher import code, freeze, stage

MODULE = "stoker.train.loop"  # imports what a worker needs; does nothing when it is run
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass
class Count:
    environment: int = 0  # below the shared environment
    python: int = 0  # below the interpreter it builds upon
    run: int = 0  # in the run directory and the packed archive
    local: int = 0  # on the node


@dataclass
class Places:
    prefix: Path
    base: Path
    root: Path
    node: Path

    def count(self, trace: Path) -> Count:
        found = Count()
        for line in trace.read_text(errors="replace").splitlines():
            match = _PATH.search(line)
            if match is None:
                continue
            path = match[1]
            if path.startswith(str(self.node)):
                found.local += 1
            elif path.startswith(str(self.root)):
                found.run += 1
            elif path.startswith(str(self.prefix)):
                found.environment += 1
            elif path.startswith(str(self.base)):
                found.python += 1
        return found


def make_run(root: Path) -> Path:
    """A frozen run: its code archive, record and bootstrap.py."""
    run = root / "run"
    run.mkdir(parents=True)
    snapshot = code.collect(root)
    packed = code.pack(snapshot, run / "code.tar.gz")
    (run / "run.json").write_text(
        f'{{"code": {{"sha256": "{packed.sha256}", "pythonpath": ["{snapshot.pythonpath[0]}"]}}}}'
    )
    shutil.copy(Path(freeze.__file__).parent / "run" / "bootstrap.py", run)
    return run


def start(run: Path, places: Places, archive: Path | None, trace: Path | None) -> float:
    """Seconds until everything is imported."""
    staged = [] if archive is None else ["--staged"]
    command = [str(places.prefix / "bin/python"), str(run / "bootstrap.py"), *staged, MODULE]
    if trace is not None:
        command = ["strace", "-f", "-qq", "-e", "trace=%file", "-o", str(trace), *command]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STOKER_", "VIRTUAL_ENV"))}
    env |= {"STOKER_LOCAL_DIR": str(places.node), "OMP_NUM_THREADS": "1"}
    env |= {} if archive is None else {"STOKER_ENV_ARCHIVE": str(archive)}
    began = time.monotonic()
    subprocess.run(command, env=env, check=True, timeout=600)
    return time.monotonic() - began


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def measure(root: Path, rounds: int) -> str:
    places = Places(Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), root / "shared", root / "node")
    run = make_run(places.root)
    began = time.monotonic()
    environment = stage.plan(sys.executable, places.root)
    planned = time.monotonic() - began
    stage.ensure(environment)
    packed = time.monotonic() - began - planned
    rows = []
    for name, archive, is_new in (
        ("shared environment", None, False),
        ("staged, first start on a node", environment.archive, True),
        ("staged, later starts", environment.archive, False),
    ):
        trace = root / "trace"
        if is_new or archive is None:
            empty(places.node)
        start(run, places, archive, trace)
        counts = places.count(trace)
        seconds = []
        for _ in range(rounds):
            if is_new:
                empty(places.node)
            seconds.append(start(run, places, archive, None))
        rows.append(
            f"| {name} | {counts.environment:,} | {counts.python:,} | {counts.run:,} | {counts.local:,} "
            f"| {statistics.median(seconds):.1f} |"
        )
    head = (
        f"Environment: {environment.files:,} files, {environment.bytes / 1e9:.2f} GB. Packing, once: {packed:.0f} s "
        f"(a launch looks through it first: {planned:.1f} s).\n\n"
        "| start on a node | in the environment | in its base Python | in the run directory | on the node | seconds |\n"
        "|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is needed to count (Debian: apt-get install strace)")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="stage-") as folder:
        table = measure(Path(folder), arguments.rounds)
    text = (
        f"# Staging the Python environment, {time.strftime('%Y-%m-%d')}\n\n"
        f"`python benchmarks/stage_env.py --rounds {arguments.rounds}` on {platform.machine()}, "
        f"{os.cpu_count()} CPUs, load {load:.1f}, Python {platform.python_version()}. System calls with a path "
        f"until torch and the trainer are imported; medians of seconds, files in the page cache.\n\n{table}\n"
    )
    print(text, end="")
    if arguments.report is not None:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
