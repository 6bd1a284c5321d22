"""Our training step against a bare PyTorch loop of the same model, step by step in one process, on one CPU thread.

    python benchmarks/trainer.py [CASE ...] [--rounds 30] [--report benchmarks/trainer-2026-11-30.md]

The bare loop (bare.py) runs twice, as two models: bare against bare is the noise of the comparison. Each round runs one
step of everything in an order that changes. All train on the same samples, and the losses must agree. Each case has a
process of its own; so has each measurement of memory. Python's share of a step: overhead.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from bare import BATCH, LENGTH, LR, MODEL, BareLoop, initial_weights
from measuring import Times, machine, measure, median_ms, ratio
from stoker.conf.schema import Config, DataSource, ModelConfig, ParamDtype
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.files import write_json
from stoker.launcher.run.layout import RunDir
from stoker.train.context import RunContext
from stoker.train.data.indexed_writer import IndexWriter
from stoker.train.grid import single
from stoker.train.loop import Trainer
from stoker.train.parallel.ddp import DistributedDataParallel
from stoker.train.plan.live import LiveBytes
from stoker.train.pulse import Pulse
from torch import Tensor


@dataclass(frozen=True)
class Case:
    title: str
    params: ParamDtype
    against: dict[str, str]  # variant of the bare loop -> its precision; the first is what ours is held against
    is_compiled: bool = False


FLOAT32 = {"bare": "float32", "bare again": "float32"}
# Both ways in which such loops use bfloat16; the one with masters is what ours does.
BFLOAT16 = {"bare": "masters", "bare again": "masters", "bare, autocast": "autocast"}
CASES = {
    "float32": Case("float32, eager", ParamDtype.float32, FLOAT32),
    "bfloat16": Case("bfloat16 with float32 masters, eager", ParamDtype.bfloat16, BFLOAT16),
    "float32-compiled": Case("float32, blocks compiled", ParamDtype.float32, FLOAT32, True),
    "bfloat16-compiled": Case("bfloat16 with float32 masters, blocks compiled", ParamDtype.bfloat16, BFLOAT16, True),
}


# ---- both sides


def our_config(prefix: Path, steps: int, model: ModelConfig = MODEL) -> Config:
    config = Config(model=model)
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


def write_data(prefix: Path, vocab: int = MODEL.vocab_size) -> None:
    with IndexWriter(prefix, np.uint16) as writer:
        for seed in range(200):
            writer.add(np.random.default_rng(seed).zipf(1.2, 10_000) % vocab)


def windows(trainer: Trainer, prefix: Path, steps: int) -> Callable[[], np.ndarray]:
    """The samples that our trainer reads, a batch per call, by a plain memory map."""
    assert trainer.data is not None
    order, length = trainer.data.train.dataset.sources[0].order, trainer.config.data.seq_len
    batch = trainer.config.train.global_batch
    tokens = np.memmap(f"{prefix}.bin", np.uint16, mode="r")
    batches = iter([order.take(np.arange(i * batch, (i + 1) * batch)) for i in range(steps)])
    return lambda: np.stack([tokens[w * length : w * length + length + 1] for w in next(batches)])


def stepping(trainer: Trainer) -> Callable[[], None]:
    def ours() -> None:
        torch.set_deterministic_debug_mode("error")  # as the trainer set it; the bare loops go without
        trainer.step()
        torch.set_deterministic_debug_mode("default")

    return ours


@contextlib.contextmanager
def scene(case: Case, steps: int) -> Iterator[tuple[Path, Config]]:
    """A run's folder with data, and our configuration; what our trainer prints is swallowed."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        prefix = Path(scratch) / "data"
        write_data(prefix)
        config = our_config(prefix, steps)
        config.precision.params, config.kernels.compile = case.params, case.is_compiled
        yield Path(scratch), config


# ---- speed


def speed(name: str, rounds: int, warmup: int, minutes: float) -> str:
    case = CASES[name]
    with scene(case, rounds + warmup) as (folder, config):
        trainer = our_trainer(folder / "run", config)
        torch.set_deterministic_debug_mode("default")
        loops = {
            variant: BareLoop(
                initial_weights(), windows(trainer, folder / "data", rounds + warmup), precision, case.is_compiled
            )
            for variant, precision in case.against.items()
        }
        steps: dict[str, Callable[[], float | None]] = {"bare": loops.pop("bare").step, "ours": stepping(trainer)}
        times = measure(steps | {variant: loop.step for variant, loop in loops.items()}, rounds, warmup, minutes)
        lines = trainer.context.attempt.metrics(1).read_text().splitlines()
        trainer.close()
    times["ours"].losses.extend(json.loads(line)["loss"] for line in lines)
    return speed_report(case.title, times)


