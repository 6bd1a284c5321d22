"""Our training step against a bare PyTorch loop of the same model, step by step in one process, on one CPU thread.

    python benchmarks/trainer.py [--rounds 30] [--report benchmarks/trainer-2026-11-30.md]

The bare loop is what a good engineer writes for one job: torch's own fused pieces, no accumulation, no checkpoints, no
metrics beyond the loss. It runs twice, as two models: bare against bare is the noise of the comparison. Each round runs
one step of all three, in an order that changes. Both train on the same samples, and the losses must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from stoker.conf.schema import Config, DataSource, ModelConfig
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.files import write_json
from stoker.launcher.run.layout import RunDir
from stoker.train.context import RunContext
from stoker.train.data.indexed_writer import IndexWriter
from stoker.train.grid import single
from stoker.train.loop import Trainer
from stoker.train.params import decoder_table
from stoker.train.pulse import Pulse
from torch import Tensor, nn

MODEL = ModelConfig(
    vocab_size=8192, hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, ffn_size=768, tied_embeddings=False
)
BATCH, LENGTH, LR = 8, 256, 3e-4


# ---- the bare loop


class BareBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        width = c.hidden_size // c.num_heads
        self.heads, self.kv_heads, self.width, self.eps = c.num_heads, c.num_kv_heads, width, c.norm_eps
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(c.hidden_size)) for _ in range(2))
        self.wq = nn.Linear(c.hidden_size, c.num_heads * width, bias=False)
        self.wk = nn.Linear(c.hidden_size, c.num_kv_heads * width, bias=False)
        self.wv = nn.Linear(c.hidden_size, c.num_kv_heads * width, bias=False)
        self.wo = nn.Linear(c.num_heads * width, c.hidden_size, bias=False)
        self.gate = nn.Linear(c.hidden_size, c.ffn_size, bias=False)
        self.up = nn.Linear(c.hidden_size, c.ffn_size, bias=False)
        self.down = nn.Linear(c.ffn_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, s, d = x.shape
        h = F.rms_norm(x, (d,), self.norm1, self.eps)
        q = rotate(self.wq(h).view(n, s, self.heads, self.width).transpose(1, 2), cos, sin)
        k = rotate(self.wk(h).view(n, s, self.kv_heads, self.width).transpose(1, 2), cos, sin)
        v = self.wv(h).view(n, s, self.kv_heads, self.width).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(out.transpose(1, 2).reshape(n, s, -1))
        h = F.rms_norm(x, (d,), self.norm2, self.eps)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class BareModel(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(BareBlock(c) for _ in range(c.num_layers))
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.eps = c.norm_eps
        width = c.hidden_size // c.num_heads
        angle = torch.outer(torch.arange(LENGTH), c.rope_theta ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("cos", torch.cat((angle.cos(), angle.cos()), -1))
        self.register_buffer("sin", torch.cat((angle.sin(), angle.sin()), -1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(F.rms_norm(x, x.shape[-1:], self.norm, self.eps))


class BareLoop:
    def __init__(self, initial: dict[str, Tensor], samples: Callable[[], np.ndarray]) -> None:
        self.model, self.samples = BareModel(MODEL), samples
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(initial[name])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
        )

    def step(self) -> float:
        rows = torch.from_numpy(self.samples().astype(np.int64))
        logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.view(-1, MODEL.vocab_size), rows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


# ---- ours


def our_config(prefix: Path, steps: int) -> Config:
    config = Config(model=MODEL)
    config.data = replace(config.data, sources=[DataSource(str(prefix))], seq_len=LENGTH)
    config.train = replace(config.train, steps=steps, global_batch=BATCH, micro_batch=BATCH)
    # One rate and no decay, so that both sides do the same arithmetic and the losses can be compared.
    config.optim = replace(config.optim, lr=LR, min_lr=LR, weight_decay=0.0)
    return config


def our_trainer(run: Path, config: Config) -> Trainer:
    directory = RunDir(run)
    attempt = directory.attempt(1)
    attempt.path.mkdir(parents=True)
    write_json(directory.run, {"id": "benchmark"})
    context = RunContext(directory, "benchmark", attempt, 1, Fence(directory, 1), Pulse(None, 1))
    return Trainer.build(config, single(), context)


def bare_names(trainer: Trainer) -> dict[str, Tensor]:
    """Our initial weights under the bare model's names."""
    table = decoder_table(MODEL)
    names = {"embedding": "embedding.weight", "norm": "norm", "head": "head.weight"}
    for facts in table:
        if facts.name.startswith("blocks."):
            _, layer, part, name = facts.name.split(".")
            short = {"norm": "norm1" if part == "attention" else "norm2"}.get(name, f"{name}.weight")
            names[facts.name] = f"blocks.{layer}.{short}"
    return {bare: table.local(trainer.model, ours).detach().clone() for ours, bare in names.items()}


