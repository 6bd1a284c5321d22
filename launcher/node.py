"""One node's processes: zygote, store, writer and workers, with their segments, logs and exits. The agent's hands.

Owns: forking through the zygote, reading segments, killing. Does not own: when (the supervisor says).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from .caches import cache_variables, is_compiled
from .fabric_node import Fabric
from .node_writer import IDENT, WriterLink
from .run.events import EventLog
from .run.heartbeat import Control, Heartbeat, Phase, Save, Segment
from .run.layout import AttemptDir, RunDir
from .run.wire import Channel, Closed, Message
from .stacks_node import collect, targets
from .stacks_text import innermost, render

PROPOSAL_PAUSE = 0.003  # seconds between writing a proposal and reading where workers are (see propose)
TAIL_BYTES = 4096
TASK_LIMIT = 3.0  # seconds in which the zygote's stand-in ends by itself once the agent has left it
STACKS_LIMIT = 0.7  # seconds


class ChildEnded(Exception):
    """The zygote or the store is gone: this node can go on no more."""


@dataclass
class Worker:
    rank: int
    generation: int
    segment: Segment
    channel: Channel | None
    pid: int | None = None
    reported: tuple[int, int, int, int] | None = None  # last status sent: step, phase, micro, sequence
    has_failed: bool = False  # it said itself why
    must_die: bool = False  # killed before its pid was known


class Node:
    """`tell` sends a message to the supervisor."""

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        config: dict[str, Any],
        tell: Callable[[Message], None],
        events: EventLog,
    ) -> None:
        self._run, self._attempt, self._tell, self._events = run, attempt, tell, events
        self._log_path = attempt.log(events.writer)
        self._log = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._zygote: subprocess.Popen[bytes] | None = None
        self._to_zygote: Channel | None = None
        self._store: Channel | None = None
        self._workers: dict[int, Worker] = {}
        self._pids: dict[int, int] = {}  # pid -> rank
        self._config = config
        self._told: set[tuple[int, str]] = set()  # generation and words of failures that are in the log
        self._fabric = Fabric(config["fabric"], events, self._say)
        spec = {"run": str(run.path), "attempt": attempt.number, "config": config}
        self._writer = WriterLink(self._fork, spec, events)
        self.is_stopping = False  # a stop step was proposed: news is wanted at once

    # Processes.

    def start_zygote(self) -> None:
        """Start what starts workers: the zygote, or for a script of the user's own (`task.cmd`) its stand-in."""
        is_own = bool(self._config["task"]["cmd"])
        module = ["stoker.launcher.task", str(self._run.path)] if is_own else ["stoker.train.zygote"]
        ours, theirs = socket.socketpair()
        env = os.environ | {"STOKER_ZYGOTE_FD": str(theirs.fileno()), "STOKER_AGENT_PID": str(os.getpid())}
        env |= cache_variables(os.environ, is_compiled("torch", sys.path))
        env |= {"STOKER_NODE": self._events.writer, "STOKER_RUN_DIR": str(self._run.path)}
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", *module],
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._to_zygote = Channel(ours)

    def _fork(self, what: str, ident: int, spec: Message, env: dict[str, str], fds: tuple[int, ...]) -> Channel:
        assert self._to_zygote is not None
        ours, theirs = socket.socketpair()
        message = {"kind": "fork", "what": what, "id": ident, "spec": spec, "env": env}
        self._to_zygote.send(message, (self._log, theirs.fileno(), *fds))
        theirs.close()
        return Channel(ours)

    def start_store(self) -> None:
        # All interfaces: workers of the other nodes come from outside.
        self._store = self._fork("store", -1, {"host": "0.0.0.0"}, {}, ())

    def form(self, message: Message) -> None:
        """Fork this node's workers of a new generation."""
        self.is_stopping = False
        generation, first = int(message["generation"]), int(message["first_rank"])
        count = int(message["procs_per_node"])
        fabric = self._fabric.form(count, message.get("address"))
        has_writer = not self._config["task"]["cmd"]
        if has_writer:
            self._writer.start(frozenset().union(*(seat.cpus or () for seat in fabric.seats)))
        for k, seat in enumerate(fabric.seats):
            rank = first + k
            segment = Segment.create(f"g{generation}-r{rank}")
            # The clock of the start runs from the fork, not from the worker's first word.
            segment.beat(Heartbeat(generation, Phase.START, 0, 0, 0, time.monotonic(), 0.0))
            spec = {
                "run": str(self._run.path),
                "config": self._config,
                "attempt": self._attempt.number,
                "generation": generation,
                "rank": rank,
                "local_rank": k,
                "world_size": message["world_size"],
                "store_host": message["store_host"],
                "store_port": message["store_port"],
                "cpus": None if seat.cpus is None else sorted(seat.cpus),
            }
            env = fabric.env | {"LOCAL_WORLD_SIZE": str(count), "STOKER_RANK": str(rank)}
            with self._writer.client(generation, rank, k) if has_writer else nullcontext(()) as state:
                channel = self._fork("worker", rank, spec, env, (segment.fd, *state))
            self._workers[rank] = Worker(rank, generation, segment, channel)

    def record_stacks(self) -> None:
        """Where the workers hang, onto the node's log (with what the writer does) and in short into its events. Takes
        less than a second."""
        pids = [pid for pid in (*(w.pid for w in self._workers.values()), self._writer.pid) if pid is not None]
        try:
            found = collect(targets(self._run, self._attempt.number, None, pids), STACKS_LIMIT)
            if not found:
                return  # a script of the user's own makes no offer
            os.write(self._log, f"stacks of workers that hang:\n{render(found)}\n".encode(errors="replace"))
        except (OSError, ValueError) as e:  # a full disk; nothing may keep them from being killed
            self._events.write("stacks_failed", reason=str(e))
            return
        for a in (a for a in found if a.rank is not None):
            self._events.write("hung_at", rank=a.rank, state=a.state, at=innermost(a.text))

    def kill_hung(self) -> None:
        """Kill the workers, and say first where they hang."""
        self.record_stacks()
        self._writer.drop()
        self.kill_workers()

    def kill_workers(self) -> None:
        for w in self._workers.values():
            if w.pid is None:
                w.must_die = True
            else:
                _kill(w.pid)

    def kill_all(self) -> None:
        self.kill_workers()
        if self._zygote is None:
            return
        if self._to_zygote is not None and self._config["task"]["cmd"]:
            # It ends by itself then, and takes along what the processes have left behind.
            self._to_zygote.close()
            self._to_zygote = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._zygote.wait(TASK_LIMIT)
        self._zygote.kill()
        self._zygote.wait()

    def close(self) -> None:
        for w in self._workers.values():
            self._forget(w)
        self._workers.clear()
        self._writer.close()
        for channel in self.channels():
            channel.close()
        self._to_zygote = self._store = None
        os.close(self._log)

    def _forget(self, w: Worker) -> None:
        w.segment.close()
        if w.channel is not None:
            w.channel.close()
            w.channel = None

    # News.

    def channels(self) -> list[Channel]:
        found = [self._to_zygote, self._store, self._writer.channel, *(w.channel for w in self._workers.values())]
        return [c for c in found if c is not None]

    def read(self, channel: Channel) -> None:
        if channel is self._to_zygote:
            try:
                messages = channel.receive()
            except Closed as e:
                raise ChildEnded("the zygote ended, and with it all workers") from e
            for message in messages:
                self._from_zygote(message)
            return
        try:
            messages = channel.receive()
        except Closed:
            self._hang_up(channel)
            return
        for message in messages:
            if channel is self._store:
                self._tell({"kind": "store", "port": message["port"]})
            else:
                self._from_worker(channel, message)

    def _hang_up(self, channel: Channel) -> None:
        if channel is self._writer.channel:
            self._writer.lost("it ended")
            return
        channel.close()
        if channel is self._store:
            self._store = None
            raise ChildEnded("the store ended")
        for w in self._workers.values():
            if w.channel is channel:
                w.channel = None

    def _from_zygote(self, message: Message) -> None:
        if message["kind"] == "ready":
            self._tell({"kind": "ready", "seconds": message["seconds"]})
        elif message["kind"] == "forked" and message["id"] == IDENT:
            self._writer.pid = message["pid"]
        elif message["kind"] == "forked" and message["id"] in self._workers:
            worker = self._workers[message["id"]]
            worker.pid = message["pid"]
            self._pids[message["pid"]] = worker.rank
            if worker.must_die:
                _kill(message["pid"])
        elif message["kind"] == "exited" and message["pid"] in self._pids:
            self._exited(self._workers.pop(self._pids.pop(message["pid"])), message["status"])

    def _from_worker(self, channel: Channel, message: Message) -> None:
        worker = next((w for w in self._workers.values() if w.channel is channel), None)
        if worker is None:
            return
        fields = message["fields"]
        if message["event"] == "failed":
            worker.has_failed = True
            if fields.get("traceback") is None:
                self._say_once(worker, str(fields["error"]))
        self._events.write(message["event"], **(fields | {"rank": worker.rank, "generation": message["generation"]}))
        self._tell({**message, "kind": "report", "rank": worker.rank})

    def _exited(self, w: Worker, status: int) -> None:
        if w.channel is not None:
            self._drain(w)
        if (last := self._status(w)) is not None:
            self._tell({"kind": "status", "ranks": [last]})
        code = status if status >= 0 else None
        name = None
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = f"signal {-status}"
        self._events.write("worker_exited", rank=w.rank, generation=w.generation, code=code, signal=name)
        tail = None if w.has_failed or status == 0 else self._log_tail()
        message = {"kind": "exited", "generation": w.generation, "rank": w.rank, "code": code, "signal": name}
        self._tell(message | {"tail": tail})
        self._forget(w)

    def _drain(self, w: Worker) -> None:
        """What a worker said right before its end comes before the news of its end."""
        assert w.channel is not None
        self._workers[w.rank] = w
        try:
            while w.channel is not None and select.select([w.channel], [], [], 0)[0]:
                self.read(w.channel)
        finally:
            del self._workers[w.rank]

    def _say_once(self, worker: Worker, error: str) -> None:
        """A failure that its words explain, as all ranks will give it in about the same moment."""
        if (worker.generation, error) not in self._told:
            self._told.add((worker.generation, error))
            self._say("\n".join(f"[{worker.rank}] stoker: error: {line}" for line in error.splitlines()))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._log, f"{text}\n".encode(errors="replace"))

    def _log_tail(self) -> str:
        with open(self._log_path, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL_BYTES))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-20:])

    # Segments.

    def statuses(self, only_changed: bool) -> list[Message]:
        """Where the workers are; with `only_changed` those that moved since last told."""
        found = []
        for w in self._workers.values():
            before = w.reported
            status = self._status(w)
            if status is not None and not (only_changed and w.reported == before):
                found.append(status)
        return found

    def _status(self, w: Worker) -> Message | None:
        beat = w.segment.read_heartbeat()
        if beat is None or beat.generation != w.generation:
            return None  # killed in the middle of an update: its exit is on the way
        w.reported = (beat.step, int(beat.phase), beat.micro, beat.sequence)
        return {
            "generation": w.generation,
            "rank": w.rank,
            "step": beat.step,
            "phase": int(beat.phase),
            "sequence": beat.sequence,
            "age": round(time.monotonic() - beat.time, 3),
            "median": round(beat.step_seconds, 6),
        }

    def propose(self, generation: int, step: int, save: Save) -> Message:
        """Write a proposed stop step and say whether all workers here will see it in time.

        A worker publishes its step, then looks for a proposal; we write the proposal, then look for its step. The pause
        between keeps the two stores and loads of either side from passing each other on any processor.
        """
        self.is_stopping = True
        mine = [w for w in self._workers.values() if w.generation == generation]
        for w in mine:
            w.segment.write_control(Control(generation, step, False, save))
        time.sleep(PROPOSAL_PAUSE)
        beats = [w.segment.read_heartbeat() for w in mine]
        accepted = all(b is not None and b.generation == generation and _will_see(b, step) for b in beats)
        furthest = max((b.step for b in beats if b is not None), default=0)
        message = {"kind": "answer", "generation": generation, "step": step}
        return message | {"accepted": accepted, "max_step": furthest}

    def commit(self, generation: int, step: int, save: Save) -> None:
        for w in self._workers.values():
            if w.generation == generation:
                w.segment.write_control(Control(generation, step, True, save))


def _will_see(beat: Heartbeat, step: int) -> bool:
    """Whether a worker that was here after a proposal of `step` was written will stop there."""
    return beat.step < step or (beat.step == step and beat.phase in (Phase.HOLD, Phase.DONE))


def _kill(pid: int) -> None:
    # A worker leads a group of its own; a fork that has not got that far yet is hit by its pid.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
