"""Saving and loading a checkpoint over several ranks, against plain writing and reading of the same bytes.

    python benchmarks/checkpoint.py [--gib 1] [--ranks 2] [--rounds 7] [--dir DIR] [--report FILE]

Plain save: each rank writes its share in pieces of 32 MiB and syncs; one file per rank, no checksums, no agreement.
Plain load: each rank reads all of those files into memory that it has touched before. Both take turns with ours in
every round, the first of the two changing; loads come from the page cache, so they show the work and not the disk.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.layout import RunDir
from stoker.train.box import Replica
from stoker.train.context import RunContext
from stoker.train.grid import Grid, Membership, form
from stoker.train.pulse import Pulse
from stoker.train.state.checkpointer import Checkpointer
from stoker.train.state.entry import Entry

PIECE = 32 * 1024 * 1024
Seconds = dict[str, list[float]]


def make_entries(size: int, replica: Replica) -> list[Entry]:
    """A model-like list: per layer four matrices and a norm, in bf16, with two moments and a master copy in fp32."""
    width, layers = 1024, max(1, size // (4 * 1024 * 1024 * 14))
    entries = []
    for layer in range(layers):
        for name, shape in [*((f"w{i}", (width, width)) for i in range(4)), ("norm", (width,))]:
            entries.append(Entry.whole(f"model/{layer}/{name}", torch.ones(shape, dtype=torch.bfloat16), replica))
            for kind in ("exp_avg", "exp_avg_sq", "master"):
                entries.append(Entry.whole(f"optim/{kind}/{layer}/{name}", torch.ones(shape), replica))
    return entries


def plain_save(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for at in range(0, len(data), PIECE):
        os.write(fd, data[at : at + PIECE])
    os.fsync(fd)
    os.close(fd)


def plain_load(paths: Sequence[Path], into: memoryview) -> None:
    for path in paths:
        with open(path, "rb", buffering=0) as f:
            for at in range(0, len(into), PIECE):
                f.readinto(into[at : at + PIECE])


def timed(grid: Grid, seconds: Seconds, name: str, work: Callable[[], object]) -> None:
    """Wall time until the last rank is done, and this rank's CPU time, threads included."""
    grid.control.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    cpu = time.process_time() - cpu
    grid.control.barrier()
    seconds.setdefault(name, []).append(time.perf_counter() - wall)
    seconds.setdefault(f"{name} cpu", []).append(cpu)


def measure(rank: int, size: int, port: int, root: Path, total: int, rounds: int, results: mp.SimpleQueue) -> None:
    grid = form(Membership(rank, size, rank, 1, 1, "127.0.0.1", port), backend="gloo")
    run = RunDir(root)
    context = RunContext(run, "benchmark", run.attempt(1), 1, Fence(run, 1), Pulse(None, 1))
    checkpointer = Checkpointer(context, grid, 1)
    entries = make_entries(total, Replica(("dense",), rank, size))
    nbytes = sum(e.tensor.nbytes for e in entries)
    share = memoryview(bytearray(os.urandom(2**20) * (nbytes // size // 2**20)))
    own, plain = root / f"plain-{rank}", [root / f"plain-{r}" for r in range(size)]
    seconds: Seconds = {}
    for number in range(rounds + 1):
        if number == 1:
            seconds.clear()  # the first round pays for touching memory the first time
        saves = [
            ("plain save", lambda: plain_save(own, share)),
            ("our save", lambda step=number + 1: checkpointer.save(step, entries, {})),
        ]
        loads = [
            ("plain load", lambda: plain_load(plain, share)),
            ("our load", lambda: checkpointer.restore(entries)),
        ]
        for pair in (saves, loads):
            for name, work in pair if number % 2 else reversed(pair):
                timed(grid, seconds, name, work)
        checkpointer.prune()
        own.unlink()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rank == 0:
        results.put((seconds, nbytes, len(entries), peak))
    grid.close()


def report(seconds: Seconds, nbytes: int, entries: int, peak: int, ranks: int) -> str:
    rounds, gib = len(seconds["our save"]), nbytes / 2**30
    lines = [
        f"# Checkpoint: {gib:.2f} GiB, {entries} tensors, {ranks} ranks ({time.strftime('%Y-%m-%d')})",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end, "
        f"Python {platform.python_version()}, torch {torch.__version__}.",
        f"{rounds} rounds, medians (least-most); ratios are medians of the rounds' ratios; CPU is rank 0's, threads "
        "included.",
        "",
        "| | wall s | CPU s | GiB/s | ratio to plain |",
        "|---|---|---|---|---|",
    ]
    for kind, volume in (("save", gib), ("load", gib * ranks)):
        for who in ("plain", "our"):
            wall = seconds[f"{who} {kind}"]
            median, cpu = statistics.median(wall), statistics.median(seconds[f"{who} {kind} cpu"])
            ratios = [a / b for a, b in zip(wall, seconds[f"plain {kind}"], strict=True)]
            lines.append(
                f"| {who} {kind} | {median:.2f} ({min(wall):.2f}-{max(wall):.2f}) | {cpu:.2f} | {volume / median:.2f} "
                f"| {statistics.median(ratios):.2f} |"
            )
    lines += [
        "",
        f"Peak memory of rank 0: {peak / 2**30:.2f} GiB; the tensors are {gib:.2f}, its shard's segment and the plain "
        f"variant's buffer {gib / ranks:.2f} each.",
        "In a load every rank reads everything, as data parallel ranks do, from the page cache. Our save has checksums",
        "of every 4 MiB block, index, manifest and the ranks' agreement; our load verifies every block.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None, help="where the files go; default: the temporary directory")
    parser.add_argument("--report", type=Path, default=None)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="stoker-checkpoint-", dir=arguments.dir))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
    results = mp.get_context("spawn").SimpleQueue()
    try:
        total = int(arguments.gib * 2**30)
        rest = (arguments.ranks, store.port, root, total, arguments.rounds, results)
        mp.spawn(measure, rest, nprocs=arguments.ranks)
        text = report(*results.get(), arguments.ranks)
    finally:
        shutil.rmtree(root)
    print(text, end="")
    if arguments.report is not None:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
