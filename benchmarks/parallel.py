"""Our step on two processes against minimal hand-written parallel loops of the same model, over gloo on CPUs.

    python benchmarks/parallel.py tensor [--rounds 30] [--report benchmarks/parallel-2026-11-30.md]

Each case is what a good engineer writes for one job: one parallel dimension, plain autograd functions, nothing else.
Each round runs one step of ours and of theirs on all ranks, in an order that changes. Both train on the same samples
from the same weights, and the losses must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bare import BATCH, LENGTH, LR, MODEL, initial_weights, rotate
from by_hand_data import DdpLoop, Zero1Loop
from by_hand_pipeline import MICRO, PipelineLoop
from measuring import Times, machine, measure, median_ms, ratio
from stoker.conf.layout import Layout
from stoker.conf.schema import Config, DataParallel, ModelConfig
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.files import write_json
from stoker.launcher.run.layout import RunDir
from stoker.train.context import RunContext
from stoker.train.grid import Grid, Membership, form
from stoker.train.loop import Trainer
from stoker.train.parallel.stages import stage_specs
from stoker.train.pulse import Pulse
from torch import Tensor, nn
from trainer import our_config, windows, write_data

RANKS = 2
Samples = Callable[[], "np.ndarray[Any, Any]"]
Step = Callable[[], float | None]


# ---- tensor parallelism by hand: Megatron's two functions, with sequence parallelism


class Gather(torch.autograd.Function):
    """All tokens from each rank's; back, the sum of each rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return scatter(grad)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gather(grad)


def gather(x: Tensor) -> Tensor:
    out = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
    dist.all_gather_single(out, x.contiguous())
    return out


def scatter(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] // RANKS, *x.shape[1:])
    dist.reduce_scatter_single(out, x.contiguous())
    return out


class VocabularyLoss(torch.autograd.Function):
    """Mean cross-entropy of logits [T, V / ranks], see Megatron-LM's vocab_parallel_cross_entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        logits = logits - highest.unsqueeze(-1)
        local = targets - first
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        chosen = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)
        dist.all_reduce(chosen)
        exps = logits.exp_()
        total = exps.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(exps.div_(total.unsqueeze(-1)), local, elsewhere)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        probabilities.scatter_add_(1, local.unsqueeze(1), (elsewhere.to(probabilities.dtype) - 1.0).unsqueeze(1))
        return probabilities.mul_(grad / len(local)), None, None


class TensorBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        d, width = c.hidden_size, c.hidden_size // c.num_heads
        self.width, self.eps = width, c.norm_eps
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(d)) for _ in range(2))
        self.wq = nn.Linear(d, c.num_heads * width // RANKS, bias=False)
        self.wk = nn.Linear(d, c.num_kv_heads * width // RANKS, bias=False)
        self.wv = nn.Linear(d, c.num_kv_heads * width // RANKS, bias=False)
        self.wo = nn.Linear(c.num_heads * width // RANKS, d, bias=False)
        self.gate = nn.Linear(d, c.ffn_size // RANKS, bias=False)
        self.up = nn.Linear(d, c.ffn_size // RANKS, bias=False)
        self.down = nn.Linear(c.ffn_size // RANKS, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = Gather.apply(F.rms_norm(x, x.shape[-1:], self.norm1, self.eps))
        q, k, v = (w(h).view(BATCH, LENGTH, -1, self.width).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + Scatter.apply(self.wo(out.transpose(1, 2).reshape(BATCH * LENGTH, -1)))
        h = Gather.apply(F.rms_norm(x, x.shape[-1:], self.norm2, self.eps))
        return x + Scatter.apply(self.down(F.silu(self.gate(h)) * self.up(h)))


class TensorModel(nn.Module):
    def __init__(self, c: ModelConfig, rank: int) -> None:
        super().__init__()
        self.rows = c.vocab_size // RANKS
        self.first, self.eps = rank * self.rows, c.norm_eps
        self.embedding = nn.Embedding(self.rows, c.hidden_size)
        self.blocks = nn.ModuleList(TensorBlock(c) for _ in range(c.num_layers))
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.head = nn.Linear(c.hidden_size, self.rows, bias=False)
        width = c.hidden_size // c.num_heads
        angle = torch.outer(torch.arange(LENGTH), c.rope_theta ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("cos", torch.cat((angle.cos(), angle.cos()), -1))
        self.register_buffer("sin", torch.cat((angle.sin(), angle.sin()), -1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        local = tokens.reshape(-1) - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        x = Scatter.apply(self.embedding(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(1), 0.0))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        h = Gather.apply(F.rms_norm(x, x.shape[-1:], self.norm, self.eps))
        loss: Tensor = VocabularyLoss.apply(self.head(h), targets.reshape(-1), self.first)
        return loss


class TensorLoop:
    """Weights are cut as ours are; norms' gradients are summed, because each rank sees its tokens only."""

    def __init__(self, rank: int, samples: Samples) -> None:
        self.model, self.samples = TensorModel(MODEL, rank), samples
        load(self.model, lambda name, whole: cut(name, whole, rank))
        self.norms = [p for n, p in self.model.named_parameters() if "norm" in n]
        self.cut = [p for n, p in self.model.named_parameters() if "norm" not in n]
        self.optimizer = adamw(self.model)

    def step(self) -> float:
        rows = torch.from_numpy(self.samples().astype(np.int64))
        loss = self.model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        flat = torch.cat([p.grad for p in self.norms])
        dist.all_reduce(flat)
        for p, grad in zip(self.norms, flat.split([len(p) for p in self.norms]), strict=True):
            p.grad.copy_(grad)
        square = torch.stack([n.square() for n in torch._foreach_norm([p.grad for p in self.cut])]).sum()
        dist.all_reduce(square)
        clip(self.model, (square + flat.square().sum()).sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def cut(name: str, whole: Tensor, rank: int) -> Tensor:
    if "norm" in name:
        return whole
    return whole.chunk(RANKS, 1 if name.endswith(("wo.weight", "down.weight")) else 0)[rank]


# ---- what the cases share


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)


