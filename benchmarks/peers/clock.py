"""The step clock that every peer runs under, and the shape that all of them train. Needs nothing but torch.

A step is what lies between two calls of an optimizer's `step`, seen by torch's global hook: data, forward and backward
pass, clipping, update, logging. Between steps the process waits for its turn (peers.py), so that the steps of all
peers are taken one after the other on the same machine in the same minute.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 8, 256, 8, 4, 768, 8192
BATCH, LENGTH, LR = 8, 256, 3e-4
PARAMETERS = 10_490_112
STEPS = 1_000_000  # more than any measurement takes

torch.set_num_threads(1)


class Clock:
    """Speaks with peers.py over two pipes; a line each way per step. Ends the process when told to."""

    def __init__(self) -> None:
        orders, answers = (int(fd) for fd in os.environ.get("STEP_CLOCK", "-1,-1").split(","))
        self._orders = os.fdopen(orders, "r") if orders >= 0 else None
        self._answers = os.fdopen(answers, "w") if answers >= 0 else None
        self._began: tuple[float, float] | None = None
        self._alone = 0

    def tick(self, parameters: int) -> None:
        """A step is done."""
        wall, cpu = time.perf_counter(), time.process_time()
        began = self._began or (wall, cpu)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line = {"wall": wall - began[0], "cpu": cpu - began[1], "rss": rss, "parameters": parameters}
        if self._answers is None or self._orders is None:
            self._without_peers(line)
        else:
            print(json.dumps(line), file=self._answers, flush=True)
            if self._orders.readline().strip() != "step":
                os._exit(0)  # the peer is in the middle of its own loop; nothing of it is to be kept
        self._began = time.perf_counter(), time.process_time()

    def _without_peers(self, line: dict[str, Any]) -> None:
        """For a try by hand: six steps, printed."""
        print(line, flush=True)
        self._alone += 1
        if self._alone == 6:
            os._exit(0)

    def watch(self) -> None:
        """Tick after every step of an optimizer of torch's own; wrappers around one would tick a second time."""

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if type(optimizer).__module__.startswith("torch.optim"):
                self.tick(numel(p for group in optimizer.param_groups for p in group["params"]))

        register_optimizer_step_post_hook(after)


def numel(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def tokens(seed: int = 0) -> torch.Tensor:
    """Endless enough: 512 samples of LENGTH + 1 tokens, int64."""
    return torch.randint(0, VOCAB, (512, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def rendezvous() -> None:
    """What torchrun would set for one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
