"""Start-up of `stoker --help` and `stoker status`, beyond the interpreter's own.

    python benchmarks/cli.py [--rounds 21] [--runs 20] [--report FILE]

Each round starts every command once, so that what else the machine does falls on all alike. CPU time is user and
system time of the command and its children. `squeue` is measured alone, since status asks it once where there is a
Slurm. Aim: less than 0.15 s of wall time beyond `python -c pass`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.submissions import new_submission

PLAIN = {"train": {"steps": 1000}, "cluster": {"kind": "slurm"}}


def make_runs(root: Path, count: int) -> None:
    """Runs as a user has them: requeued twice, thousands of steps, submitted as jobs that Slurm has forgotten."""
    for number in range(count):
        run = RunDir(root / f"llama-{number:03d}")
        for folder in (run.submissions, run.attempts, run.checkpoints, run.job_logs):
            folder.mkdir(parents=True)
        run.run.write_text(json.dumps({"id": str(number), "name": "llama"}))
        run.config_json.write_text(json.dumps(PLAIN))
        new_submission(run, "sbatch").set_job(str(900_000 + number))
        for part in range(3):
            attempt = claim(run)
            attempt.start.write_text(json.dumps({"submission": 1, "time": time.time()}))
            with open(attempt.metrics(1), "w") as f:
                for step in range(part * 1000, part * 1000 + 1000):
                    f.write(json.dumps({"step": step, "loss": 2.0, "tokens_per_second": 1e5, "time": 1.0}) + "\n")


def measure(commands: dict[str, list[str]], rounds: int, cwd: Path) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each command."""
    # Compiled modules must be there, as on any machine where stoker ran once.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    wall: dict[str, list[float]] = {name: [] for name in commands}
    cpu: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, env=env, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            if turn:  # the first fills the caches
                wall[name].append(seconds)
                cpu[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in commands}


def report(found: dict[str, tuple[float, float]], rounds: int, runs: int) -> str:
    bare = found["python -c pass"]
    lines = [
        f"# Start-up of the command line, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python benchmarks/cli.py --rounds {rounds} --runs {runs}` on {platform.machine()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}. Medians, seconds.",
        "",
        "| command | wall | beyond python | CPU | beyond python |",
        "|---|---|---|---|---|",
    ]
    for name, (wall, cpu) in found.items():
        lines.append(f"| `{name}` | {wall:.3f} | {wall - bare[0]:.3f} | {cpu:.3f} | {cpu - bare[1]:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--report", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    stoker = [sys.executable, "-m", "stoker.launcher.cli"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_runs(root / "runs", arguments.runs)
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "stoker --help": [*stoker, "--help"],
            "stoker status RUN": [*stoker, "status", "runs/llama-000"],
            f"stoker status ({arguments.runs} runs)": [*stoker, "status"],
        }
        if shutil.which("squeue"):
            commands["squeue"] = ["squeue"]
        text = report(measure(commands, arguments.rounds, root), arguments.rounds, arguments.runs)
    print(text, end="")
    if arguments.report:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