def clip(model: nn.Module, norm: Tensor) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], (1.0 / (norm + 1e-6)).clamp(max=1.0))


def load(model: nn.Module, part: Callable[[str, Tensor], Tensor]) -> None:
    """Our initial weights."""
    whole = initial_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part(name, whole[name]))


def load_all(model: nn.Module) -> None:
    load(model, lambda _, whole: whole)


def pipeline_loop(rank: int, samples: Samples) -> PipelineLoop:
    config = Config(model=MODEL)
    config.parallel.pipeline, config.data.seq_len = RANKS, LENGTH

    def finish(model: nn.Module) -> Callable[[Tensor], None]:
        optimizer = adamw(model)

        def update(norm: Tensor) -> None:
            clip(model, norm)
            optimizer.step()
            optimizer.zero_grad()

        return update

    spec = stage_specs(config)[rank]
    return PipelineLoop(MODEL, spec, RANKS, samples, load_all, finish)


@dataclass(frozen=True)
class Case:
    """What is compared: a layout of ours, and the hand-written loop of a rank, given its samples."""

    title: str
    parallel: dict[str, Any]
    by_hand: Callable[[int, Samples], Any]
    micro_batch: int = BATCH


CASES = {
    "tensor": Case("Tensor and sequence parallelism over 2 ranks", {"tensor": RANKS}, TensorLoop),
    "ddp": Case(
        "Data parallelism over 2 ranks, against DistributedDataParallel",
        {},
        lambda rank, samples: DdpLoop(load_all, samples),
        BATCH // RANKS,
    ),
    "zero1": Case(
        "ZeRO-1 over 2 ranks, against one flat buffer",
        {"data": DataParallel.zero1},
        lambda rank, samples: Zero1Loop(load_all, samples),
        BATCH // RANKS,
    ),
    "pipeline": Case(
        f"1F1B of {MICRO} micro-batches over 2 ranks", {"pipeline": RANKS}, pipeline_loop, micro_batch=BATCH // MICRO
    ),
}


