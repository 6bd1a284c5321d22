"""The work of a writer for one rank, in a thread of its own: shard, checksums and index lines, publishing, retention.

Owns: the order of files, the fence before each of them, and that whatever goes wrong becomes an answer. The node's
writer process (persist_writer.py) and the thread in a worker (persist_local.py) are this with another way to it.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from queue import SimpleQueue
from typing import Any

from ...launcher.run.attempts import Fence, SupersededError
from ...launcher.run.failpoints import failpoint
from ...launcher.run.layout import CheckpointName, RunDir
from ...launcher.run.manifest import (
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    block_checksums,
    describe,
    shard_name,
    sidecar_name,
)
from ...launcher.run.retention import Retention, looked
from ...launcher.run.verdict_note import is_known_bad
from ..storage.base import Shelf, Sink, Target
from ..storage.choice import target_of
from .checksum import crc32
from .index import merge_index, part_name
from .persist import FAILED, PART, PUBLISHED, WAVE, Answer, Part, Wave
from .writer import write_small

_CHUNK = 256 * 1024 * 1024  # bytes between two looks whether the job was abandoned; a multiple of the checksum block


class Memory:
    """The two state segments, mapped for reading. They grow and never shrink, so that a mapping stays good; it is kept,
    as to make it anew for each save would cost as much of the processor as all the writing."""

    def __init__(self, fds: Sequence[int]) -> None:
        """Takes the descriptors over."""
        self._fds, self._maps = tuple(fds), dict[int, mmap.mmap]()

    def view(self, segment: int, at: int, size: int) -> memoryview:
        found = self._maps.get(segment)
        if found is None or len(found) < at + size:
            found = self._maps[segment] = mmap.mmap(self._fds[segment], 0, prot=mmap.PROT_READ)
        return memoryview(found)[at : at + size]

    def close(self) -> None:
        self._maps.clear()
        for fd in self._fds:
            os.close(fd)


class _Abandoned(Exception):
    """Nobody waits for this job any more."""


class Runner:
    """Does one rank's jobs in a thread. The methods return at once; `answer` is called in the thread."""

    def __init__(self, run: RunDir, shelf: Shelf, memory: Memory, answer: Callable[[Answer], None]) -> None:
        self._run, self._shelf, self._memory, self._answer = run, shelf, memory, answer
        # With the job; None: to be done whatever became of the job.
        self._orders: SimpleQueue[tuple[int | None, Callable[[], None]] | None] = SimpleQueue()
        self._abandoned = 0  # this job and all before it
        self._failed = 0  # likewise
        self._began = 0.0
        self._shard: _Shard | None = None  # of the job in hand, as long as its files are not finished
        self._part: Part | None = None
        self._target: Target | None = None
        self._noted: set[str] = set()
        self._checksums = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._thread = threading.Thread(target=self._serve, name="writer", daemon=True)
        self._thread.start()

    def begin(self, part: Part) -> None:
        self._orders.put((part.job, lambda: self._begin(part)))

    def wave(self, job: int, wave: Wave) -> None:
        self._orders.put((job, lambda: self._wave(wave)))

    def publish(self, job: int, request: dict[str, Any]) -> None:
        self._orders.put((job, lambda: self._publish(request)))

    def abandon(self, job: int, others: Part | None = None) -> None:
        """Answers for it may still be on their way. `others`: the job is another runner's, which is no more."""
        self._abandoned = max(self._abandoned, job)
        self._orders.put((None, lambda: self._leave(others)))

    def close(self, patience: float | None = None) -> None:
        """Abandon what is in hand, end the thread and close the memory; wait `patience` seconds for that at most."""
        self._abandoned = sys.maxsize
        self._orders.put((None, self._leave))
        self._orders.put(None)
        self._thread.join(patience)

    # In the thread.

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            job, work = order
            if job is None:
                work()
            elif job > max(self._abandoned, self._failed):
                self._do(job, work)
        self._checksums.shutdown()
        self._memory.close()

    def _do(self, job: int, work: Callable[[], None]) -> None:
        try:
            work()
            return
        except _Abandoned:
            return  # `_leave` is among the orders
        except OSError as e:
            text = str(e.strerror) if e.filename is None else f"{e.filename}: {e.strerror}"
        except (SupersededError, InvalidCheckpointError) as e:
            text = str(e)
        except Exception as e:
            traceback.print_exc()
            text = f"{type(e).__name__}: {e}"
        self._failed = job
        # A later attempt clears our files away, and that is no fault of the storage.
        superseded = ""
        try:
            self._check_fence()
        except SupersededError as e:
            superseded = str(e)
        if self._shard is not None:
            self._shard.abort()
            self._shard = None
        self._answer(Answer(job, FAILED, {}, superseded or text, superseded=bool(superseded)))

    def _begin(self, part: Part) -> None:
        self._leave()
        self._began, self._part, self._target = time.monotonic(), part, target_of(part.spec)

    def _leave(self, others: Part | None = None) -> None:
        """Forget the job in hand, and what it wrote."""
        if self._shard is not None:
            self._shard.abort()
        part = others or self._part
        if part is not None and part.rank == 0:
            try:
                target_of(part.spec).discard()
            except OSError as e:  # a later save sweeps
                print(f"an unfinished checkpoint stays behind: {e}", file=sys.stderr)
        self._shard = self._part = self._target = None

    def _check_fence(self) -> None:
        if self._part is not None:
            Fence(self._run, self._part.attempt).check()

    def _point(self, name: str, **more: int) -> None:
        """A place where a test may end, freeze or fail this process."""
        p = self._part
        assert p is not None
        values = {"rank": p.rank, "step": p.step, "attempt": p.attempt, "generation": p.generation}
        failpoint(f"checkpoint.{name}", **(values | more))

    def _before(self, name: str) -> None:
        """A file is about to be made."""
        self._point(name)
        self._check_fence()
        self._check_wanted()

    def _check_wanted(self) -> None:
        assert self._part is not None
        if self._part.job <= self._abandoned:
            raise _Abandoned

    def _wave(self, wave: Wave) -> None:
        part, target = self._part, self._target
        assert part is not None
        assert target is not None
        if self._shard is None:
            self._before("prepare")
            target.prepare()
            self._before("shard")
            lines = bytes(self._memory.view(wave.segment, wave.segment_at + wave.size, part.lines))
            self._shard = _Shard(target, part, lines, self._checksums)
        shard = self._shard
        assert wave.file_at == shard.at, f"a wave at {wave.file_at}, expected at {shard.at}"
        data = self._memory.view(wave.segment, wave.segment_at, wave.size)
        for at in range(0, len(data), _CHUNK):
            self._check_wanted()
            is_halfway = shard.at <= part.size // 2 < shard.at + _CHUNK
            shard.write(data[at : at + _CHUNK], (lambda: self._point("write")) if is_halfway else None)
        shard.settle()
        self._answer(Answer(part.job, WAVE, {"segment": wave.segment, "file_at": wave.file_at}))
        if shard.at == part.size:
            self._finish_part(part, target, shard)

    def _finish_part(self, part: Part, target: Target, shard: _Shard) -> None:
        self._point("sync")
        shard.finish()
        self._before("sidecar")
        name = sidecar_name(part.rank)
        write_small(target, name, bytes(shard.checksums))
        self._before("part")
        write_small(target, part_name(part.rank), shard.lines)
        self._shard = None
        entry = FileEntry(shard_name(part.rank), part.size, None, name)
        fields: dict[str, Any] = {"shard": asdict(entry), "sidecar": asdict(describe(name, bytes(shard.checksums)))}
        seconds = round(time.monotonic() - self._began, 3)
        fields |= {"part": zlib.crc32(shard.lines), "seconds": seconds, "notes": target.notes}
        self._answer(Answer(part.job, PART, fields))

    def _publish(self, request: dict[str, Any]) -> None:
        """Index, manifest, and the call that makes it a checkpoint; then what retention removes."""
        part, target = self._part, self._target
        assert part is not None
        assert target is not None
        written = request["written"]
        files = [FileEntry(**w[kind]) for w in written for kind in ("shard", "sidecar")]
        files += merge_index(target, [w["part"] for w in written], self._before)
        self._before("manifest")
        manifest = Manifest(**request["manifest"], time=time.time(), files=tuple(files))
        # Who is frozen here and goes on after a later attempt began publishes under its own number, or finds the
        # target gone.
        target.publish(manifest, self._last_check)
        published = time.monotonic()
        self._point("published")
        self._check_fence()
        events = self._new_notes(n for w in written for n in w.get("notes", []))
        # Before the answer, which ends the save: the next one, the end of the run, and whoever lists the folder then
        # find it as it will stay. Who is killed meanwhile loses nothing: this one is durable, and what goes need not
        # stay because of that. Where somebody waits, `keep` is None.
        events += self._prune(request["keep"], manifest.name)
        self._part = self._target = None
        self._answer(Answer(part.job, PUBLISHED, {"events": events, "time": published}))

    def _new_notes(self, notes: Iterable[str]) -> list[dict[str, Any]]:
        """What the targets could not do, to be reported; each once."""
        new = [n for n in dict.fromkeys(notes) if n not in self._noted]
        self._noted.update(new)
        return [{"event": "checkpoint_storage", "note": note} for note in new]

    def _last_check(self) -> None:
        self._check_fence()
        self._check_wanted()
        self._point("publish")

    def _prune(self, keep: dict[str, Any] | None, name: CheckpointName) -> list[dict[str, Any]]:
        """Remove what need not stay; returns what is to be reported."""
        if keep is None:
            return []
        retention = Retention.of(keep)
        retention = replace(retention, proven=retention.proven | {name}, rejected=retention.rejected - {name})
        try:
            assert self._target is not None
            self._check_wanted()  # the next pass may be reading what it found before this one was there
            self._shelf.sweep(name.attempt, self._target.spec["token"])
            for old in retention.superfluous(self._shelf.names(), self._look):
                self._point("prune")
                self._check_fence()
                self._check_wanted()
                self._shelf.remove(old)
        except OSError as e:
            return [{"event": "prune_failed", "error": f"{e.filename}: {e.strerror}"}]
        return []

    def _look(self, name: CheckpointName) -> Manifest | None:
        manifest = looked(lambda: self._shelf.manifest(name))
        return None if manifest is not None and is_known_bad(self._run.checkpoint(name), manifest) else manifest


class _Shard:
    """The file of a shard as it grows, and the checksums of its blocks.

    crc32 and write both leave the interpreter, so the checksums cost no time beside the disk.
    """

    def __init__(self, target: Target, part: Part, lines: bytes, pool: ThreadPoolExecutor) -> None:
        self.at, self.lines, self.checksums = 0, lines, bytearray()
        self._pool = pool
        self._coming: list[Future[bytes]] = []
        self._sink: Sink = target.create(shard_name(part.rank), part.size)

    def write(self, data: memoryview, before: Callable[[], None] | None = None) -> None:
        """The next bytes; they may change after `settle`."""
        self._coming.append(self._pool.submit(block_checksums, data, crc32))
        if before is not None:
            before()
        self._sink.write(data)
        self.at += len(data)

    def settle(self) -> None:
        for future in self._coming:
            self.checksums += future.result()
        self._coming.clear()

    def finish(self) -> None:
        self._sink.finish()

    def abort(self) -> None:
        for future in self._coming:
            future.cancel()
        self._sink.abort()
