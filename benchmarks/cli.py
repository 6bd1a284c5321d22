"""Start-up of `stoker --help` and `stoker status`, beyond the interpreter's own; and a long list of checkpoints.

    python benchmarks/cli.py [--rounds 21] [--runs 20] [--checkpoints 10000] [--report FILE]

Each round starts every command once, so that what else the machine does falls on all alike. CPU time is user and
system time of the command and its children. `squeue` is measured alone, since status asks it once where there is a
Slurm. Aims: less than 0.15 s of wall time beyond `python -c pass`; 10,000 checkpoints (of two ranks, with the settings
of a run in each manifest) in less than a second.
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

from stoker.conf.load import to_plain
from stoker.conf.schema import Config
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import INDEX, OFFSETS, FileEntry, Manifest, block_checksums, describe
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


def make_checkpoints(run: RunDir, count: int) -> None:
    """Manifests as a trainer of two ranks writes them, beside small files. Not synced: that would take hours."""
    run.checkpoints.mkdir(parents=True)
    run.run.write_text(json.dumps({"id": "many", "name": "many"}))
    plain = json.loads(json.dumps(to_plain(Config())))
    run.config_json.write_text(json.dumps(plain))
    settings = {f"{part}.{key}": value for part in ("train", "model", "optim") for key, value in plain[part].items()}
    shard = bytes(100)
    content = {INDEX: b"", OFFSETS: b""}
    large = []
    for rank in range(2):
        content[f"shard-{rank:05d}.crc32"] = block_checksums(shard)
        large.append(FileEntry(f"shard-{rank:05d}.safetensors", len(shard), None, f"shard-{rank:05d}.crc32"))
    files = (*large, *(describe(name, data) for name, data in content.items()))
    for step in range(100, 100 * count + 1, 100):
        directory = run.checkpoint(CheckpointName(step, 1))
        directory.mkdir()
        state = {"step": step, "settings": settings, "validation": {"step": step, "loss": 2.0}}
        manifest = Manifest("many", step, 1, 1, time.time(), {"data": 2, "tensor": 1}, state, files)
        for name, data in (*content.items(), *((f.name, shard) for f in large), ("manifest.json", manifest.encode())):
            (directory / name).write_bytes(data)


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
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--report", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    stoker = [sys.executable, "-m", "stoker.launcher.cli"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_runs(root / "runs", arguments.runs)
        make_checkpoints(RunDir(root / "many"), arguments.checkpoints)
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "stoker --help": [*stoker, "--help"],
            "stoker status RUN": [*stoker, "status", "runs/llama-000"],
            f"stoker status ({arguments.runs} runs)": [*stoker, "status"],
        }
        commands[f"stoker checkpoint ls ({arguments.checkpoints:,})"] = [*stoker, "checkpoint", "ls", "many"]
        if shutil.which("squeue"):
            commands["squeue"] = ["squeue"]
        text = report(measure(commands, arguments.rounds, root), arguments.rounds, arguments.runs)
    print(text, end="")
    if arguments.report:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
