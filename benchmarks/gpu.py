"""Kernels and trainer on one GPU, in one command of at most six minutes: right, how fast, and how far from the roof.

    mkdir -p .dev && ln -sfn .. .dev/stoker && export PYTHONPATH=$PWD/.dev       # where stoker is not installed
    python benchmarks/gpu.py [--json FILE] [--report FILE.md] [--minutes 6]

Needs torch with CUDA, numpy, nvcc and nothing else: no installation, no network. It builds the kernels, checks every
op against float64 on fresh inputs, times it beside torch, torch.compile and, where they are installed, Liger and apex;
then it trains a stack of Llama 3 8B's blocks that fits. Without a GPU it does the same in small on the CPU, without
native kernels, which shows that the command works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from stoker.kernels.bench.__main__ import DTYPES, Roof, as_json, run, table, to_keep
from stoker.kernels.bench.cases import LARGE, SMALL, cases
from stoker.kernels.bench.measure import Plan, Result
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


def main() -> int:
    options = _parser().parse_args()
    began = time.monotonic()
    left = lambda: 60 * options.minutes - (time.monotonic() - began)  # noqa: E731
    torch_device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = Device.of(torch_device)
    outcome: dict[str, Any] = {"date": date.today().isoformat(), "host": platform.platform()}
    outcome["build"] = _build(device)
    _say(f"build: {outcome['build']}, {time.monotonic() - began:.0f} s")
    roof = Roof(copy_bandwidth(torch_device), matmul_rate(torch_device, torch.bfloat16))
    # The models get what is left of the time after the ops: about half.
    results = _ops(device, torch_device, began + 30 * options.minutes, options)
    outcome |= as_json(results, device, roof)
    text = [table(results, device, roof, torch.bfloat16), ""]
    outcome["models"] = {}
    for name, arguments in MODELS.items():
        if left() < 20:
            _say(f"model, {name}: left out, the time is over")
            continue
        outcome["models"][name] = found = _model(arguments, left() - 5)
        text.append(_model_line(name, found))
        _say(text[-1])
    outcome["seconds"] = time.monotonic() - began
    text.append(f"{outcome['seconds']:.0f} s in all")
    print("\n".join(text))
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    if options.report:
        options.report.write_text(_report(outcome, text), encoding="utf-8")
    _say(f"fastest by op: {to_keep(results, device).results}")
    wrong = [r for r in results if r.verdict is not None and not r.verdict.is_right]
    broken = [name for name, found in outcome["models"].items() if "error" in found]
    failed = [r for r in results if r.error and r.contender in ("native", "reference")]
    for what in (*(f"{r.op}, {r.title}: {r.contender}: {r.error or 'wrong'}" for r in wrong + failed), *broken):
        _say(f"FAILED: {what}")
    return 1 if wrong or broken or failed else 0


def _build(device: Device) -> str:
    """The object's name, or why there is none."""
    if device.capability is None:
        return "no GPU here"
    return ready.build_if_missing(device.capability, say=_say) or ready.lacks(device.capability) or ready.name()


def _ops(device: Device, torch_device: torch.device, deadline: float, options: argparse.Namespace) -> list[Result]:
    is_small = options.small or torch_device.type == "cpu"
    # Inputs that nobody has seen before.
    plan = Plan(torch_device, DTYPES["bf16"], options.rounds, seed=time.time_ns() % 2**31, say=_say)
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
        f"model, {name}: {found['layers']} layers, {plan['parameters'] / 1e9:.2f} B parameters: "
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
    p.add_argument("--small", action="store_true", help="small inputs on a GPU too")
    p.add_argument("--no-compile", action="store_true", help="leave torch.compile out of the ops")
    p.add_argument("--json", type=Path)
    p.add_argument("--report", type=Path)
    return p


if __name__ == "__main__":
    sys.exit(main())
