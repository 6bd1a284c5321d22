"""What Python costs in a step: sizes so small that arithmetic takes hardly any time. CPU time, one thread.

    python benchmarks/overhead.py [--repeats 200] [--report benchmarks/overhead-2026-11-30.md]

First a whole step of our trainer and of the bare loop, split into what every layer of a micro-batch, every micro-batch
and every step costs (from three models and steps that differ in one number). Then a layer forwards and backwards with
what a model may have besides, and what the same torch operations take when they are called from a list, one after the
other: the rest is autograd's and ours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from bare import BareLoop, BareModel, initial_weights
from measuring import machine
from stoker.conf.schema import ModelConfig, NormOrder, QkNorm
from stoker.kernels import select
from stoker.train.data.dataset import Batch
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.model import DropoutKey
from stoker.train.model.decoder import whole_model
from stoker.train.params import decoder_table
from torch.utils._python_dispatch import TorchDispatchMode
from trainer import our_config, our_trainer, write_data

ROWS, LENGTH, FEW, MANY = 1, 16, 2, 6
TINY = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=FEW, num_heads=2, num_kv_heads=1, ffn_size=32, tied_embeddings=False
)
DENSE: dict[str, dict[str, Any]] = {
    "biases of queries, keys, values": {"qkv_bias": True},
    "queries and keys normed by head": {"qk_norm": QkNorm.head},
    "norms before and behind": {"norm_order": NormOrder.both},
    "sliding window": {"sliding_window": 8},
    "attention's scores capped": {"attention_softcap": 50.0},
    "dropout": {"dropout": 0.1},
}
FEATURES = {
    "none": {},
    **DENSE,
    "all of these": {name: value for fields in DENSE.values() for name, value in fields.items()},
    "4 experts, 2 per token": {"num_experts": 4, "experts_per_token": 2},
}
Run = Callable[[], object]


def medians(runs: dict[Any, Run], repeats: int) -> dict[Any, float]:
    """CPU microseconds of each, taken in turn."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 5):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if number >= 5:
                times[name].append(time.process_time() - began)
    return {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}


# ---- a step


def our_step(layers: int, micro_batches: int, scratch: Path, repeats: int) -> Run:
    model = replace(TINY, num_layers=layers)
    config = our_config(scratch / "data", repeats + 10, model)
    config.data.seq_len, config.train.micro_batch, config.train.global_batch = LENGTH, ROWS, ROWS * micro_batches
    return our_trainer(scratch / f"run-{layers}-{micro_batches}", config).step


def bare_step(layers: int, micro_batches: int) -> Run:
    model = replace(TINY, num_layers=layers)
    rows = np.random.default_rng(0).integers(0, model.vocab_size, (ROWS * micro_batches, LENGTH + 1))
    loop = BareLoop(initial_weights(model), lambda: rows, model=model, length=LENGTH)
    return lambda: loop.step(micro_batches)


def step_table(repeats: int) -> str:
    sizes = [(FEW, 1), (MANY, 1), (FEW, 5)]
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(StringIO()):
        write_data(Path(scratch) / "data", TINY.vocab_size)
        runs = {("stoker", *size): our_step(*size, Path(scratch), repeats) for size in sizes}
        runs |= {("bare loop", *size): bare_step(*size) for size in sizes}
        took = medians(runs, repeats)
    rows = ["| | per layer and micro-batch | per micro-batch besides | per step besides |", "|---|---|---|---|"]
    for side in ("stoker", "bare loop"):
        one, deep, long = (took[(side, *size)] for size in sizes)
        layer = (deep - one) / (MANY - FEW)
        micro = (long - one) / 4 - FEW * layer
        rows.append(f"| {side} | {layer:.0f} | {micro:.0f} | {one - micro - FEW * layer:.0f} |")
    return "\n".join(rows)


# ---- a layer


class Calls(TorchDispatchMode):
    """Notes every operation that reaches a kernel, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def again(run: Run) -> tuple[Run, int]:
    """The operations of a run from a list, and how many they are."""
    with Calls() as calls:
        run()
    made = calls.made

    @torch.no_grad()
    def replay() -> None:
        for func, args, kwargs in made:
            func(*args, **kwargs)

    return replay, len(made)


def our_passes(model: ModelConfig) -> Run:
    module = whole_model(model, select())
    initialize(module, decoder_table(model), single(), 0)
    tokens = torch.randint(0, model.vocab_size, (ROWS, LENGTH + 1))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None, torch.arange(ROWS))
    key = DropoutKey(0, 0) if model.dropout else None
    return lambda: module(batch, 1.0, key).objective.backward()


def bare_passes(model: ModelConfig) -> Run:
    module = BareModel(model, LENGTH)
    tokens = torch.randint(0, model.vocab_size, (ROWS, LENGTH + 1))
    return lambda: F.cross_entropy(module(tokens[:, :-1])[0], tokens[0, 1:]).backward()


def layer_table(repeats: int) -> str:
    rows = [
        "| a layer with | forward and backward | its torch operations from a list | rest | operations |",
        "|---|---|---|---|---|",
    ]
    makers = {"bare loop's layer": (bare_passes, {})}
    makers |= {f"stoker: {name}": (our_passes, fields) for name, fields in FEATURES.items()}
    for name, (passes, fields) in makers.items():
        runs: dict[Any, Run] = {}
        counts = []
        for layers in (FEW, MANY):
            run = passes(replace(TINY, num_layers=layers, **fields))
            run()
            runs["whole", layers] = run
            runs["list", layers], count = again(run)
            counts.append(count)
        took = medians(runs, repeats)
        whole, listed = ((took[kind, MANY] - took[kind, FEW]) / (MANY - FEW) for kind in ("whole", "list"))
        operations = (counts[1] - counts[0]) / (MANY - FEW)
        rows.append(f"| {name} | {whole:.0f} | {listed:.0f} | {whole - listed:.0f} | {operations:.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--report", type=Path, help="write the result there as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layers = layer_table(arguments.repeats)
    text = TEXT.format(steps=step_table(arguments.repeats), layers=layers, machine=machine())
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


TEXT = """# What Python costs in a step

`python benchmarks/overhead.py`: hidden 16, 2 heads, 1 key head, ffn 32, vocabulary 64, one row of 16 tokens, float32.
CPU microseconds, medians; how they are taken apart stands in the script.

## A step

{steps}

Ours has loader, heartbeat, gradient buffers, clipping by the exact token count, a line of metrics; the bare loop
has the model, AdamW and clipping.

## A layer of one micro-batch

{layers}

Calls from a list go through Python one by one, those of the bare layer's backward pass do not: its rest is
underestimated by about a microsecond per operation.

{machine}.
"""


if __name__ == "__main__":
    main()
