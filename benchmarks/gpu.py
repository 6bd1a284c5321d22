"""Kernels and trainer on one GPU, in one command of at most six minutes: right, how fast, and how far from the roof.

    mkdir -p .dev && ln -sfn .. .dev/stoker && export PYTHONPATH=$PWD/.dev       # where stoker is not installed
    python benchmarks/gpu.py [--json FILE] [--report FILE.md] [--minutes 6]

Needs torch with CUDA, numpy, nvcc and nothing else: no installation, no network. It builds the kernels, checks every
op against float64 on fresh inputs, in bfloat16 as it is timed and small in float32 and float16; times it beside torch,
torch.compile and, where they are installed, Liger and apex; then it trains a stack of Llama 3 8B's blocks that fits.
What there was no time for is listed. Without a GPU it does the same in small on the CPU, without native kernels, which
shows that the command works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from stoker.kernels.bench.__main__ import Found, Roof, as_json, run, table, to_keep
from stoker.kernels.bench.cases import LARGE, SMALL, cases
from stoker.kernels.bench.contenders import ours
from stoker.kernels.bench.measure import Plan, Result, measure
from stoker.kernels.bench.timing import copy_bandwidth, matmul_rate
from stoker.kernels.device import Device
from stoker.kernels.native import ready

ROOT = Path(__file__).resolve().parents[1]
# Variant -> arguments of gpu_model.py.
MODELS = {
    "kernels=auto": ["--kernels", "auto"],
    "kernels=reference": ["--kernels", "reference"],
    "kernels=auto, compiled": ["--kernels", "auto", "--compile"],
}
LEAST_FOR_A_MODEL = 20.0  # seconds


def main() -> int:
    options = _parser().parse_args()
    began = time.monotonic()
    left = lambda: 60 * options.minutes - (time.monotonic() - began)  # noqa: E731
    torch_device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = Device.of(torch_device)
    outcome: dict[str, Any] = {"date": date.today().isoformat(), "host": platform.platform()}
    outcome["build"] = _build(device)
    outcome["build_seconds"] = time.monotonic() - began
    text = [f"build: {outcome['build']}, {outcome['build_seconds']:.0f} s"]
    _say(text[-1])
    checked = _check(device, torch_device)
    outcome["checked"] = [{**asdict(r), "is_right": _is_right(r)} for r in checked]
    text += [_checked_line(dtype, checked) for dtype in dict.fromkeys(r.dtype for r in checked)]
    roof = Roof(copy_bandwidth(torch_device), matmul_rate(torch_device, torch.bfloat16))
    # Half of what is left is the models'.
    found = _ops(device, torch_device, time.monotonic() + left() / 2, options)
    outcome |= as_json(found, device, roof)
    text += ["", table(found, device, roof, torch.bfloat16), ""]
    outcome["models"] = {}
    for name, arguments in MODELS.items():
        if options.no_compile and "--compile" in arguments:
            continue
        if left() < LEAST_FOR_A_MODEL:
            outcome["left_out"].append(f"model, {name}")
            text.append(f"model, {name}: left out, the time was over")
        else:
            outcome["models"][name] = _model([*arguments, *(["--small"] if options.small else [])], left() - 5)
            text.append(_model_line(name, outcome["models"][name]))
        _say(text[-1])
    outcome["seconds"] = time.monotonic() - began
    text.append(f"{outcome['seconds']:.0f} s in all")
    print("\n".join(text))
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    if options.report:
        options.report.write_text(_report(outcome, text), encoding="utf-8")
    _say(f"fastest by op: {to_keep(found.results, device).results}")
    # Others' functions may fail, or the compiler's: that is in the table.
    failed = [*checked, *(r for r in found.results if r.contender in ("native", "reference", "apex") or r.verdict)]
    failures = [
        f"{r.op}, {r.title}, {r.dtype}: {r.contender}: {r.error or 'wrong'}" for r in failed if not _is_right(r)
    ]
    failures += [f"model, {name}" for name, model in outcome["models"].items() if "error" in model]
    for what in failures:
        _say(f"FAILED: {what}")
    return 1 if failures else 0


def _build(device: Device) -> str:
    """The object's name, or why there is none."""
    if device.capability is None:
        return "no GPU here"
    return ready.build_if_missing(device.capability, say=_say) or ready.lacks(device.capability) or ready.name()


def _check(device: Device, torch_device: torch.device) -> list[Result]:
    """Of the dtypes that are not timed."""
    plans = [Plan(torch_device, dtype, is_timed=False, seed=_fresh_seed()) for dtype in (torch.float32, torch.float16)]
    return [
        measure(case, name, function, plan)
        for plan in plans
        for case in cases(SMALL)
        for name, function in ours(case.op, device).items()
    ]


def _checked_line(dtype: str, checked: list[Result]) -> str:
    mine = [r for r in checked if r.dtype == dtype]
    wrong = [f"{r.op}, {r.title}: {r.contender}: {r.error or 'wrong'}" for r in mine if not _is_right(r)]
    right = f"{len(mine) - len(wrong)} of {len(mine)} right against float64 on small inputs"
    return "\n".join([f"{dtype}: {right}", *(f"  {line}" for line in wrong)])


def _is_right(r: Result) -> bool:
    return not r.error and (r.verdict is None or r.verdict.is_right)


def _fresh_seed() -> int:
    """Of inputs that nobody has seen before."""
    return time.time_ns() % 2**31


def _ops(device: Device, torch_device: torch.device, deadline: float, options: argparse.Namespace) -> Found:
    is_small = options.small or torch_device.type == "cpu"
    plan = Plan(torch_device, torch.bfloat16, options.rounds, seed=_fresh_seed(), say=_say)
    return run(cases(SMALL if is_small else LARGE), device, plan, not options.no_compile, deadline)


def _model(arguments: list[str], seconds: float) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_model.py"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _model_line(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"model, {name}: {found['error']}"
    plan = found["plan"]
    mfu = f"MFU {found['mfu']:.1%} (plan {plan['mfu']:.1%})" if found["mfu"] is not None else "no MFU on a CPU"
    memory = found["memory_gib"]
    held = f"{memory:.1f} GiB (plan {plan['memory_gib']:.1f})" if memory is not None else "memory not measured"
    return (
        f"model, {name}: {found['layers']} layers, {plan['parameters'] / 1e6:.1f} M parameters: "
        f"{found['tokens_per_second']:.0f} tokens/s (plan {plan['tokens_per_second']:.0f}), {mfu}, {held}"
    )


def _report(outcome: dict[str, Any], text: list[str]) -> str:
    lines = "\n".join(text)
    return f"# Kernels and trainer on {outcome['device']['name'] or 'a CPU'}, {outcome['date']}\n\n```\n{lines}\n```\n"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=6.0, help="all has ended by then")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--small", action="store_true", help="small inputs and a small model on a GPU too")
    p.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    p.add_argument("--json", type=Path)
    p.add_argument("--report", type=Path)
    return p


if __name__ == "__main__":
    sys.exit(main())
