"""A worker process: form the grid, build the trainer, run it; and again, in the same process, if it is told to.

Owns: the outer loop, how failures are named to the agent, and what a worker says on its log. Does not own: training
(loop.py) or deciding what follows a failure (the supervisor).
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import select
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

from ..conf.layout import Layout
from ..conf.load import from_plain
from ..conf.schema import Config
from ..launcher.run.attempts import Fence
from ..launcher.run.files import read_json
from ..launcher.run.heartbeat import Phase, Segment
from ..launcher.run.layout import RunDir
from ..launcher.run.stacks import offer
from ..launcher.run.wire import Channel, Closed
from . import grid as grids
from .comm import PeerLostError
from .context import RunContext
from .errors import BadInputError
from .failure import failure_of
from .grid import Membership
from .pulse import Pulse
from .state.persist import Persister
from .state.persist_local import LocalPersister
from .state.persist_remote import RemotePersister
from .state.segment import Memory
from .storage.choice import shelf_of


def preload() -> None:
    """Import what every worker needs, before the first fork. No torch operation may run here."""
    importlib.import_module(".loop", __package__)


@dataclass(frozen=True)
class Place:
    """What stays the same over the passes of one worker."""

    run: RunDir
    config: Config
    local_rank: int
    attempt: int
    memories: tuple[Memory, Memory] | None = None
    persister: Persister | None = None


class _Prefixed:
    """A text stream whose lines begin with the rank, so that one file per node is enough."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._rest = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            # One write per batch of lines: the file is opened for appending, so ranks do not cut into each other.
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        if self._rest:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(spec: dict[str, Any], channel: Channel, segment_fd: int, *state: int) -> int:
    """Entry of a forked worker; returns its exit code. `spec`: `spec` of `fork` in docs/architecture.md, "Messages".

    `state`: nothing, or the two state segments and the socket to the node's writer.
    """
    assert sys.__stdout__ is not None and sys.__stderr__ is not None  # noqa: PT018
    faulthandler.enable(file=sys.__stderr__)
    run = RunDir(Path(spec["run"]))
    rank = int(spec["rank"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(spec["local_rank"]), WORLD_SIZE=str(spec["world_size"]))
    sys.stdout = cast(TextIO, _Prefixed(sys.__stdout__, f"[{rank}] "))
    sys.stderr = cast(TextIO, _Prefixed(sys.__stderr__, f"[{rank}] "))
    segment = Segment(segment_fd)
    report = Reporter(channel, int(spec["generation"]))
    bind(spec.get("cpus"))
    try:
        config = from_plain(spec["config"])
        for name in config.plugins:
            _import_plugin(name)
        place = Place(run, config, int(spec["local_rank"]), int(spec["attempt"]))
        if state:
            place = _with_writer(place, state, report)
        return _passes(place, _membership(place, spec), segment, channel, report)
    except BaseException as e:
        failure = failure_of(e)
        if failure.traceback is not None:
            traceback.print_exc()
        # Without a traceback it is the agent that writes it into the node's log: other ranks will say the same.
        report("failed", cause=failure.cause.value, error=failure.error, traceback=failure.traceback)
        return 1


def _import_plugin(name: str) -> None:
    """Raises BadInputError: there is no such module. What goes wrong inside of it is raised as it is."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{name}.".startswith(f"{e.name}."):
            raise
        raise BadInputError(
            f"plugins: {name}: no module {e.name!r} here; expected in the directory from which the run was launched "
            f"(what git ignores stays behind) or installed in {sys.prefix}"
        ) from None


def bind(cpus: list[int] | None) -> None:
    """Run on these CPUs only; None: where the agent may. Called before the first thread and large allocation, so that
    threads stay there and memory comes from there (first touch)."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as e:  # taken away since the agent looked
            print(f"not bound to CPUs {cpus}: {e}", file=sys.stderr)


class Reporter:
    """Sends events to the agent; each is written into the attempt's events and told to the supervisor."""

    def __init__(self, channel: Channel, generation: int) -> None:
        self._channel, self.generation = channel, generation

    def __call__(self, event: str, **fields: Any) -> None:
        try:
            self._channel.send({"kind": "report", "event": event, "generation": self.generation, "fields": fields})
        except Closed:
            # Without an agent nobody would stop or restart this process, and PDEATHSIG is on its way.
            os._exit(1)


def _with_writer(place: Place, state: Sequence[int], report: Reporter) -> Place:
    """With memory and a writer that outlive this process."""
    *fds, to_writer = state
    memories = Memory(fds[0]), Memory(fds[1])
    shelf = shelf_of(place.run, place.config.checkpoint)
    persister = RemotePersister(
        Channel(socket.socket(fileno=to_writer)),
        lambda: LocalPersister(place.run, shelf, fds),
        lambda why: report("writer_lost", reason=why),
    )
    return replace(place, memories=memories, persister=persister)


def _membership(place: Place, message: dict[str, Any]) -> Membership:
    # A later pass may give this process another place: its rank and the number of ranks come with the message.
    return Membership(
        int(message["rank"]),
        int(message["world_size"]),
        place.local_rank,
        place.attempt,
        int(message["generation"]),
        str(message["store_host"]),
        int(message["store_port"]),
    )


def _passes(place: Place, member: Membership, segment: Segment, channel: Channel, report: Reporter) -> int:
    from .loop import Trainer

    while True:
        offer(place.run, place.attempt, f"g{member.generation}-r{member.rank}")
        pulse = Pulse(segment, member.generation, member.rank, place.attempt)
        report.generation = member.generation
        grid = trainer = None
        try:
            config = place.config
            layout = Layout.of(config, member.world_size)
            parallel = config.parallel
            grid = grids.form(member, layout, parallel.backend.value, parallel.timeout, pulse.collective)
            context = RunContext(
                place.run,
                str(read_json(place.run.run)["id"]),
                place.run.attempt(place.attempt),
                member.generation,
                Fence(place.run, place.attempt),
                pulse,
                report,
                place.memories,
                place.persister,
            )
            trainer = Trainer.build(config, grid, context)
            ended = trainer.run()
            pulse.enter(Phase.DONE)
            report("ended", finished=ended.finished, step=ended.step, saved_step=ended.saved_step)
            return 0
        except PeerLostError as e:
            print(f"lost a peer: {e}", file=sys.stderr)
            report("peer_lost", error=str(e).splitlines()[0][:500])
        finally:
            if trainer is not None:
                trainer.close()
            if grid is not None:
                grid.close()
        again = _next_pass(channel)
        if again is None:
            return 1
        member = _membership(place, again)


def _next_pass(channel: Channel) -> dict[str, Any] | None:
    """The agent's word after a lost peer: another pass (`form`), or None when it is gone. Usually a SIGKILL comes."""
    while True:
        select.select([channel], [], [])
        try:
            for message in channel.receive():
                if message.get("kind") == "form":
                    return message
        except Closed:
            return None
