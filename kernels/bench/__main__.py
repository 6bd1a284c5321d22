"""`stoker bench kernels`: measure the ops on this machine's device, print a table, keep what `auto` chooses by.

Owns: the arguments, the order, the table and the JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import measured
from ..arguments import at_least_one, minutes, output_file
from ..device import Device
from ..dispatch import nearest
from ..native import ready
from ..native.cache import user_cache
from ..ops import OP_NAMES
from .case import Case, Function
from .cases import LARGE, SMALL, cases
from .contenders import OTHERS, compiled, others, ours
from .measure import Plan, Result, measure
from .timing import copy_bandwidth, matmul_rate

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Roof:
    """What the device does at best. bandwidth: bytes read and written per second. rate: flops per second."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Found:
    """results: in the order of the cases. left_out: case and contender, for which there was no time."""

    results: Sequence[Result]
    left_out: Sequence[str] = ()


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    began = time.monotonic()
    torch_device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = Device.of(torch_device)
    if device.capability is not None:
        problem = ready.build_if_missing(device.capability, say=_say)
        if problem is not None:
            print(f"stoker bench kernels: {problem}", file=sys.stderr)
    dtype = DTYPES[options.dtype]
    plan = Plan(torch_device, dtype, options.rounds, is_checked=not options.no_check, seed=options.seed, say=_say)
    roof = Roof(copy_bandwidth(torch_device), matmul_rate(torch_device, dtype))
    sizes = SMALL if torch_device.type == "cpu" or options.small else LARGE
    chosen = [case for case in cases(sizes) if not options.ops or case.op in options.ops]
    found = run(chosen, device, plan, not options.no_compile, began + 60 * options.minutes)
    results = found.results
    print(table(found, device, roof, dtype))
    if options.json:
        options.json.write_text(json.dumps(as_json(found, device, roof), indent=1) + "\n", encoding="utf-8")
    is_kept = device.capability is None or options.small or _keep(to_keep(results, device), dtype)
    wrong = [r for r in results if r.verdict is not None and not r.verdict.is_right]
    for r in wrong:
        print(f"stoker bench kernels: error: {_wrong(r)}", file=sys.stderr)
    return 0 if is_kept and not wrong else 1


def _keep(found: measured.Measured, dtype: torch.dtype) -> bool:
    """For `auto`; what was measured is printed all the same."""
    if dtype != torch.bfloat16:
        print("not kept for kernels=auto, which goes by the times of bfloat16")
        return True
    try:
        print(f"kept for kernels=auto: {measured.write(found)}")
    except OSError as e:
        print(
            f"stoker bench kernels: error: not kept for kernels=auto: {e.filename or user_cache()}: {e.strerror}; "
            "XDG_CACHE_HOME=DIRECTORY names another place",
            file=sys.stderr,
        )
        return False
    return True


def run(
    chosen: Sequence[Case], device: Device, plan: Plan, with_compiler: bool = True, deadline: float = float("inf")
) -> Found:
    """deadline: on time.monotonic's clock; nothing begins after it. The compiler's turn comes when all else has been
    measured, as it takes most of the time."""
    results: list[list[Result]] = [[] for _ in chosen]
    left_out = []
    turns: list[Callable[[str], dict[str, Function]]] = [lambda op: {**ours(op, device), **others(op)}]
    for turn in [*turns, compiled] if with_compiler else turns:
        for case, own in zip(chosen, results, strict=True):
            for name, function in turn(case.op).items():
                if time.monotonic() > deadline:
                    left_out.append(f"{case.op}, {case.title}: {name}")
                    plan.say(f"{left_out[-1]}: left out, the time is over")
                    continue
                own.append(measure(case, name, function, plan))
                plan.say(_line(own[-1]))
    return Found([result for own in results for result in own], left_out)


def to_keep(results: Sequence[Result], device: Device) -> measured.Measured:
    """Microseconds of both directions, summed over an op's cases, of implementations right and measured in all."""
    times: dict[str, dict[str, float]] = {}
    for op in dict.fromkeys(r.op for r in results):
        of_op = [r for r in results if r.op == op and r.contender not in OTHERS]
        failed = {r.contender for r in of_op if r.error or (r.verdict is not None and not r.verdict.is_right)}
        for name in dict.fromkeys(r.contender for r in of_op if r.contender not in failed):
            mine = [r.microseconds for r in of_op if r.contender == name]
            if len(mine) == len({r.title for r in of_op}):
                times.setdefault(op, {})[name] = round(sum(mine), 2)
    return measured.Measured(device.name, torch.__version__, ready.name(device.capability), times)


