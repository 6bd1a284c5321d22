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
from torch import Tensor

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
    from stoker.kernels.native.cross_entropy import cross_entropy, cross_entropy_stats
    from stoker.kernels.native.glu import gelu, swiglu
    from stoker.kernels.native.layernorm import layernorm
    from stoker.kernels.native.moe_permute import moe_permute, moe_unpermute
    from stoker.kernels.native.moe_topk import moe_topk
    from stoker.kernels.native.rmsnorm import rmsnorm
    from stoker.kernels.native.rope import rope

    raw = torch.ops.stoker
    x, weight, bias, more = torch.empty(0, 64), torch.ones(64), torch.zeros(64), torch.empty(0, 64)
    q, k = torch.empty(1, 0, 4, 16), torch.empty(1, 0, 2, 16)
    cos, sin, positions, frequencies = (
        torch.empty(1, 0, 8),
        torch.empty(1, 0, 8),
        torch.empty(1, 0).long(),
        torch.ones(8),
    )
    targets, choices, copies = torch.empty(0).long(), torch.empty(0, 2).long(), torch.empty(0).long()
    weights = torch.empty(0, 2)
    top = raw.moe_topk.default

    def call(name: str, raw_op: Callable[[], object], ours: Callable[[Tensor], object], first: Tensor) -> Call:
        leaf = first.clone().requires_grad_()
        return Call(name, raw_op, lambda: ours(first), lambda: ours(leaf))

    return [
        call("rmsnorm", lambda: raw.rmsnorm.default(x, weight, 1e-5, 0.0), lambda t: rmsnorm(t, weight, 1e-5), x),
        call(
            "rmsnorm, residual",
            lambda: raw.rmsnorm_residual.default(x, more, weight, 1e-5, 0.0),
            lambda t: rmsnorm(t, weight, 1e-5, more),
            x,
        ),
        call(
            "layernorm",
            lambda: raw.layernorm.default(x, weight, bias, 1e-5),
            lambda t: layernorm(t, weight, bias, 1e-5),
            x,
        ),
        call(
            "rope",
            lambda: raw.rope.default(q, k, cos, sin, False, 1),
            lambda t: rope(t, k, positions, frequencies, cos_sin=(cos, sin)),
            q,
        ),
        call("swiglu", lambda: raw.swiglu.default(x, more), lambda t: swiglu(t, more), x),
        call("gelu", lambda: raw.gelu.default(x), gelu, x),
        call(
            "cross_entropy",
            lambda: raw.cross_entropy.default(x, targets, -100, 0.0),
            lambda t: cross_entropy(t, targets),
            x,
        ),
        Call(
            "cross_entropy_stats",
            lambda: raw.cross_entropy_stats.default(x, targets, 0),
            lambda: cross_entropy_stats(x, targets),
            None,
        ),
        call("moe_topk", lambda: top(x, 2, None, False, 1.0, 0.0), lambda t: moe_topk(t, 2), x),
        call(
            "moe_permute",
            lambda: raw.moe_permute.default(x, choices, 0),
            lambda t: moe_permute(t, copies, choices),
            x,
        ),
        call(
            "moe_unpermute",
            lambda: raw.moe_unpermute.default(x, choices, weights),
            lambda t: moe_unpermute(t, copies, choices, weights),
            x,
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
