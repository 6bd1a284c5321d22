"""Runs a function on several ranks, each a process forked from one that has torch imported and used nothing of it.

As a program it is that process: a JSON request per line on standard input, a JSON answer per line on standard output.
`Crew` is the tests' side.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.run import failpoints
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.layout import RunDir
from stoker.train.box import Replica
from stoker.train.context import RunContext
from stoker.train.grid import Grid, Membership, form, single
from stoker.train.pulse import Pulse
from stoker.train.state.checkpointer import Checkpointer
from stoker.train.state.entry import Entry
from stoker.train.state.packing import Shard, Staging, copies, pack
from stoker.train.state.segment import Memory

PATIENCE = 60.0  # seconds until a rank that does not end is a failure
JOBS: list[Job] = []  # made in this process


def make_entries(seed: int) -> list[Entry]:
    """Small, but of every kind: several blocks, several rows and types, odd sizes, views, scalars, nothing at all."""
    g = torch.Generator().manual_seed(seed)
    fused = torch.randn(300, 1000, generator=g)
    tensors = {
        "model/embedding": torch.randn(1500, 1000, generator=g),  # 6 MB: two blocks
        "model/wq": fused[:100],
        "model/wkv": fused[100:],
        "model/column": torch.randn(400, 7, generator=g)[:, 3],
        "model/transposed": torch.randn(33, 70, generator=g).T,
        "model/half": torch.randn(777, 901, generator=g).bfloat16(),
        "model/norm": torch.randn(129, generator=g),
        "optim/long": torch.randn(700_001, generator=g),
        "optim/step": torch.tensor(float(seed)),
        "optim/count": torch.tensor([2**40 + seed]),
        "optim/mask": torch.tensor([True, False, True]),
        "optim/none": torch.empty(0, 5),
        "optim/none_inside": torch.empty(5, 0),
        "optim/double": torch.randn(3, 2, generator=g).double(),
    }
    return [Entry.whole(name, tensor) for name, tensor in tensors.items()]


def shared(entries: list[Entry], rank: int, size: int) -> list[Entry]:
    """As rank `rank` of `size` that hold the same."""
    return [replace(e, replica=Replica(("data",), rank, size)) for e in entries]


def packed(entries: list[Entry], rank: int = 0) -> tuple[Shard, Memory]:
    """The shard that `rank` writes of these entries, and memory that holds it, with the index lines behind it."""
    shard, memory = Shard.of(entries, rank), Memory()
    staging = Staging.whole(shard)
    memory.reserve(staging.capacity)
    (wave,) = staging.waves(0)
    pack(shard, wave, memory, copies(shard, wave, memory))
    return shard, memory


def digests(entries: list[Entry]) -> dict[str, str]:
    return {e.name: _digest(e.tensor) for e in entries}


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def blank(entries: list[Entry]) -> list[Entry]:
    """The same entries in place, emptied."""
    for e in entries:
        e.tensor.zero_()
    return entries


@dataclass
class Job:
    """What a rank is given."""

    context: RunContext
    grid: Grid
    events: list[dict[str, Any]] = field(default_factory=list)
    made: list[Checkpointer] = field(default_factory=list)

    def checkpointer(self, keep: int = 3, **settings: Any) -> Checkpointer:
        self.made.append(Checkpointer(self.context, self.grid, CheckpointConfig(keep=keep, **settings)))
        return self.made[-1]

    def close(self) -> None:
        """As a trainer does: what was abandoned is taken away then."""
        for checkpointer in self.made:
            checkpointer.close()

    def entries(self, seed: int) -> list[Entry]:
        """make_entries, held by all ranks of the job."""
        return shared(make_entries(seed), self.grid.rank, self.grid.world_size)


def make_job(run: RunDir, attempt: int, generation: int = 1, run_id: str = "run-1", grid: Grid | None = None) -> Job:
    events: list[dict[str, Any]] = []

    def report(event: str, **fields: Any) -> None:
        events.append({"event": event, **fields})

    fence = Fence(run, attempt)
    context = RunContext(run, run_id, run.attempt(attempt), generation, fence, Pulse(None, generation), report=report)
    JOBS.append(Job(context, grid or single(), events))
    return JOBS[-1]


def close_jobs() -> None:
    """Those of this process: their memory is behind descriptors, of which a process has a thousand."""
    while JOBS:
        JOBS.pop().close()


@dataclass
class Result:
    value: Any
    raised: str | None  # name of the exception's type
    text: str
    events: list[dict[str, Any]]


@dataclass
class Rank:
    crew: Crew
    pid: int
    directory: Path
    store: dist.TCPStore  # where it meets the others; lives as long as the last of them is known

    def wait_frozen(self) -> None:
        until(lambda: is_frozen(self.pid))

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def code(self) -> int:
        """Its exit status (negative: signal), once it has ended."""
        until(lambda: self.crew.ask(wait=self.pid) is not None, lambda: (self.directory / "log").read_text())
        return self.crew.ask(wait=self.pid)

    def result(self) -> Result:
        code = self.code()
        assert code == 0, f"exit {code}\n{(self.directory / 'log').read_text()}"
        return Result(**json.loads((self.directory / "result.json").read_text()))


def is_frozen(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until(condition: Callable[[], bool], more: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, more()
        time.sleep(0.01)


class Crew:
    """Starts ranks."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._count = scratch, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)  # closes its input: that is its end

    def start(
        self,
        body: Callable[..., Any],
        run: RunDir,
        size: int,
        attempt: int = 1,
        generation: int = 1,
        fail: str = "",
        file_limit: int | None = None,
        limited_rank: int = 0,
        **arguments: Any,
    ) -> list[Rank]:
        """`body(job, **arguments)` on `size` ranks. `fail`: failpoints. `file_limit`: bytes, for one rank's files."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        ranks = []
        for rank in range(size):
            self._count += 1
            directory = self._scratch / f"rank-{self._count}"
            directory.mkdir()
            pid = self.ask(
                file=body.__code__.co_filename,
                function=body.__name__,
                run=str(run.path),
                rank=rank,
                size=size,
                attempt=attempt,
                generation=generation,
                port=store.port,
                directory=str(directory),
                fail=fail,
                file_limit=file_limit if rank == limited_rank else None,
                arguments=arguments,
            )
            ranks.append(Rank(self, pid, directory, store))
        return ranks

    def run(self, body: Callable[..., Any], run: RunDir, size: int, **rest: Any) -> list[Result]:
        return [r.result() for r in self.start(body, run, size, **rest)]


def _child(request: dict[str, Any]) -> None:
    directory = Path(request["directory"])
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(log, fd)
    if request["file_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], resource.RLIM_INFINITY))
    failpoints._POINTS[:] = failpoints._parse(request["fail"])
    spec = importlib.util.spec_from_file_location("body", request["file"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = Membership(
        request["rank"], request["size"], 0, request["attempt"], request["generation"], "127.0.0.1", request["port"]
    )
    grid = form(place, backend="gloo", timeout=PATIENCE)
    job = make_job(RunDir(Path(request["run"])), request["attempt"], request["generation"], grid=grid)
    result = Result(None, None, "", job.events)
    try:
        result.value = getattr(module, request["function"])(job, **request["arguments"])
    except Exception as e:
        traceback.print_exc()
        result.raised, result.text = type(e).__name__, str(e)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    job.close()
    (directory / "result.json").write_text(json.dumps(vars(result)))
    grid.close()


def main() -> None:
    import pytest  # noqa: F401 (the tests' modules import it: here once, not in every rank)

    children: dict[int, int | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid = request["wait"]
            if children[pid] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                children[pid] = os.waitstatus_to_exitcode(status) if done else None
            answer = children[pid]
        else:
            answer = os.fork()
            if answer == 0:
                code = 1
                try:
                    _child(request)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children[answer] = None
        print(json.dumps(answer), flush=True)
    for pid, code in children.items():
        if code is None:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
