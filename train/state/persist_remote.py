"""Persists through the node's writer process, over a socket; with a thread of this process once that one is lost.

Owns: the client's side of the messages, and what the loss of the writer means for the job in hand. Does not own: the
work (persist_job.py), or the writer's end (persist_writer.py).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ...launcher.run.wire import Channel, Closed
from .persist import FAILED, PART, PUBLISHED, Answer, Part, Wave
from .persist_local import LocalPersister

LOST = "the node's writer process was lost"
_SEND_LIMIT = 10.0  # seconds that a message may take to a writer that does not read


class RemotePersister:
    """`local` makes what is used after the loss, of which `lost` is told once."""

    def __init__(self, channel: Channel, local: Callable[[], LocalPersister], lost: Callable[[str], None]) -> None:
        channel.sock.settimeout(_SEND_LIMIT)
        self._channel, self._make_local, self._tell = channel, local, lost
        self._local: LocalPersister | None = None
        self._part: Part | None = None  # of the newest job that the writer was given, until it is abandoned
        self._is_waiting = False  # for an answer to it
        self._abandoned = 0
        self._answers: list[Answer] = []

    def begin(self, part: Part) -> None:
        self._part, self._is_waiting = None, False
        if self._local is None:
            self._receive()  # a writer that was lost since the last job costs nothing
        if self._local is not None:
            self._local.begin(part)
            return
        self._part, self._is_waiting = part, True
        self._send({"kind": "begin", "part": asdict(part)})

    def wave(self, job: int, wave: Wave) -> None:
        if self._local is None:
            self._send({"kind": "wave", "job": job, "wave": asdict(wave)})
        elif self._part is None:
            self._local.wave(job, wave)

    def publish(self, job: int, request: dict[str, Any]) -> None:
        if self._local is None:
            self._is_waiting = True
            self._send({"kind": "publish", "job": job, "request": request})
        elif self._part is None:
            self._local.publish(job, request)
        else:  # it was lost after it had answered
            self._answers.append(Answer(job, FAILED, {}, LOST))

    def abandon(self, job: int) -> None:
        self._abandoned = max(self._abandoned, job)
        if self._local is None:
            self._send({"kind": "abandon", "job": job})
        if self._local is not None:
            self._local.abandon(job, self._part)
        self._part, self._is_waiting = None, False

    def poll(self) -> list[Answer]:
        if self._local is None:
            self._receive()
        found, self._answers = self._answers, []
        if self._local is not None:
            found += self._local.poll()
        return [a for a in found if a.job > self._abandoned]

    def wait(self, timeout: float) -> list[Answer]:
        deadline = time.monotonic() + timeout
        while not (found := self.poll()) and (left := deadline - time.monotonic()) > 0:
            if self._local is not None:
                return self._local.wait(left)
            select.select([self._channel], [], [], left)
        return found

    def close(self) -> None:
        self._channel.close()
        if self._local is not None:
            self._local.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except Closed as e:
            self._lose(e)

    def _receive(self) -> None:
        try:
            while select.select([self._channel], [], [], 0)[0]:
                for message in self._channel.receive():
                    answer = Answer(**message)
                    self._is_waiting &= answer.what not in (PART, PUBLISHED, FAILED) or answer.job <= self._abandoned
                    self._answers.append(answer)
        except Closed as e:
            self._lose(e)

    def _lose(self, why: Closed) -> None:
        self._channel.close()
        self._local = self._make_local()
        if self._part is not None and self._is_waiting:
            self._answers.append(Answer(self._part.job, FAILED, {}, LOST))
        self._tell(str(why))
