"""Planning a load from the checkpoint of 1,024 ranks: what one rank does before it reads a tensor.

    python benchmarks/index.py [--rounds 7] [--dir DIR] [--report FILE]

The checkpoint is synthetic: Llama 3 70B with weights, fp32 master copy and two moments; shards are sparse files of the
right size with sidecars of the right checksums, and index and manifest are made by the code that a run has. Each round
is a process of its own, which has torch and this package imported before it begins: it reads and checks the manifest,
looks at all files (rank 0 does), reads and checks the index, and finds every piece that its rank needs.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from stoker.launcher.run.index_bounds import Bounds
from stoker.launcher.run.manifest import (
    BLOCK,
    INDEX,
    OFFSETS,
    FileEntry,
    Manifest,
    check_sizes,
    describe,
    read_manifest,
    shard_name,
    sidecar_name,
)
from stoker.train.box import Box
from stoker.train.state.entry import Entry, plan
from stoker.train.state.index import Index, merged, part
from stoker.train.state.loader import match
from stoker.train.state.reader import VerifiedReader
from stoker.train.state.segment import layout
from stoker.train.state.source import FileSource

LAYERS, WIDTH, KV, FFN, VOCAB = 80, 8192, 1024, 28672, 128256
# name in a layer: shape, dim that tensor parallelism cuts
MATRICES = {
    "attention.q": ((WIDTH, WIDTH), 0),
    "attention.k": ((KV, WIDTH), 0),
    "attention.v": ((KV, WIDTH), 0),
    "attention.out": ((WIDTH, WIDTH), 1),
    "ffn.gate": ((FFN, WIDTH), 0),
    "ffn.up": ((FFN, WIDTH), 0),
    "ffn.down": ((WIDTH, FFN), 1),
    "attention_norm": ((WIDTH,), None),
    "ffn_norm": ((WIDTH,), None),
}
ENDS = {"embedding": ((VOCAB, WIDTH), 0, 0), "head": ((VOCAB, WIDTH), 0, -1), "norm": ((WIDTH,), None, -1)}
KINDS = {"model": torch.bfloat16, **dict.fromkeys(("optim/master", "optim/exp_avg", "optim/exp_avg_sq"), torch.float32)}


@dataclass(frozen=True)
class Layout:
    """Data-parallel shards are rows (dim 0) of what tensor parallelism leaves."""

    tensor: int
    pipeline: int
    data: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"TP {self.tensor} x PP {self.pipeline} x DP {self.data}"

    def entries(self, rank: int) -> list[Entry]:
        """What a rank holds; tensor ranks are neighbours, pipeline stages furthest apart."""
        t, d, p = rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data)
        entries = []
        for (name, shape, cut), (kind, dtype) in product(self._tensors(p), KINDS.items()):
            box = Box.whole(shape) if cut is None else _share(Box.whole(shape), cut, t, self.tensor)
            if cut is None and t != d % self.tensor:
                continue  # one of the tensor ranks writes it
            rows = -(-box.shape[0] // self.data)
            first = min(d * rows, box.shape[0])
            box = box.rows(first, min(rows, box.shape[0] - first))
            if box.numel:
                entries.append(Entry(f"{kind}/{name}", torch.empty(box.shape, dtype=dtype, device="meta"), shape, box))
        return entries

    def _tensors(self, stage: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        for layer in range(stage * LAYERS // self.pipeline, (stage + 1) * LAYERS // self.pipeline):
            yield from ((f"layers.{layer}.{name}", shape, cut) for name, (shape, cut) in MATRICES.items())
        yield from ((name, shape, cut) for name, (shape, cut, at) in ENDS.items() if at % self.pipeline == stage)


def _share(box: Box, dim: int, index: int, count: int) -> Box:
    first, end = box.shape[dim] * index // count, box.shape[dim] * (index + 1) // count
    start, shape = list(box.start), list(box.shape)
    start[dim], shape[dim] = start[dim] + first, end - first
    return Box(tuple(start), tuple(shape))


def write(directory: Path, layout_: Layout) -> dict[str, float]:
    """The synthetic checkpoint; returns what is worth telling of it."""
    directory.mkdir(parents=True)
    files, parts = [], []
    for rank in range(layout_.ranks):
        head, placed = layout(plan(layout_.entries(rank)))
        parts.append(part(shard_name(rank), placed))
        size = max((p.at + p.size for p in placed), default=len(head))
        with open(directory / shard_name(rank), "wb") as f:
            f.truncate(size)
        sidecar = bytes(4 * (-(-size // BLOCK)))
        (directory / sidecar_name(rank)).write_bytes(sidecar)
        files += [FileEntry(shard_name(rank), size, None, sidecar_name(rank)), describe(sidecar_name(rank), sidecar)]
    began = time.perf_counter()
    index, offsets = merged(parts)
    seconds = time.perf_counter() - began
    for name, data in ((INDEX, index), (OFFSETS, offsets)):
        (directory / name).write_bytes(data)
        files.append(describe(name, data))
    Manifest("synthetic", 1, 1, 1, 0.0, {"world": layout_.ranks}, {}, tuple(files)).write(directory)
    slices = sum(data.count(b"\n") for data in parts)
    return {"slices": slices, "lines": len(offsets) // 8, "index": len(index), "merge": seconds}


def measure(directory: Path, layout_: Layout, rank: int) -> None:
    """In a process of its own: prints seconds of each part, and MB of memory that came."""
    entries = layout_.entries(rank)
    before = _memory("VmRSS")
    marks = [time.perf_counter()]
    manifest = read_manifest(directory)
    marks.append(time.perf_counter())
    check_sizes(directory, manifest)
    marks.append(time.perf_counter())
    reader = VerifiedReader(FileSource(directory), manifest)
    index = Index(reader.small(INDEX), reader.small(OFFSETS), INDEX, Bounds.of(manifest))
    found = match(index, entries)
    marks.append(time.perf_counter())
    assert not found.differences, found.differences[:3]
    memory = _memory("VmHWM") - before
    print(*(b - a for a, b in pairwise(marks)), memory, len(entries), len(found.pieces))


def _memory(field: str) -> float:
    """MB of this process (its parent's peak is in getrusage's, not in this)."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(field))


