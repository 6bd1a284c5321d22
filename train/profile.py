"""A trace of a few steps: torch's profiler with our parts of a step as ranges, and a snapshot of CUDA's memory.

Owns: which steps of which ranks are traced, and the files in the run directory's report/. A run is traced once: after
a restart not again where the trace is there. Nothing of it changes a number, and it costs nothing outside those steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ..conf.schema import ProfileConfig
from ..launcher.run.files import fsync_dir, temporary_name
from ..launcher.run.heartbeat import Phase
from .context import RunContext
from .grid import Grid
from .metrics import Clock

_MEMORY_EVENTS = 200_000  # allocations and frees that a memory snapshot remembers


class StepProfile:
    """One trainer's. `before` and `after` every step, `close` at its end."""

    def __init__(self, first: int, last: int, is_mine: bool, memory: bool, grid: Grid, context: RunContext) -> None:
        """Use `of`."""
        self._first, self._last, self._is_mine, self._memory = first, last, is_mine, memory
        self._grid, self._context = grid, context
        self._profiler: torch.profiler.profile | None = None
        self._began = 0  # first step in the trace
        self._step: AbstractContextManager[object] | None = None

    @classmethod
    def of(cls, config: ProfileConfig, grid: Grid, context: RunContext, done: int) -> StepProfile | None:
        """None if no step to come is to be traced, the same on all ranks. `done`: steps completed. Collective.

        Raises PeerLostError.
        """
        if not config.steps or done >= config.steps[1]:
            return None
        first, last = config.steps
        is_mine = grid.rank in config.ranks and not list(context.run.report.glob(_name(grid.rank, "*", last, "*")))
        if not any(grid.control.all_gather_json(is_mine)):
            return None
        is_cuda = grid.device.type == "cuda"
        if is_mine and config.memory and not is_cuda:
            print("profile.memory: there is no snapshot of the memory on the CPU; it is of CUDA's allocator")
        return cls(first, last, is_mine, config.memory and is_cuda, grid, context)

    def before(self, step: int, clock: Clock) -> None:
        """Optimizer step `step` (from 1) begins."""
        if not self._is_mine or not self._first <= step <= self._last:
            return
        if self._profiler is None:
            self._start(step)
        clock.tracer = _ranges(self._grid.device)
        self._step = clock.tracer(f"step {step}")
        self._step.__enter__()

    def after(self, step: int, clock: Clock) -> bool:
        """That step is through, with what was due after it; True if it was the last one. Collective then.

        Raises:
            PeerLostError: another rank is gone.
            SupersededError: a later attempt exists.
        """
        clock.tracer = None
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if step != self._last:
            return False
        # Writing may take longer than many steps: nobody may be taken for hung meanwhile.
        self._context.pulse.enter(Phase.SAVE)
        if self._profiler is not None:
            self._write()
        self._grid.control.barrier()
        return True

    def close(self) -> None:
        """Drop a trace that was begun. Safe twice."""
        if self._profiler is not None:
            with contextlib.suppress(RuntimeError):
                self._profiler.stop()
            self._end()

    def _end(self) -> None:
        self._profiler = None
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self, step: int) -> None:
        self._began = step
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._grid.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)

    def _write(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._context.fence.check()
        a, directory = f"a{self._context.attempt.number:04d}-g{self._context.generation:04d}", self._context.run.report
        trace = directory / _name(self._grid.rank, str(self._began), self._last, a)
        try:
            directory.mkdir(exist_ok=True)
            _publish(trace, self._profiler.export_chrome_trace)
            if self._memory:
                snapshot = trace.name.replace("trace-", "memory-").replace(".json.gz", ".pickle")
                _publish(directory / snapshot, torch.cuda.memory._dump_snapshot)
        except (OSError, RuntimeError) as e:  # the run is worth more than its trace
            self._context.report("profile_failed", error=f"{type(e).__name__}: {e}")
        else:
            self._context.report("profiled", first=self._began, last=self._last, file=trace.name)
        self._end()


def _name(rank: int, first: str, last: int, attempt: str) -> str:
    return f"trace-rank{rank:05d}-steps{first}-{last}-{attempt}.json.gz"


def _publish(path: Path, write: Callable[[str], object]) -> None:
    """Have `write` make a file that appears whole. The name given to it ends as the file's: torch goes by that."""
    tmp = temporary_name(path)
    tmp = tmp.with_name(f"{tmp.name}-{path.name}")
    try:
        write(str(tmp))
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())
        os.rename(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
    fsync_dir(path.parent)


def _ranges(device: torch.device) -> Callable[[str], AbstractContextManager[object]]:
    """How a part of a step is marked: for torch's profiler, on CUDA for NVIDIA's (nsys, by NVTX) too."""
    if device.type != "cuda":
        return torch.profiler.record_function

    @contextlib.contextmanager
    def both(name: str) -> Iterator[None]:
        with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
            yield

    return both
