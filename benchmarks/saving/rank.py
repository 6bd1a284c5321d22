"""One rank of a group of contenders: does what benchmarks/checkpoint.py orders, and answers with times.

    python rank.py '{"rank": 0, "size": 2, "port": 1234, "total": 2147483648, "products": 40,
                     "fds": [], "module": "stoker_ways",
                     "root": "/scratch", "orders": 3, "answers": 4}'

`module` is a file beside this one; its `contenders(setting, state)` joins the process group and makes them.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from state import Contender, Raw, Training, make_state, nbytes, touch

torch.set_num_threads(1)
BASE_STEPS = 15


@dataclass(frozen=True)
class Setting:
    rank: int
    size: int
    port: int
    total: int  # bytes of all ranks together
    products: int  # of matrices, in a training step
    fds: tuple[int, ...]  # ours only: two state segments and a socket to the writer
    root: Path


def elapsed(work: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


class Rank:
    def __init__(self, setting: Setting, module: str) -> None:
        self.state = make_state(setting.rank, setting.size, setting.total)
        self.contenders: dict[str, Contender] = importlib.import_module(module).contenders(setting, self.state)
        self.raw = Raw(self.state, setting.rank)
        self.training = Training(setting.products)

    def do(self, order: dict[str, Any]) -> dict[str, float]:
        directory = Path(order["directory"])
        if order["do"] in ("copy", "save", "load"):
            self.wake(order["who"])
        if order["who"] == "raw":
            work = {
                "copy": self.raw.copy,
                "save": lambda: self.raw.write(directory),
                "save direct": lambda: self.raw.write(directory, os.O_DIRECT),
                "load": lambda: self.raw.read(directory),
            }
            return {"seconds": elapsed(work[order["do"]])}
        contender = self.contenders[order["who"]]
        if order["do"] == "load":
            return {"seconds": elapsed(lambda: contender.load(directory))}
        if order["do"] == "prepare":
            return {"seconds": elapsed(contender.prepare)}
        if order["do"] == "train":
            return self.save_in_training(contender, directory)
        return self.save_alone(contender, directory)

    def wake(self, who: str) -> None:
        """Write to all memory of a copy or a load. It lay idle for up to a minute, and in a virtual machine whose
        kernel or host takes idle pages back the first to come pays for that, plain copies and reads as much as saves
        and loads. What a save after such a pause costs is measured in training."""
        for tensor in self.state.values():
            touch(tensor)
        if who == "raw":
            self.raw.copy()
        else:
            self.contenders[who].wake()

    def save_alone(self, contender: Contender, directory: Path) -> dict[str, float]:
        dist.barrier()
        began = time.perf_counter()
        contender.begin(directory)
        call = time.perf_counter() - began
        contender.before_update()
        contender.wait()
        dist.barrier()
        return {"call": call, "seconds": time.perf_counter() - began}

    def save_in_training(self, contender: Contender, directory: Path) -> dict[str, float]:
        """Steps before, the call, and steps until all ranks know that the checkpoint is on stable storage."""

        def seconds_of(work: Callable[[], object]) -> float:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        dist.barrier()
        plain = lambda: self.training.step(lambda: [0.0, 0.0], lambda: None)  # noqa: E731
        base = statistics.median(seconds_of(plain) for _ in range(BASE_STEPS))
        waited = 0.0

        def before_update() -> None:
            nonlocal waited
            waited += seconds_of(contender.before_update)

        def step() -> None:
            nonlocal is_over
            is_over = contender.is_over(self.training.step(contender.numbers, before_update))

        dist.barrier()
        began = time.perf_counter()
        call = seconds_of(lambda: contender.begin(directory))
        during, is_over = [], False
        while not is_over:
            during.append(seconds_of(step))
        total = time.perf_counter() - began
        return {
            "call": call,
            "seconds": total,
            "lost": total - base * len(during),
            "waited": waited,
            "base": base,
            "step": statistics.median(during),
            "longest": max(during),
        }


def main() -> None:
    options = json.loads(sys.argv[1])
    orders, answers = os.fdopen(options.pop("orders")), os.fdopen(options.pop("answers"), "w")
    module, root = options.pop("module"), Path(options.pop("root"))
    rank = Rank(Setting(**options, root=root), module)
    print(json.dumps({"bytes": nbytes(rank.state), "tensors": len(rank.state)}), file=answers, flush=True)
    for line in orders:
        print(json.dumps(rank.do(json.loads(line))), file=answers, flush=True)
    for contender in rank.contenders.values():
        contender.close()


if __name__ == "__main__":
    main()
