"""Saving, restoring and retention of checkpoints, by all ranks together.

Owns: the order of steps and the agreement among ranks: either all return, or all raise the same error. Does not own:
when to save (the loop), whether the state is worth saving (never one that is not finite), or bytes (the other modules).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ...launcher.run.attempts import SupersededError
from ...launcher.run.failpoints import failpoint
from ...launcher.run.files import fsync_dir, naming, to_json
from ...launcher.run.layout import CheckpointName
from ...launcher.run.manifest import FileEntry, Manifest, check_sizes
from ...launcher.run.retention import Retention, look_at
from ..context import RunContext
from ..grid import Grid
from .agreement import Status, errors, exchange, summary
from .entry import Entry, check, plan
from .folder import is_plausible, publish, remove, sweep, unfinished_name
from .index import merge_parts, part, part_name
from .restorer import Restored, Restorer
from .segment import Segments
from .writer import write_shard


class SaveFailedError(Exception):
    """No checkpoint was published; all ranks raise it alike. Older checkpoints are as they were: a run may go on."""


class Checkpointer:
    """One per trainer; all ranks call `save` and `restore` together. `prune` leaves the `keep` newest valid ones."""

    def __init__(self, context: RunContext, grid: Grid, keep: int) -> None:
        self._context, self._grid, self._keep = context, grid, keep
        self._folder = context.run.checkpoints
        self._segments = Segments()
        self._proven: set[CheckpointName] = set()  # written or read whole by this process, the same on all ranks
        self._restorer = Restorer(context, grid)

    # ---- save

    def save(self, step: int, entries: Sequence[Entry], state: dict[str, Any]) -> CheckpointName:
        """Publish the state after `step` optimizer steps; on stable storage when this returns.

        `state`: plain JSON values, the same on all ranks. What this process saved or restored is not written again.

        Raises (on all ranks the same):
            SaveFailedError: storage refused; names rank, node, file and error.
            SupersededError: a later attempt has begun.
            PeerLostError: another rank is gone.
            ValueError: two entries with one name, entries that share memory, state that is not JSON.
        """
        began = time.monotonic()
        check(entries)
        to_json(state)
        name = CheckpointName(step, self._context.attempt.number)
        unfinished = self._together(name, lambda: self._begin(name) if self._is_first else {})[0]["directory"]
        if unfinished is None:
            return name
        try:
            written = self._together(name, lambda: self._write(name, unfinished, entries))
            self._together(name, lambda: self._finish(name, unfinished, written, state) if self._is_first else {})
        except BaseException:
            if self._is_first:
                self._discard(unfinished)
            raise
        self._proven.add(name)
        self._restorer.rejected.discard(name)
        if self._is_first:
            slowest = max(range(len(written)), key=lambda rank: written[rank]["seconds"])
            self._context.report(
                "checkpoint_saved",
                step=step,
                seconds=round(time.monotonic() - began, 3),
                bytes=sum(w["shard"]["size"] for w in written),
                slowest_rank=slowest,
                slowest_seconds=written[slowest]["seconds"],
            )
        return name

    @property
    def _is_first(self) -> bool:
        return self._grid.rank == 0

    def _together(self, name: CheckpointName, work: Callable[[], Status]) -> list[Status]:
        """Run `work` on every rank and exchange what it returns; if it failed anywhere, raise the same everywhere."""
        statuses = exchange(self._grid, work)
        superseded = [s["superseded"] for s in statuses if "superseded" in s]
        if superseded:
            raise SupersededError(superseded[0])
        if errors(statuses):
            error = f"checkpoint {name} not saved: {summary(errors(statuses))}"
            if self._is_first:
                self._context.report("checkpoint_failed", step=name.step, error=error)
            raise SaveFailedError(error)
        return statuses

    def _begin(self, name: CheckpointName) -> Status:
        """Rank 0: the directory to write to, or None if the checkpoint is there already."""
        self._context.fence.check()
        if name in self._proven and is_plausible(self._context.run.checkpoint(name)):
            return {"directory": None}
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            fsync_dir(self._folder.parent)
        unfinished = unfinished_name(name, self._context.generation)
        (self._folder / unfinished).mkdir()
        return {"directory": unfinished}

    def _write(self, name: CheckpointName, unfinished: str, entries: Sequence[Entry]) -> Status:
        """Every rank: its shard, sidecar and part of the index."""
        began = time.monotonic()
        directory, rank = self._folder / unfinished, self._grid.rank
        segment = self._segments.pack(plan(entries))
        shard, sidecar = write_shard(
            directory,
            rank,
            segment,
            lambda: failpoint("checkpoint.write", rank=rank, step=name.step, attempt=name.attempt),
        )
        lines = part(shard.name, segment.placed)
        with naming(directory / part_name(rank)):
            (directory / part_name(rank)).write_bytes(lines)  # not synced: merged, checked and deleted by rank 0
        fsync_dir(directory)
        seconds = round(time.monotonic() - began, 3)
        return {"shard": asdict(shard), "sidecar": asdict(sidecar), "part": zlib.crc32(lines), "seconds": seconds}

    def _finish(
        self, name: CheckpointName, unfinished: str, written: Sequence[Status], state: dict[str, Any]
    ) -> Status:
        """Rank 0: index, manifest, and the rename that makes it a checkpoint."""
        directory, target = self._folder / unfinished, self._context.run.checkpoint(name)
        try:
            files = [FileEntry(**w[kind]) for w in written for kind in ("shard", "sidecar")]
            files += merge_parts(directory, [w["part"] for w in written])
            failpoint("checkpoint.manifest", step=name.step, attempt=name.attempt)
            manifest = Manifest(
                run=self._context.run_id,
                step=name.step,
                attempt=name.attempt,
                generation=self._context.generation,
                time=time.time(),
                layout=self._grid.sizes,
                state=state,
                files=tuple(files),
            )
            manifest.write(directory)
            check_sizes(directory, manifest)
            self._context.fence.check()
            # Who is frozen here and goes on after a later attempt began publishes under its own number, or finds the
            # directory gone.
            failpoint("checkpoint.publish", step=name.step, attempt=name.attempt)
            publish(directory, target)
            fsync_dir(self._folder)
        finally:
            # Also on an error: a later attempt clears our directory away, and that is no fault of the storage.
            self._context.fence.check()
        return {}

    def _discard(self, unfinished: str) -> None:
        try:
            remove(self._folder / unfinished)
        except OSError as e:
            self._context.report("checkpoint_leftover", name=unfinished, error=str(e))

    # ---- restore

    def restore(self, entries: Sequence[Entry]) -> Restored | None:
        """Fill the entries' tensors from the newest checkpoint that is valid on all ranks; None if there are none.

        A damaged one is reported (`checkpoint_rejected`) and the next older one is taken.

        Raises (on all ranks the same):
            ValueError: the checkpoint is sound but of another model; names the first differences.
            NoValidCheckpointError: none of those that are there can be loaded. The tensors are void.
            PeerLostError: another rank is gone.
        """
        check(entries)
        if self._is_first:
            sweep(self._folder, self._context.attempt.number)
        restored = self._restorer.restore(entries)
        self._proven -= self._restorer.rejected
        if restored is not None:
            self._proven.add(restored.name)
        return restored

    # ---- retention

    def prune(self) -> None:
        """Remove checkpoints beyond the `keep` newest valid ones. Rank 0 works, the others return at once.

        The newest one whose bytes were all checked stays in any case. Storage errors are reported, not raised.
        """
        # With nothing proven in this process, the only good one could be among those that would go.
        if not self._is_first or not self._proven or not self._context.fence.is_current():
            return
        attempt = self._context.attempt.number
        sweep(self._folder, attempt)
        try:
            names = self._context.run.all_checkpoints()
            proven, rejected = frozenset(self._proven), frozenset(self._restorer.rejected)
            retention = Retention(self._keep, attempt=attempt, proven=proven, rejected=rejected)
            for name in retention.superfluous(names, lambda name: look_at(self._context.run.checkpoint(name))):
                if self._context.fence.is_current():
                    remove(self._context.run.checkpoint(name))
        except OSError as e:
            self._context.report("prune_failed", error=f"{e.filename}: {e.strerror}")