def speed_report(title: str, times: dict[str, Times]) -> str:
    base, ours = times["bare"], times["ours"]
    rows = []
    for name, t in times.items():
        cpu, wall = ("1", "1") if t is base else (ratio(t.cpu, base.cpu), ratio(t.wall, base.wall))
        rows.append(f"| {name} | {median_ms(t.cpu)} | {cpu} | {median_ms(t.wall)} | {wall} | {t.losses[-1]:.4f} |")
    apart = [abs(x - y) for x, y in zip(base.losses, ours.losses, strict=True)]
    return "\n".join(
        [
            f"### {title}",
            "",
            "| step | CPU ms, median | its speed over bare's | wall ms, median | its speed over bare's | last loss |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"{len(ours.cpu)} rounds. Our loss and the bare one differ by {apart[0]:.1e} in the first step, by at most "
            f"{max(apart):.1e} in all {len(apart)}.",
            "",
        ]
    )


# ---- memory


def one_side(case: Case, side: str, folder: Path, config: Config) -> tuple[Callable[[], object], list[Tensor]]:
    """(a step, the tensors that outlive it) of ours, or of a variant of the bare loop, alone in its process."""
    if side == "ours":
        trainer = our_trainer(folder / "run", config)
        stepping(trainer)()
        assert isinstance(trainer.data_parallel, DistributedDataParallel)
        held = [entry.tensor for entry in trainer.entries()]
        return stepping(trainer), [*held, trainer.data_parallel.flat, *trainer.model.buffers()]
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (BATCH, LENGTH + 1))
    loop = BareLoop(initial_weights(), lambda: rows, case.against[side], case.is_compiled)
    loop.step()
    held = [*loop.model.parameters(), *loop.model.buffers(), *loop.updated]
    held += [p.grad for p in loop.updated if p.grad is not None]
    return loop.step, held + [t for state in loop.optimizer.state.values() for t in state.values()]


def live_mib(name: str, side: str) -> float:
    """The most that live tensors held at one time in a step."""
    with scene(CASES[name], 3) as (folder, config):
        step, held = one_side(CASES[name], side, folder, config)
        live = LiveBytes()
        live.watch(held)
        with live:
            step()
    return live.peak / 2**20


def resident_mib(name: str, side: str) -> float:
    """The most that the process had in memory, torch and this package included."""
    with scene(CASES[name], 6) as (folder, config):
        step, _ = one_side(CASES[name], side, folder, config)
        for _ in range(4):
            step()
    high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(high.split()[1]) / 1024


MEASURES = {"live": live_mib, "resident": resident_mib}


def memory_report(names: Iterable[str]) -> str:
    """Peak memory by case. Under the compiler only the resident set is seen: its kernels allocate by themselves."""
    rows = ["| | live tensors, MiB: bare | ours | ours / bare | resident, MiB: bare | ours | ours / bare |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name in names:
        cells = [CASES[name].title]
        for what in MEASURES:
            if what == "live" and CASES[name].is_compiled:
                cells += ["", "", ""]
                continue
            bare, ours = (float(in_process("--peak", what, name, side)) for side in ("bare", "ours"))
            cells += [f"{bare:.0f}", f"{ours:.0f}", f"{ours / bare:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


# ---- the whole


def in_process(*arguments: str) -> str:
    """What this script prints with these arguments, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="per case; after so many no round begins")
    parser.add_argument("--report", type=Path, help="write the result there as Markdown")
    parser.add_argument("--speed", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.speed:
        print(speed(arguments.speed, arguments.rounds, arguments.warmup, arguments.minutes))
        return
    if arguments.peak:
        what, name, side = arguments.peak
        print(MEASURES[what](name, side))
        return
    names = arguments.cases or list(CASES)
    length = [f"--{name}={getattr(arguments, name)}" for name in ("rounds", "warmup", "minutes")]
    parts = [TITLE]
    for name in names:
        parts.append(in_process("--speed", name, *length))
        print(parts[-1], flush=True)
    parts += ["## Peak memory of a step", "", memory_report(names), "", f"{machine()}."]
    print("\n".join(parts[-5:]))
    if arguments.report:
        arguments.report.write_text("\n".join(parts) + "\n")


TITLE = """# Our step against a bare PyTorch loop

`python benchmarks/trainer.py`: 8 layers, hidden 256, 8 heads, 4 key heads, ffn 768, sequence 256, vocabulary 8192
untied, batch 8, AdamW fused, clipping at 1. One step of each in turn, in one process per case; ratios are medians of
the rounds' ratios (quartiles), above 1 is faster than the bare loop. "bare again" is a second bare loop: the noise.

## Speed
"""


if __name__ == "__main__":
    main()
