"""Data loading measured: samples per CPU second against a bare memory map, and opening 1 and 100 million documents.

    python benchmarks/data.py [--dir DIR] [--rounds 7] [--report FILE]

All variants take samples of 257 tokens as int64 tensors, in turn in every round, in one process with one thread for
arithmetic; CPU time counts all threads of the process. Needs about 3.5 GB in DIR; removes what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from stoker.train.data.build import DataSpec, TrainingData, build_data
from stoker.train.data.indexed import idx_path
from stoker.train.data.indexed_writer import IndexWriter, index_bytes

SEQUENCE, VOCAB = 256, 50_000
PIECE = 1 << 20


def make_real(prefix: Path, documents: int) -> None:
    """Documents of 1 to 999 random tokens, uint16: one million are 1 GB."""
    rng = np.random.default_rng(0)
    with IndexWriter(prefix, np.uint16) as writer:
        for _ in range(0, documents, 10_000):
            lengths = rng.integers(1, 1000, 10_000)
            writer.add_documents(rng.integers(0, VOCAB, lengths.sum(), dtype=np.uint16), lengths)


def make_sparse(prefix: Path, documents: int) -> None:
    """Documents of 1 to 127 tokens; the .bin is a hole, the .idx (20 bytes per document) is real."""

    def lengths() -> Iterator[np.ndarray]:
        for first in range(0, documents, PIECE):
            count = min(PIECE, documents - first)
            yield np.random.default_rng(first).integers(1, 128, count, dtype=np.int32)

    def ends() -> Iterator[np.ndarray]:
        for first in range(0, documents, PIECE):
            yield np.arange(first + 1, min(first + PIECE, documents) + 1)

    with open(idx_path(prefix), "wb") as idx:
        idx.writelines(index_bytes(np.dtype("<u2"), documents, documents, lengths, ends))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * sum(int(piece.sum(dtype=np.int64)) for piece in lengths()))


def opened(prefix: Path, micro_batch: int, **settings: bool) -> TrainingData:
    return build_data(
        [DataSpec(str(prefix))],
        sequence_length=SEQUENCE,
        global_batch=4 * micro_batch,
        micro_batch=micro_batch,
        seed=1,
        vocab_size=VOCAB,
        **settings,
    )


def variants(prefix: Path, count: int) -> dict[str, Callable[[], int]]:
    """Each takes `count` samples in random order and says how many it took."""
    stream = np.memmap(f"{prefix}.bin", np.uint16, "r")
    windows = (len(stream) - 1) // SEQUENCE
    rng = np.random.default_rng(1)

    def bare() -> int:
        for window in rng.permutation(windows)[:count].tolist():
            torch.from_numpy(stream[window * SEQUENCE : window * SEQUENCE + SEQUENCE + 1].astype(np.int64))
        return count

    def loader(data: TrainingData) -> Callable[[], int]:
        rows = data.train.share.micro_batch

        def take() -> int:
            for _ in range(count // rows):
                next(data.train)
            return count // rows * rows

        next(data.train)
        return take

    found: dict[str, Callable[[], int]] = {"bare np.memmap slice": bare, "bare again (noise)": bare}
    for rows in (32, 8, 4, 1):
        found[f"Loader, micro-batch {rows}"] = loader(opened(prefix, rows))
    found["Loader, 32, document masks and positions"] = loader(
        opened(prefix, 32, mask_documents=True, reset_positions=True)
    )
    return found


def throughput(prefix: Path, rounds: int, count: int) -> list[str]:
    rates: dict[str, list[float]] = {}
    cases = variants(prefix, count)
    for k in range(rounds + 1):
        for name, take in cases.items():
            began = time.process_time()
            done = take()
            if k:  # the first round warms up the page cache
                rates.setdefault(name, []).append(done / (time.process_time() - began))
    bare = rates["bare np.memmap slice"]
    lines = [
        "| variant | samples / CPU s, median | min .. max | of bare, median of the rounds' ratios |",
        "|---|---|---|---|",
    ]
    for name, values in rates.items():
        ratio = statistics.median(v / b for v, b in zip(values, bare, strict=True))
        lines.append(
            f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} .. {max(values):,.0f} | {ratio:.2f} |"
        )
    return lines


def open_once(prefix: Path, masks: bool) -> dict[str, float]:
    """In a fresh process: from nothing open to the first batch."""

    def anonymous() -> int:
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

    opened(Path(os.environ["WARM_UP"]), 32).close()  # lazy imports and first-use costs are not the data's
    before, cpu, wall = anonymous(), time.process_time(), time.perf_counter()
    with opened(prefix, 32, mask_documents=masks) as data:
        built = time.process_time() - cpu
        next(data.train)
        return {
            "documents": data.files[0].documents,
            "build_ms": 1e3 * built,
            "first_batch_cpu_ms": 1e3 * (time.process_time() - cpu),
            "first_batch_ms": 1e3 * (time.perf_counter() - wall),
            "memory_kib": anonymous() - before,
        }


def start_up(prefixes: list[Path], warm_up: Path, rounds: int) -> list[str]:
    results: dict[tuple[int, bool], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for masks in (False, True):
            for prefix in prefixes:
                output = subprocess.check_output(
                    [sys.executable, __file__, "--open", str(prefix), *(["--masks"] if masks else [])],
                    env={**os.environ, "WARM_UP": str(warm_up)},
                )
                result = json.loads(output)
                results.setdefault((int(result["documents"]), masks), []).append(result)
    lines = [
        "| documents | document masks | build, CPU ms | build and first batch, CPU ms | wall ms | memory, KiB |",
        "|---|---|---|---|---|---|",
    ]
    for (documents, masks), found in sorted(results.items(), key=lambda item: (item[0][1], item[0][0])):
        cells = []
        for key in ("build_ms", "first_batch_cpu_ms", "first_batch_ms", "memory_kib"):
            values = [result[key] for result in found]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} .. {max(values):.1f})")
        lines.append(f"| {documents:,} | {'yes' if masks else 'no'} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--documents", type=int, default=1_000_000, help="of the throughput test")
    parser.add_argument("--many", type=int, default=100_000_000, help="documents of the larger start-up test")
    parser.add_argument("--samples", type=int, default=64_000, help="per variant and round")
    parser.add_argument("--report", type=Path, help="also write the tables there")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--masks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.open:
        print(json.dumps(open_once(args.open, args.masks)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="stoker-bench-data-") as directory:
        real, few, many = (Path(directory) / name for name in ("real", "few", "many"))
        make_real(real, args.documents)
        tables = [f"Throughput: {args.documents:,} documents, {args.rounds} rounds of {args.samples:,} samples", ""]
        tables += throughput(real, args.rounds, args.samples)
        make_sparse(few, 1_000_000)
        make_sparse(many, args.many)
        tables += ["", f"Opening, fresh processes, median (min .. max) of {args.rounds}, page cache as it comes", ""]
        tables += start_up([few, many], real, args.rounds)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    head = f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
    head += f", {os.cpu_count()} CPUs, load {load}"
    text = "\n".join([head, "", *tables, ""])
    print(text)
    if args.report:
        args.report.write_text(text)


if __name__ == "__main__":
    main()