def table(found: Found, device: Device, roof: Roof, dtype: torch.dtype) -> str:
    """Rows by case; of the roof: bytes that must move over time, over the copy's bandwidth, or flops over matmul's."""
    lines = [
        f"{device}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}",
        f"copy {roof.bandwidth / 1e9:.0f} GB/s (read + written), matmul {roof.rate / 1e12:.1f} TFLOP/s",
        "",
        f"{'op':<22}{'sizes':<48}{'':<13}{'forward us':>11}{'of roof':>9}"
        + f"{'backward us':>13}{'of roof':>9}{'error':>10}",
    ]
    last = ""
    for r in found.results:
        head = f"{r.op:<22}{r.title:<48}"
        shown, last = (" " * len(head) if head == last else head), head
        if r.error:
            lines.append(f"{shown}{r.contender:<13}{r.error}")
            continue
        cells = [f"{r.contender:<13}"]
        for times, share in ((r.forward, forward_share(r, roof)), (r.backward, backward_share(r, roof))):
            wide = 11 if times is r.forward else 13
            cells.append(f"{1e6 * times[0]:>{wide}.1f}{share:>9.0%}" if times else " " * (wide + 9))
        lines.append(f"{shown}{''.join(cells)}{_error(r):>10}".rstrip())
    lines += [f"left out, the time was over: {what}" for what in found.left_out]
    return "\n".join(lines)


def forward_share(r: Result, roof: Roof) -> float:
    """Of the roof."""
    if r.forward is None:
        return 0.0
    return _least(r.flops, r.forward_bytes, roof) / r.forward[0]


def backward_share(r: Result, roof: Roof) -> float:
    """Of the roof; 0 of ops that form their gradients on the way forward, and have their part in there."""
    if r.backward is None or (r.flops and not r.backward_flops):
        return 0.0
    return _least(r.backward_flops, r.backward_bytes, roof) / r.backward[0]


def _least(flops: int, moved: int, roof: Roof) -> float:
    """Seconds."""
    return flops / roof.rate if flops else moved / roof.bandwidth


def as_json(found: Found, device: Device, roof: Roof) -> dict[str, Any]:
    """Plain values, seconds and bytes."""
    rows = [
        {**asdict(r), "forward_of_roof": forward_share(r, roof), "backward_of_roof": backward_share(r, roof)}
        for r in found.results
    ]
    return {
        "device": asdict(device),
        "torch": torch.__version__,
        "roof": asdict(roof),
        "results": rows,
        "left_out": list(found.left_out),
    }


def _line(r: Result) -> str:
    took = r.error or f"{r.microseconds:.1f} us{' WRONG: ' + _error(r) if r.verdict and not r.verdict.is_right else ''}"
    return f"{r.op}, {r.title}: {r.contender}: {took}"


def _wrong(r: Result) -> str:
    assert r.verdict is not None
    errors = ", ".join(f"{e:.1e}" for e in r.verdict.errors)
    return f"{r.op}, {r.title}, {r.dtype}: {r.contender} is off by {errors} of the largest value; {r.verdict.bound:.1e}"


def _error(r: Result) -> str:
    return f"{max(r.verdict.errors):.1e}" if r.verdict else ""


def _op(text: str) -> str:
    if text not in OP_NAMES:
        raise argparse.ArgumentTypeError(f"{text}: no such op{nearest(text, OP_NAMES)}")
    return text


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("stoker bench kernels", description="Time the ops on this machine: docs/kernels.md.")
    p.add_argument("ops", nargs="*", metavar="OP", type=_op, help="default: all")
    p.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    p.add_argument("--rounds", type=at_least_one, default=10)
    p.add_argument("--seed", type=int, default=0, help="of the inputs")
    p.add_argument("--minutes", type=minutes, default=10.0, help="begin no case after so many")
    p.add_argument("--small", action="store_true", help="small inputs, as on a CPU; results are not kept")
    p.add_argument("--no-check", action="store_true", help="do not compare with float64 first")
    p.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    p.add_argument("--json", type=output_file, metavar="FILE")
    return p


if __name__ == "__main__":
    sys.exit(main())
