"""Our step beside those of other trainers, each in a virtual environment of its own, on one CPU thread.

    python benchmarks/peers.py [PEER ...] [--rounds 20] [--venvs DIR] [--report benchmarks/peers-2026-11-30.md]

Makes the environments that are missing (some GB), starts every peer once (peers/with_*.py), and lets them take one step
each in turn: a process stands still between its steps. All train a model of one shape (peers/clock.py) by their own
trainer, loader, loss and clipping; what lies between two updates of the weights is one step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import IO, Any

from measuring import machine, median_ms, ratio

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
PARAMETERS = 10_490_112


@dataclass(frozen=True)
class Peer:
    """installs: arguments of pip, one call each, under the constraint TORCH; none: this environment."""

    runner: str
    title: str
    installs: tuple[tuple[str, ...], ...] = ()


TRITON = ("--no-deps", "triton==3.8.0")  # imported, never run
PEERS = {
    "stoker": Peer("with_stoker.py", "stoker"),
    "bare": Peer("with_bare.py", "bare loop"),
    "torchtitan": Peer("with_torchtitan.py", "torchtitan 0.3.0", (("torchtitan==0.3.0",), TRITON)),
    "olmo-core": Peer("with_olmo_core.py", "OLMo-core 3.0.0", (("ai2-olmo-core==3.0.0",),)),
    "megatron-core": Peer(
        "with_megatron.py",
        "megatron-core 0.19.2",
        # Its metadata asks for a newer Python than its wheel is built for.
        (
            (TORCH, "numpy", "packaging", "psutil"),
            ("--no-deps", "--ignore-requires-python", "megatron-core==0.19.2"),
            TRITON,
        ),
    ),
    "litgpt": Peer("with_litgpt.py", "litgpt 0.5.13", (("litgpt==0.5.13",),)),
}


def python_of(name: str, venvs: Path) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there, or not with these packages."""
    peer, venv = PEERS[name], venvs / name
    complete, packages = venv / "complete", repr(peer.installs)
    if not peer.installs:
        return Path(sys.executable)
    if not complete.exists() or complete.read_text() != packages:
        print(f"making {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        constraint = venv / "constraint.txt"
        constraint.write_text(f"{TORCH}\n")
        for arguments in peer.installs:
            pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments]
            subprocess.run(pip, check=True, env=os.environ | {"PIP_CONSTRAINT": str(constraint)})
        complete.write_text(packages)
    return venv / "bin" / "python"


@dataclass
class Runner:
    """A peer at work: stands still until `step`. What it prints goes to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    orders: IO[str]
    answers: IO[str]
    log: Path
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    rss: float = 0.0

    @staticmethod
    def start(name: str, venvs: Path, log: Path) -> Runner:
        python, peer = python_of(name, venvs), PEERS[name]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        # What is ours is found beside this file; a peer sees nothing of it.
        paths = [] if peer.installs else [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        order_read, order_write = os.pipe()
        answer_read, answer_write = os.pipe()
        environment["STEP_CLOCK"] = f"{order_read},{answer_write}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, HERE / "peers" / peer.runner],
                env=environment,
                cwd=log.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(order_read, answer_write),
            )
        os.close(order_read)
        os.close(answer_write)
        return Runner(name, process, os.fdopen(order_write, "w"), os.fdopen(answer_read), log)

    def wait(self) -> dict[str, Any]:
        """For the end of the step under way."""
        line = self.answers.readline()
        if not line:
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
            raise SystemExit(f"{self.name} ended before its measurement was over:\n{end}")
        answer: dict[str, Any] = json.loads(line)
        assert answer["parameters"] == PARAMETERS, f"{self.name} has {answer['parameters']:,} parameters"
        return answer

    def step(self, is_counted: bool) -> None:
        print("step", file=self.orders, flush=True)
        answer = self.wait()
        if is_counted:
            self.cpu.append(answer["cpu"])
            self.wall.append(answer["wall"])
            self.rss = answer["rss"]

    def end(self) -> None:
        self.orders.close()
        self.process.wait()


def measure(names: Sequence[str], venvs: Path, rounds: int, warmup: int, minutes: float) -> list[Runner]:
    """Fewer rounds when `minutes` are over before; three at least."""
    for name in names:
        python_of(name, venvs)
    ends = time.monotonic() + 60 * minutes
    runners: list[Runner] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch  # for what the peers write
        try:
            for name in names:
                runners.append(Runner.start(name, venvs, Path(scratch) / f"{name}.log"))
            for runner in runners:
                runner.wait()
            for number in range(warmup + rounds):
                if time.monotonic() > ends and number >= warmup + 3:
                    break
                first = number % len(runners)  # the order turns, and runs backwards in every other round
                order = (runners[first:] + runners[:first])[:: 1 if number % 2 else -1]
                for runner in order:
                    runner.step(number >= warmup)
        finally:
            for runner in runners:
                runner.end()
    return runners


def report(runners: Sequence[Runner]) -> str:
    ours = next(runner for runner in runners if runner.name == "stoker")
    rows = []
    for r in sorted(runners, key=lambda runner: statistics.median(runner.cpu)):
        same = r is ours
        rows.append(
            f"| {PEERS[r.name].title} | {median_ms(r.cpu)} | {min(r.cpu) * 1e3:.1f} | "
            f"{'1' if same else ratio(ours.cpu, r.cpu)} | {'1' if same else ratio(ours.wall, r.wall)} | {r.rss:.0f} |"
        )
    return "\n".join(
        [
            "| trainer | CPU ms, median | least | speed of stoker over it by CPU | by wall | peak RSS, MiB |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"{len(ours.cpu)} rounds of one step each; speeds are medians of the rounds' ratios (quartiles).",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", choices=[*PEERS, []], help="default: all; stoker is always one of them")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0, help="after so many no round begins")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "stoker-bench")
    parser.add_argument("--report", type=Path, help="write the result there as Markdown")
    arguments = parser.parse_args()
    names = list(dict.fromkeys(["stoker", *(arguments.peers or PEERS)]))
    runners = measure(names, arguments.venvs.absolute(), arguments.rounds, arguments.warmup, arguments.minutes)
    text = TEXT.format(date=date.today(), table=report(runners), machine=machine())
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


TEXT = """# Our step beside other trainers'

`python benchmarks/peers.py`, {date}. All train the same shape (8 layers, hidden 256, 8 heads, 4 key heads, ffn 768,
sequence 256, vocabulary 8192 untied: 10,490,112 parameters, checked) on batches of 8 in float32 with AdamW, clipping at
1, eager, one process, one thread. Each is its own trainer with its own loader, loss, metrics and logging; a step is
what lies between two updates of the weights, and the steps of all are taken in turn. The bare loop is
benchmarks/bare.py.

{table}

What each got so that it runs on a CPU, eager like the others (peers/with_*.py):

- torchtitan: answers to what it asks of torch.cpu; its own ScaledDotProductAttention, as its language models offer flex
  and varlen attention only; no activation checkpointing; FSDP2 on one rank and the chunked loss are its defaults.
- megatron-core: answers for torch.cuda; GPTModel of local layers, its DistributedDataParallel and its optimizer.
  Without Transformer Engine it has no fused attention.
- OLMo-core: nothing; AdamW fused was asked for.
- litgpt: torch.compile of the whole model, which is hard-wired, is left out; its AdamW is fused on CUDA only.

{machine}.
"""


if __name__ == "__main__":
    main()
