"""A stack of Llama 3 8B's blocks trained on one device by the trainer itself: tokens per second, MFU, peak memory, and
what `stoker plan` says of it. One variant per process, as peak memory is a process's: `python benchmarks/gpu_model.py`
prints JSON. gpu.py calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stoker.conf.schema import Config, DataSource, ModelConfig, ParamDtype
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.files import write_json
from stoker.launcher.run.layout import RunDir
from stoker.train.context import RunContext
from stoker.train.data.indexed_writer import IndexWriter
from stoker.train.flops import peak_flops
from stoker.train.grid import single
from stoker.train.loop import Trainer
from stoker.train.plan.estimate import Assumptions, flops_per_step
from stoker.train.plan.make import plan_of
from stoker.train.pulse import Pulse

GIB = 2**30
LAYERS = (16, 12, 8, 6, 4, 2)
CPU_PEAK = 1e11  # FLOP/s; of no meaning, but a plan wants one


def config_of(layers: int, is_small: bool, kernels: str, is_compiled: bool) -> Config:
    model = ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=14336,
        rope_theta=500_000.0,
        tied_embeddings=False,
    )
    length, batch, micro = 4096, 4, 2
    if is_small:
        model = replace(model, vocab_size=512, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=160)
        length = 64
    config = Config(model=model)
    config.data = replace(config.data, seq_len=length)
    config.train = replace(config.train, steps=1000, global_batch=batch, micro_batch=micro)
    config.precision.params = ParamDtype.bfloat16
    config.kernels = replace(config.kernels, default=kernels, compile=is_compiled)
    return config


def fitting(device: torch.device, kernels: str, is_compiled: bool, is_small: bool) -> tuple[Config, dict[str, float]]:
    """The deepest stack of which the plan says that it fills at most 0.8 of the device, and the plan."""
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**40
    for layers in (2,) if is_small else LAYERS:
        config = config_of(layers, is_small, kernels, is_compiled)
        plan = plan_of(config, 1, Assumptions(peak_flops(device, torch.bfloat16) or CPU_PEAK))
        total = plan.worst.memory.total
        if total <= 0.8 * capacity:
            assert plan.estimate is not None
            return config, {
                "memory_gib": total / GIB,
                "tokens_per_second": plan.estimate.tokens_per_second,
                "mfu": plan.estimate.mfu,
                "parameters": plan.parameters,
            }
    raise SystemExit("gpu_model: not even two layers fit this device")


def measure(device: torch.device, config: Config, steps: int, warmup: int) -> dict[str, Any]:
    """Seconds of a step from a trainer on random tokens, and the most memory that its tensors took."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        prefix = Path(folder) / "data"
        with IndexWriter(prefix, np.uint16) as writer:
            for seed in range(40):
                vocab = min(config.model.vocab_size, 60_000)
                writer.add(np.random.default_rng(seed).zipf(1.2, 100_000) % vocab)
        config.data = replace(config.data, sources=[DataSource(str(prefix))])
        directory = RunDir(Path(folder) / "run")
        attempt = directory.attempt(1)
        attempt.path.mkdir(parents=True)
        write_json(directory.run, {"id": "benchmark"})
        context = RunContext(directory, "benchmark", attempt, 1, Fence(directory, 1), Pulse(None, 1))
        trainer = Trainer.build(config, single(device), context)
        times = []
        for number in range(warmup + steps):
            if number == warmup and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            trainer.step()
            _wait(device)
            times += [time.perf_counter() - began] if number >= warmup else []
        losses = [json.loads(line)["loss"] for line in trainer.context.attempt.metrics(1).read_text().splitlines()]
        kernels = {c.op: c.implementation for c in trainer.ops.choices}
        trainer.close()
    seconds = statistics.median(times)
    peak = peak_flops(device, torch.bfloat16)
    return {
        "layers": config.model.num_layers,
        "seconds": [seconds, min(times), max(times)],
        "tokens_per_second": config.train.global_batch * config.data.seq_len / seconds,
        "mfu": flops_per_step(config) / seconds / peak if peak else None,
        "memory_gib": torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None,
        "losses": [losses[0], losses[-1]],
        "kernels": kernels,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    is_small = arguments.small or device.type == "cpu"
    config, plan = fitting(device, arguments.kernels, arguments.compile, is_small)
    json.dump({**measure(device, config, arguments.steps, arguments.warmup), "plan": plan}, sys.stdout)


if __name__ == "__main__":
    main()
