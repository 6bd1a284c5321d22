"""What our Python adds to a call of a raw op: the op's signature, and autograd.

    python benchmarks/kernel_calls.py [--rounds 15] [--calls 2000] [--report FILE]

Tensors are empty, so that nothing is launched and only the way there counts. The library is the one built for the CPU;
on a GPU the same Python runs before the same dispatcher. Each round calls the raw op, ours without gradients and ours
with them in turn, `calls` times each; times are the thread's on its CPU, differences those within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import machine
from stoker.kernels.native import library
from stoker.kernels.native.build import Target, build

LIMITS = (1.0, 15.0)  # microseconds on top of the raw op: without gradients, with them


@dataclass(frozen=True)
class Call:
    """raw: the raw op alone. ours: the same through our function; its inputs require gradients or not."""

    name: str
    raw: Callable[[], object]
    plain: Callable[[], object]
    with_grad: Callable[[], object] | None


def calls() -> list[Call]:
    """Modules of native ops bind raw ops when they are imported, so they are imported here, after the library."""
    from stoker.kernels.native.rmsnorm import rmsnorm

    raw = torch.ops.stoker
    x, weight = torch.empty(0, 64), torch.ones(64)
    leaf, residual = x.clone().requires_grad_(), x.clone()
    return [
        Call(
            "rmsnorm",
            lambda: raw.rmsnorm.default(x, weight, 1e-5, 0.0),
            lambda: rmsnorm(x, weight, 1e-5),
            lambda: rmsnorm(leaf, weight, 1e-5),
        ),
        Call(
            "rmsnorm, residual",
            lambda: raw.rmsnorm_residual.default(x, residual, weight, 1e-5, 0.0),
            lambda: rmsnorm(x, weight, 1e-5, residual),
            lambda: rmsnorm(leaf, weight, 1e-5, residual),
        ),
    ]


def microseconds(call: Callable[[], object], number: int) -> float:
    began = time.thread_time()
    for _ in range(number):
        call()
    return (time.thread_time() - began) / number * 1e6


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def row(call: Call, rounds: int, number: int) -> str:
    ways = {"raw": call.raw, "plain": call.plain, **({"grad": call.with_grad} if call.with_grad else {})}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in list(ways) if turn % 2 else list(reversed(ways)):
            took = microseconds(ways[name], number)
            times[name] += [took] if turn else []
    cells = [call.name, spread(times["raw"])]
    for name, limit in zip(("plain", "grad"), LIMITS, strict=True):
        if name not in times:
            cells += ["", ""]
            continue
        added = [a - b for a, b in zip(times[name], times["raw"], strict=True)]
        verdict = "met" if statistics.median(added) <= limit else "MISSED"
        cells += [spread(added), f"{limit:g}: {verdict}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    library.load(build(Target(emulated=True)))
    lines = [
        TITLE,
        "| op | raw op, us | ours without gradients adds, us | at most | ours with them adds, us | at most |",
        "|---|---|---|---|---|---|",
        *(row(call, arguments.rounds, arguments.calls) for call in calls()),
        "",
        f"{arguments.rounds} rounds of {arguments.calls} calls, medians (least to most). {machine()}.",
    ]
    print("\n".join(lines))
    if arguments.report:
        arguments.report.write_text("\n".join(lines) + "\n")


TITLE = """# What a call of a native op costs before its kernel

`python benchmarks/kernel_calls.py`: empty tensors, the library built for the CPU. "With gradients" is the forward call
of a tensor that requires one: autograd's node, saved tensors, the wrapper.
"""


if __name__ == "__main__":
    main()
