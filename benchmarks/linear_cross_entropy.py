"""Last projection and loss on a CPU: the reference op beside all logits at once. Time in turn, memory in processes.

    python benchmarks/linear_cross_entropy.py [--minutes 3.5] [--report benchmarks/linear_cross_entropy-<date>.md]

A step is forward and backward of the mean loss. Extra memory is the largest resident set of a process's first step less
what inputs and their gradients take. Forms: `plain` is F.cross_entropy(x @ weight.T), with float32 logits
F.cross_entropy((x @ weight.T).float()); `promised` is the op with token_grad, as the trainer calls it: three matrix
products as plain has; `computed again` is the op without, which has four.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from measuring import machine, measure, median_ms, ratio
from stoker.kernels.reference import linear_cross_entropy
from torch import Tensor

PLAIN, WIDE = "plain", "plain, float32 logits"
FORMS = {
    "float32": (PLAIN, "computed again", "promised"),
    "bfloat16": (PLAIN, WIDE, "computed again", "promised"),
}
Step = Callable[[], float]


def build(form: str, dtype: torch.dtype, tokens: int, hidden: int, classes: int) -> tuple[Step, int]:
    """A step, and the bytes of the gradients that it leaves."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(classes, hidden).mul_(hidden**-0.5)).to(dtype).requires_grad_()
    targets = torch.randint(0, classes, (tokens,))
    losses: Callable[[], Tensor] = {
        PLAIN: lambda: F.cross_entropy(x @ weight.t(), targets),
        WIDE: lambda: F.cross_entropy((x @ weight.t()).float(), targets),
        "computed again": lambda: linear_cross_entropy(x, weight, targets).mean(),
        "promised": lambda: linear_cross_entropy(x, weight, targets, token_grad=1 / tokens).mean(),
    }[form]

    def step() -> float:
        x.grad = weight.grad = None
        loss = losses()
        loss.backward()
        return float(loss.detach())

    return step, (x.numel() + weight.numel()) * dtype.itemsize


def extra_memory(step: Step, gradients: int) -> int:
    """Bytes at the step's largest, less what was there before and what stays."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before - gradients


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def in_a_process(arguments: argparse.Namespace, dtype: str, form: str) -> int:
    command = [sys.executable, __file__, f"--tokens={arguments.tokens}", f"--hidden={arguments.hidden}"]
    command += [f"--classes={arguments.classes}", f"--memory={dtype}:{form}"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def table(arguments: argparse.Namespace, dtype: str, minutes: float) -> list[str]:
    """Memory first, then time: one row per form."""
    started, forms = time.monotonic(), FORMS[dtype]
    memory = {form: in_a_process(arguments, dtype, form) for form in forms}
    shape = (arguments.tokens, arguments.hidden, arguments.classes)
    steps = {form: build(form, getattr(torch, dtype), *shape)[0] for form in forms}
    left = minutes - (time.monotonic() - started) / 60
    times = measure(steps, arguments.rounds, 1, left)
    rows = []
    for form in forms:
        losses = {f"{loss:.4f}" for loss in times[form].losses}
        cells = [dtype, form, f"{memory[form] / 2**20:,.0f}", f"1/{memory[PLAIN] / memory[form]:.1f}"]
        cells += [median_ms(times[form].cpu), ratio(times[PLAIN].cpu, times[form].cpu), " ".join(losses)]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--classes", type=int, default=128_256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=3.5, help="fewer rounds, three at least, when they are over")
    parser.add_argument("--dtypes", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--memory", metavar="DTYPE:FORM", help="print the extra bytes of one form, and nothing else")
    parser.add_argument("--report", type=Path, help="write the result there as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        dtype, form = arguments.memory.split(":")
        print(extra_memory(*build(form, getattr(torch, dtype), arguments.tokens, arguments.hidden, arguments.classes)))
        return
    share = arguments.minutes / len(arguments.dtypes)
    rows = [row for dtype in arguments.dtypes for row in table(arguments, dtype, share)]
    text = TEXT.format(**vars(arguments), rows="\n".join(rows), machine=machine())
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


TEXT = """# Last projection and loss on a CPU

`python benchmarks/linear_cross_entropy.py`: {tokens} tokens, hidden {hidden}, {classes} classes. A step is forward
and backward; what the forms are stands in the script. Extra memory is beyond inputs and their gradients. Times are CPU
time, one step of each form in every round; the ratio is the median over rounds, with its quartiles.

| dtype | form | extra MiB | of plain | ms | time over plain | loss |
|---|---|---|---|---|---|---|
{rows}

{machine}.
"""


if __name__ == "__main__":
    main()
