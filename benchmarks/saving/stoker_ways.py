"""Ours, as a run has it: state segments that outlive the ranks, and one writer process for all ranks of the node.

The driver stands for the agent: it makes the segments and starts the writer (`Node`), a rank finds its descriptors in
its setting. No training loop here: that is benchmarks/saving/trainer.py.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from state import Contender, touch
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.wire import Channel
from stoker.train.box import Box
from stoker.train.context import RunContext
from stoker.train.grid import Grid, Membership, form
from stoker.train.pulse import Pulse
from stoker.train.state.checkpointer import Checkpointer
from stoker.train.state.entry import Entry
from stoker.train.state.persist_local import LocalPersister
from stoker.train.state.persist_remote import RemotePersister
from stoker.train.state.segment import Memory

WAVES_MB = 256  # of both halves together, in the variant that copies wave by wave


def contenders(setting: Any, state: dict[str, torch.Tensor]) -> dict[str, Contender]:
    grid = form(Membership(setting.rank, setting.size, setting.rank, 1, 1, "127.0.0.1", setting.port), backend="gloo")
    if setting.size == 1:  # the others have a group then too
        store = dist.PrefixStore("stoker", dist.TCPStore("127.0.0.1", setting.port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    run = RunDir(setting.root / "stoker")
    first, second, channel = setting.fds
    memories = Memory(first), Memory(second)

    def local() -> LocalPersister:
        raise AssertionError("the writer process was lost")

    persister = RemotePersister(Channel(socket.socket(fileno=channel)), local, print)
    entries = entries_of(state, setting.rank, setting.size)

    def stoker(generation: int, staging_mb: int) -> Stoker:
        context = RunContext(
            run,
            "benchmark",
            run.attempt(1),
            generation,
            Fence(run, 1),
            Pulse(None, generation),
            memories=memories,
            persister=persister,
        )
        settings = CheckpointConfig(keep=1000, staging_mb=staging_mb)
        return Stoker(Checkpointer(context, grid, settings), grid, entries, memories)

    # Only one of them is at work at a time; so they may share segments and writer.
    return {"stoker": stoker(1, 0), "stoker, waves": stoker(2, WAVES_MB)}


def entries_of(state: dict[str, torch.Tensor], rank: int, size: int) -> list[Entry]:
    """Rows of logical tensors, as ZeRO-1 or FSDP leaves them."""
    return [
        Entry(name, t, (t.shape[0] * size, *t.shape[1:]), Box((t.shape[0] * rank, 0), tuple(t.shape)))
        for name, t in state.items()
    ]


class Stoker:
    steps = 0  # each save has one of its own, whichever variant makes it

    def __init__(
        self, checkpointer: Checkpointer, grid: Grid, entries: list[Entry], memories: tuple[Memory, Memory]
    ) -> None:
        self._checkpointer, self._grid, self._entries, self._memories = checkpointer, grid, entries, memories
        self._counts: list[int] = []

    def prepare(self) -> None:
        """What the trainer does after its first step, and the end of it."""
        self._checkpointer.prepare(self._entries)
        while any(m.held < m.capacity for m in self._memories):
            time.sleep(0.1)

    def wake(self) -> None:
        for memory in self._memories:
            touch(memory.tensor)

    def begin(self, directory: Path) -> None:
        Stoker.steps += 1
        self._checkpointer.begin(Stoker.steps, self._entries, {})

    def before_update(self) -> None:
        self._checkpointer.settle()

    def numbers(self) -> list[float]:
        return [float(n) for n in self._checkpointer.counts()]

    def is_over(self, sums: list[float]) -> bool:
        done, failed = (round(n) for n in sums)
        ended = self._checkpointer.advance(done, failed)
        assert ended is None or ended.problem is None, ended
        return ended is not None

    def wait(self) -> None:
        ended = self._checkpointer.finish()
        assert ended is not None
        assert ended.problem is None, ended.problem

    def load(self, directory: Path) -> None:
        assert self._checkpointer.restore(self._entries) is not None

    def close(self) -> None:
        self._checkpointer.close()