CASES = [
    # saved by, loaded by, ranks of which one each is measured
    (Layout(8, 8, 16), Layout(8, 8, 16)),
    (Layout(8, 8, 16), Layout(4, 4, 32)),
    (Layout(8, 8, 16), Layout(1, 1, 512)),
    (Layout(1, 1, 1024), Layout(1, 1, 1024)),
    (Layout(1, 1, 1024), Layout(8, 8, 16)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None, help="where the files go; default: the temporary directory")
    parser.add_argument("--report", type=Path, default=None)
    parser.add_argument("--measure", nargs=5, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        place, *numbers = arguments.measure
        measure(Path(place), Layout(*map(int, numbers[:3])), int(numbers[3]))
        return
    root = Path(tempfile.mkdtemp(prefix="stoker-index-", dir=arguments.dir))
    lines = [
        f"# Planning a load: Llama 3 70B, weights, master and two moments, 1,024 ranks ({time.strftime('%Y-%m-%d')})",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the start, "
        f"Python {platform.python_version()}, torch {torch.__version__}. Local disk, warm page cache.",
        f"{arguments.rounds} rounds, medians (least-most), ms. Only rank 0 looks at the files; MB of memory that came.",
        "",
        "| saved by | loaded by | index | manifest | files | index, match | all | MB | entries | pieces |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    try:
        made: dict[Layout, dict[str, float]] = {}
        for saved, loaded in CASES:
            directory = root / str(saved).replace(" ", "")
            if saved not in made:
                made[saved] = write(directory, saved)
            rank = loaded.ranks // 2 + 1
            command = [sys.executable, __file__, "--measure", str(directory)]
            command += map(str, (loaded.tensor, loaded.pipeline, loaded.data, rank))
            rounds = [
                [float(x) for x in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()]
                for _ in range(arguments.rounds)
            ]
            manifest, sizes, planned, memory, entries, pieces = zip(*rounds, strict=True)
            total = [sum(r[:3]) for r in rounds]
            middle = " | ".join(f"{1000 * statistics.median(v):.0f}" for v in (manifest, sizes, planned))
            spread = f"{1000 * statistics.median(total):.0f} ({1000 * min(total):.0f}-{1000 * max(total):.0f})"
            lines.append(
                f"| {saved} | {loaded} | {made[saved]['index'] / 1e6:.2f} MB | {middle} | {spread} "
                f"| {statistics.median(memory):.0f} | {entries[0]:.0f} | {pieces[0]:.0f} |"
            )
        lines.append("")
        for saved, facts in made.items():
            lines.append(
                f"{saved}: {facts['slices']:,.0f} slices of {facts['lines']:,.0f} tensors; merging the ranks' lines "
                f"took {facts['merge']:.1f} s (in the writer process)."
            )
    finally:
        shutil.rmtree(root)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.report is not None:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