# ---- measuring


@dataclass(frozen=True)
class Times:
    wall: list[float]
    cpu: list[float]
    losses: list[float]


def measure(steps: dict[str, Callable[[], float | None]], rounds: int, warmup: int) -> dict[str, Times]:
    orders = list(permutations(steps))
    times = {name: Times([], [], []) for name in steps}
    for number in range(warmup + rounds):
        for name in orders[number % len(orders)]:
            wall, cpu = time.perf_counter(), time.process_time()
            loss = steps[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if loss is not None:
                times[name].losses.append(loss)
            if number >= warmup:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def ratio(of: list[float], over: list[float]) -> str:
    """Median of the per-round ratios, with their quartiles."""
    ratios = [b / a for a, b in zip(of, over, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def median_ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def report(times: dict[str, Times], rounds: int) -> str:
    a, ours, b = times["bare"], times["ours"], times["bare again"]
    rows = [f"| {name} | {median_ms(t.cpu)} | {median_ms(t.wall)} | {t.losses[-1]:.6f} |" for name, t in times.items()]
    differences = [abs(x - y) for x, y in zip(a.losses, ours.losses, strict=True)]
    return "\n".join(
        [
            "| step | CPU ms, median | wall ms, median | last loss |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Speed relative to bare, median of {rounds} per-round ratios (quartiles):",
            "",
            "| | CPU | wall |",
            "|---|---|---|",
            f"| ours | {ratio(ours.cpu, a.cpu)} | {ratio(ours.wall, a.wall)} |",
            f"| bare again (noise) | {ratio(b.cpu, a.cpu)} | {ratio(b.wall, a.wall)} |",
            "",
            f"Difference between our loss and the bare one: {differences[0]:.1e} in the first step, at most "
            f"{max(differences):.1e} over all {len(differences)} (rounding, which AdamW's division amplifies).",
        ]
    )


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpu}, {os.cpu_count()} cores, {system}, one thread; load average {os.getloadavg()[0]:.1f} at the end"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--report", type=Path, help="write the result there as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = arguments.rounds + arguments.warmup
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "data"
        with IndexWriter(prefix, np.uint16) as writer:
            for seed in range(200):
                writer.add(np.random.default_rng(seed).zipf(1.2, 10_000) % MODEL.vocab_size)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = our_trainer(Path(scratch) / "run", our_config(prefix, steps))
            times = run(trainer, bare_names(trainer), prefix, arguments.rounds, arguments.warmup)
            trainer.close()
    text = report(times, arguments.rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{text}\n\n{machine()}; peak memory of the process {peak:.0f} MiB")
    if arguments.report:
        arguments.report.write_text(f"{TITLE}\n\n{machine()}.\n\n{text}\n")


TITLE = (
    "# Our step against a bare PyTorch loop\n\n"
    "`python benchmarks/trainer.py`: 8 layers, hidden 256, 8 heads, 4 key heads, ffn 768, sequence 256, vocabulary\n"
    "8192 untied, batch 8, float32, AdamW fused, clipping at 1. One step of each in turn, in one process."
)


def run(trainer: Trainer, initial: dict[str, Tensor], prefix: Path, rounds: int, warmup: int) -> dict[str, Times]:
    """Measure; the bare loops read the same windows as our trainer, by a plain memory map."""
    assert trainer.data is not None
    dataset = trainer.data.train.dataset
    tokens = np.memmap(f"{prefix}.bin", np.uint16, mode="r")

    def samples() -> Callable[[], np.ndarray]:
        windows = iter(
            [dataset.sources[0].order.take(np.arange(i * BATCH, (i + 1) * BATCH)) for i in range(rounds + warmup)]
        )
        return lambda: np.stack([tokens[w * LENGTH : w * LENGTH + LENGTH + 1] for w in next(windows)])

    bare, again = BareLoop(initial, samples()), BareLoop(initial, samples())

    def ours() -> None:
        torch.set_deterministic_debug_mode("error")  # as the trainer set it; the bare loops go without
        trainer.step()
        torch.set_deterministic_debug_mode("default")

    times = measure({"bare": bare.step, "ours": ours, "bare again": again.step}, rounds, warmup)
    lines = trainer.context.attempt.metrics(1).read_text().splitlines()
    return times | {"ours": replace(times["ours"], losses=[json.loads(line)["loss"] for line in lines])}


if __name__ == "__main__":
    main()
