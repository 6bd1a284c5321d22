"""What checkpoints cost a real run: `stoker run` on this machine with supervisor, agent and writer, with and without.

All runs are the same but for their checkpoints. Figures come from the metrics and events that every run writes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from stoker.train.data.indexed_writer import IndexWriter

STEPS, INTERVAL, SKIPPED = 60, 15, 5  # the first steps are slower, with or without
# 35.6 million parameters in float32 with two moments: 427 MB.
MODEL = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "ffn_size": 1536, "vocab_size": 8192}
KINDS = {
    "no checkpoints": {"interval": 0, "at_end": "false"},
    "asynchronous": {"interval": INTERVAL, "at_end": "false"},
    "waiting until they are written": {"interval": INTERVAL, "at_end": "false", "asynchronous": "false"},
}


@dataclass(frozen=True)
class Trained:
    """Of one run: seconds from step to step, and per checkpoint what it cost."""

    kind: str
    intervals: list[float]
    saved: list[dict[str, Any]]  # fields of the events `checkpoint_saved`

    @property
    def mean(self) -> float:
        return statistics.mean(self.intervals)


def train(kind: str, ranks: int, root: Path) -> Trained:
    """One run. Raises RuntimeError with the end of its log if it fails."""
    data = root / "data"
    if not data.with_suffix(".idx").exists():
        with IndexWriter(data, np.uint16) as writer:
            for seed in range(40):
                writer.add(np.random.default_rng(seed).integers(0, MODEL["vocab_size"], 10_000))
    settings = {f"model.{key}": value for key, value in MODEL.items()}
    settings |= {f"checkpoint.{key}": value for key, value in KINDS[kind].items()}
    settings |= {
        "model.tied_embeddings": "false",
        "name": f"{ranks}-{kind.split()[0]}",
        "run_root": str(root / "runs"),
        "cluster": "local",
        "cluster.procs_per_node": ranks,
        "train.steps": STEPS,
        "train.global_batch": ranks,
        "train.micro_batch": 1,
        "data.seq_len": 32,
        "data.sources": f"[{{prefix: {data}}}]",
    }
    command = [sys.executable, "-m", "stoker.launcher.cli", "run", *(f"{k}={v}" for k, v in settings.items())]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (run,) = (root / "runs").glob(f"{settings['name']}*")
    (metrics,) = run.rglob("metrics*.jsonl")
    times = [json.loads(line)["time"] for line in metrics.read_text().splitlines()]
    events = [json.loads(line) for path in run.rglob("events/*.jsonl") for line in path.read_text().splitlines()]
    intervals = [b - a for a, b in pairwise(times)][SKIPPED:]
    return Trained(kind, intervals, [e for e in events if e["event"] == "checkpoint_saved"])