def rank_main(rank: int, port: int, name: str, prefix: Path, scratch: Path, rounds: int, warmup: int) -> None:
    """One rank: build both, measure both; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    case, config = CASES[name], our_config(prefix, rounds + warmup)
    for field, value in case.parallel.items():
        setattr(config.parallel, field, value)
    config.train.micro_batch = case.micro_batch
    grid = form(Membership(rank, RANKS, rank, 1, 1, "127.0.0.1", port), Layout.of(config, RANKS), backend="gloo")
    with contextlib.redirect_stdout(io.StringIO()):
        ours = built(scratch / "run", config, grid)
        steps: dict[str, Step] = {"ours": lambda: ours.step()}
        for other in ("by hand", "by hand again"):
            steps[other] = case.by_hand(rank, windows(ours, prefix, rounds + warmup)).step
        times = measure(steps, rounds, warmup)
    if rank == 0:
        lines = ours.context.attempt.metrics(1).read_text().splitlines()
        times["ours"].losses.extend(json.loads(line)["loss"] for line in lines)
        (scratch / "times.json").write_text(json.dumps({n: vars(t) for n, t in times.items()}))
    grid.world.barrier()
    ours.close()
    grid.close()


def built(run: Path, config: Config, grid: Grid) -> Trainer:
    directory = RunDir(run)
    attempt = directory.attempt(1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    write_json(directory.run, {"id": "benchmark"})
    context = RunContext(directory, "benchmark", attempt, 1, Fence(directory, 1), Pulse(None, 1))
    return Trainer.build(config, grid, context)


def compare(name: str, rounds: int, warmup: int) -> str:
    """Run a case on forked ranks (nothing of torch has run before), and put the result in words."""
    with tempfile.TemporaryDirectory() as directory:
        scratch, prefix = Path(directory), Path(directory) / "data"
        write_data(prefix)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        fork = multiprocessing.get_context("fork")
        arguments = (store.port, name, prefix, scratch, rounds, warmup)
        ranks = [fork.Process(target=rank_main, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{name}: a rank failed")
        times = {n: Times(**t) for n, t in json.loads((scratch / "times.json").read_text()).items()}
    return report(CASES[name].title, times, rounds)


def report(title: str, times: dict[str, Times], rounds: int) -> str:
    hand, ours, again = times["by hand"], times["ours"], times["by hand again"]
    apart = [abs(x - y) for x, y in zip(hand.losses, ours.losses, strict=True)]
    rows = [f"| {name} | {median_ms(t.cpu)} | {median_ms(t.wall)} | {t.losses[-1]:.6f} |" for name, t in times.items()]
    return "\n".join(
        [
            f"## {title}",
            "",
            "| step | CPU ms on rank 0, median | wall ms, median | last loss |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Speed relative to the loop by hand, median of {rounds} per-round ratios (quartiles):",
            "",
            "| | CPU | wall |",
            "|---|---|---|",
            f"| ours | {ratio(ours.cpu, hand.cpu)} | {ratio(ours.wall, hand.wall)} |",
            f"| by hand again (noise) | {ratio(again.cpu, hand.cpu)} | {ratio(again.wall, hand.wall)} |",
            "",
            f"Losses differ by {apart[0]:.1e} in the first step and at most {max(apart):.1e} in all {len(apart)}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--report", type=Path, help="write the result there as Markdown")
    arguments = parser.parse_args()
    parts = ["# Our parallel step against loops by hand", ""]
    for name in arguments.cases or CASES:
        parts.append(compare(name, arguments.rounds, arguments.warmup))
        print(parts[-1], flush=True)
    parts.append(f"{machine()}, {RANKS} processes with one thread each.")
    print(parts[-1])
    if arguments.report:
        arguments.report.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
