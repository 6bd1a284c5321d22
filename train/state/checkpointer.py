"""Saving and restoring by all ranks together, while they train on.

Owns: one save in flight, its states, and the agreement among ranks: all see the same outcome at the same boundary. Does
not own: when to save (train/saving.py), whether the state is worth saving (never one that is not finite), copying
(packing.py) or writing (whoever is the persister).

    begin -> written everywhere? (counts in the step's own reduction) -> rank 0: published? -> ended
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...conf.schema import CheckpointConfig
from ...launcher.run.attempts import SupersededError
from ...launcher.run.files import to_json
from ...launcher.run.heartbeat import Phase
from ...launcher.run.layout import CheckpointName
from ...launcher.run.retention import Retention
from ..context import RunContext
from ..grid import Grid
from ..storage.choice import shelf_of
from .agreement import errors, exchange, place, summary
from .entry import Entry
from .flight import Flight
from .packing import Copies, Packer, Planner, Shard, Staging
from .persist import Answer, Part, Persister
from .persist_local import LocalPersister
from .restorer import Restored, Restorer
from .segment import Memory, populate
from .staging import available_bytes, choose

_LOOK = 1.0  # seconds a rank waits for its own writer before it asks the others again
_PATIENCE = 2.0  # seconds for publishing, when a pass ends before it is known to be done


class SaveFailedError(Exception):
    """No checkpoint was published; all ranks raise it alike. Older checkpoints are as they were: a run may go on."""


@dataclass(frozen=True)
class Ended:
    """What became of a save, the same on all ranks. `problem`: None if it is a checkpoint."""

    step: int
    problem: str | None


class Checkpointer:
    """One per trainer; all ranks call the same methods in the same order. At most one save is in flight."""

    def __init__(self, context: RunContext, grid: Grid, settings: CheckpointConfig, timeout: float = 1800.0) -> None:
        """`timeout`: seconds after which a save that is not done has failed."""
        self._context, self._grid, self._settings, self._timeout = context, grid, settings, timeout
        self._shelf = shelf_of(context.run, settings)
        self._planner = Planner(grid.rank)
        self._shard: Shard | None = None
        self._staging: Staging | None = None
        self._total = 0  # bytes of all ranks' shards
        self._is_in_waves = False  # on any rank
        self._copies: dict[tuple[int, int], Copies] = {}
        self._own: tuple[tuple[Memory, Memory], Persister] | None = None
        self._count, self._next = 0, 0
        self._save: Flight | None = None
        self._proven: set[CheckpointName] = set()  # written or read whole by this process, the same on all ranks
        self._restorer = Restorer(context, grid, self._shelf)

    # ---- one save, piece by piece

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved."""
        return None if self._save is None else self._save.name.step

    @property
    def is_publishing(self) -> bool:
        """Whether all of the save in flight is written, and only its name is missing."""
        return self._save is not None and self._save.is_publishing

    def spare(self) -> None:
        """There is no time to remove anything after the save in flight. In vain if it is being published."""
        if self._save is not None:
            self._save.prune = False

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Plan the saves of these entries and fetch their memory, so that the first one stalls no longer than the next.

        Raises:
            PeerLostError: another rank is gone.
            ValueError: two entries with one name, or entries that share memory.
        """
        if self._plan(entries):
            assert self._staging is not None
            memories, _ = self._means()
            with suppress(OSError, MemoryError):  # the first save will say so
                for memory in memories:
                    memory.reserve(self._staging.capacity)
                populate(memories, self._grid.device)

    def begin(self, step: int, entries: Sequence[Entry], state: dict[str, Any], prune: bool = True) -> bool:
        """Save the state after `step` optimizer steps. The tensors may change once `settle` has returned.

        False if this process saved or restored that very checkpoint: it is not written again. `state`: plain JSON
        values, the same on all ranks. `prune`: remove what need not stay, after it. What storage refuses is told by
        `advance`.

        Raises:
            ValueError: two entries with one name, entries that share memory, state that is not JSON.
            PeerLostError: another rank is gone.
        """
        assert self._save is None, "one save at a time"
        began = time.monotonic()
        to_json(state)
        name = CheckpointName(step, self._context.attempt.number)
        if name in self._proven:
            return False
        self._plan(entries)
        assert self._shard is not None
        assert self._staging is not None
        memories, persister = self._means()
        self._count += 1
        token = f"g{self._context.generation:04d}-{self._count:08x}"
        part = Part(
            job=(self._context.generation << 20) + self._count,
            spec=self._shelf.spec(name, token, self._total, self._grid.world_size),
            rank=self._grid.rank,
            step=step,
            attempt=name.attempt,
            generation=self._context.generation,
            size=self._shard.size,
            lines=len(self._shard.lines),
        )
        packer = Packer(self._shard, self._staging, self._next, memories, self._copies)
        self._save = Flight(name, part.job, state, prune, packer, began)
        is_whole, device = self._staging.is_whole, self._grid.device
        if is_whole:
            self._next = 1 - self._next
        if is_whole and device.type != "cuda":
            packer.run(persister, part)
        else:
            packer.start(persister, part, device)
        self._save.stall = time.monotonic() - began
        return True

    @property
    def is_settled(self) -> bool:
        """Whether all tensors of the save in flight are copied: they may change."""
        save = self._save
        return save is None or save.is_settled or (not self._is_in_waves and save.packer.is_done)

    def settle(self) -> None:
        """Wait for that: before anything changes them. Raises PeerLostError."""
        save = self._save
        if save is None or self.is_settled:
            return
        began = time.monotonic()
        self._context.pulse.enter(Phase.SAVE)
        if self._is_in_waves:
            self._settle_together(save)
        else:
            save.packer.wait()
        self._context.pulse.enter(Phase.STEP)
        save.is_settled = True
        save.waited += time.monotonic() - began

    def _settle_together(self, save: Flight) -> None:
        """Waves go at storage's pace, which differs between ranks by minutes: who went on alone would wait for the
        others in the next collective, and be taken for hung. And storage that hangs holds nobody longer than a save may
        take: the save has failed then, as `counts` will say."""
        while True:
            counts = torch.tensor([int(save.packer.wait(_LOOK)), int(self._is_late(save))])
            packed, late = self._grid.control.all_reduce(counts).tolist()
            if late:
                save.packer.cancel()
            if late or packed == self._grid.world_size:
                return

    def counts(self) -> tuple[int, int]:
        """(done, failed) of this rank, for `advance`: summed over all ranks in a reduction that a step makes anyway."""
        save = self._save
        if save is None or not save.packer.is_done:
            return 0, 0
        return self._counted(save, self._means()[1].poll())

    def advance(self, done: int, failed: int) -> Ended | None:
        """Go on with the save in flight by what all ranks said together; whether it has ended.

        Raises:
            SupersededError: a later attempt has begun; on all ranks alike.
            PeerLostError: another rank is gone.
        """
        save = self._save
        if save is None:
            return None
        if failed:
            return self._failed(save)
        if save.is_publishing:
            return self._saved(save) if done else None
        if done == self._grid.world_size:
            save.all_written = self._grid.control.all_gather_json(save.written)
            save.is_publishing = True
            if self._is_first:
                self._means()[1].publish(save.job, self._request(save))
        return None

    def finish(self) -> Ended | None:
        """Wait for the end of the save in flight. Raises as `advance`."""
        ended = None
        if self._save is not None:
            self._context.pulse.enter(Phase.SAVE)
        while (save := self._save) is not None:
            if save.packer.wait(_LOOK):
                counts = self.counts()
                if not any(counts) and (self._is_first or not save.is_publishing):
                    counts = self._counted(save, self._means()[1].wait(_LOOK))
            else:
                counts = 0, int(self._is_late(save))
            done, failed = self._grid.control.all_reduce(torch.tensor(counts, dtype=torch.int64)).tolist()
            ended = self.advance(done, failed)
        return ended

    def abandon(self) -> None:
        """Leave the save in flight: it becomes no checkpoint. On one rank alone too, before the pass ends."""
        save, self._save = self._save, None
        if save is not None:
            save.packer.cancel()
            self._means()[1].abandon(save.job)

    def save(self, step: int, entries: Sequence[Entry], state: dict[str, Any]) -> CheckpointName:
        """`begin` and `finish`: on stable storage when this returns.

        Raises (on all ranks the same):
            SaveFailedError: storage refused; names rank, node, file and error.
            Others as `begin` and `advance`.
        """
        if self.begin(step, entries, state):
            ended = self.finish()
            assert ended is not None
            if ended.problem is not None:
                raise SaveFailedError(ended.problem)
        return CheckpointName(step, self._context.attempt.number)

    def close(self) -> None:
        """Abandon what is in flight, and give back what is this object's. Safe after an error, and twice.

        What only lacks its name gets a moment for that: ranks that lost a peer go on from there.
        """
        save = self._save
        if save is not None and save.is_publishing and self._is_first:
            deadline = time.monotonic() + _PATIENCE
            while not any(save.counts()) and (left := deadline - time.monotonic()) > 0:
                save.take(self._means()[1].wait(left))
            if save.published is not None:
                self._saved(save)
        self.abandon()
        # Tensors are let go of here: a next trainer in this process needs their memory.
        self._planner, self._shard = Planner(self._grid.rank), None
        self._copies.clear()
        if self._own is not None:
            memories, persister = self._own
            self._own = None
            persister.close()
            for memory in memories:
                memory.close()

    # ---- restore

    def restore(self, entries: Sequence[Entry]) -> Restored | None:
        """Fill the entries' tensors from the newest checkpoint that is valid on all ranks; None if there are none.

        A damaged one is reported (`checkpoint_rejected`) and the next older one is taken.

        Raises (on all ranks the same):
            ValueError: the checkpoint is sound but of another model; names the first differences.
            NoValidCheckpointError: none of those that are there can be loaded. The tensors are void.
            PeerLostError: another rank is gone.
        """
        assert self._save is None
        self._planner.shard(entries)
        if self._is_first:
            self._shelf.sweep(self._context.attempt.number)
        restored = self._restorer.restore(entries)
        self._proven -= self._restorer.rejected
        if restored is not None:
            self._proven.add(restored.name)
        return restored

    # ---- means

    @property
    def _is_first(self) -> bool:
        return self._grid.rank == 0

    def _means(self) -> tuple[tuple[Memory, Memory], Persister]:
        """The memories and the persister: of the worker process, or else of this object."""
        context = self._context
        if context.memories is not None and context.persister is not None:
            return context.memories, context.persister
        if self._own is None:
            memories = (Memory(), Memory())
            self._own = memories, LocalPersister(context.run, self._shelf, [m.fd for m in memories])
        return self._own

    def _plan(self, entries: Sequence[Entry]) -> bool:
        """What is written and how much memory each rank takes, from what all need and have; whether that is new. The
        entries change on all ranks, or on none."""
        shard = self._planner.shard(entries)
        if shard is self._shard:
            return False
        memories, _ = self._means()
        mine = {
            "host": socket.gethostname(),
            "size": Staging.whole(shard).capacity,
            "file": shard.size,
            "held": sum(m.held for m in memories),
            "available": available_bytes(),
        }
        ranks = self._grid.control.all_gather_json(mine)
        staging = choose(ranks, self._settings.staging_mb * 2**20)
        self._staging = Staging.whole(shard) if staging == 0 else Staging.halves(shard, staging)
        self._total = sum(r["file"] for r in ranks)
        self._is_in_waves = staging > 0 and any(r["file"] > self._staging.wave for r in ranks)
        self._copies.clear()
        self._shard = shard
        return True

    # ---- what became of it

    def _is_late(self, save: Flight) -> bool:
        """Rank 0 looks at the clock; a save that is late has failed."""
        if not self._is_first or time.monotonic() - save.began <= self._timeout:
            return False
        save.problem = save.problem or f"not done within resilience.save_timeout={self._timeout:g} seconds"
        return True

    def _counted(self, save: Flight, answers: Sequence[Answer]) -> tuple[int, int]:
        save.take(answers)
        self._is_late(save)
        return save.counts()

    def _request(self, save: Flight) -> dict[str, Any]:
        manifest = {
            "run": self._context.run_id,
            "step": save.name.step,
            "attempt": save.name.attempt,
            "generation": self._context.generation,
            "layout": self._grid.sizes,
            "state": save.state,
        }
        s = self._settings
        retention = Retention(
            s.keep,
            s.keep_every,
            s.keep_best,
            save.name.attempt,
            frozenset(self._proven),
            frozenset(self._restorer.rejected),
        )
        return {"written": save.all_written, "manifest": manifest, "keep": retention.to_json() if save.prune else None}

    def _saved(self, save: Flight) -> Ended:
        self._save = None
        self._proven.add(save.name)
        self._restorer.rejected.discard(save.name)
        if self._is_first:
            assert save.published is not None
            for event in save.published["events"]:
                self._context.report(**event)
            self._context.report("checkpoint_saved", **save.account())
        return Ended(save.name.step, None)

    def _failed(self, save: Flight) -> Ended:
        mine = {"superseded": save.superseded} if save.superseded is not None else {}
        if save.problem is not None:
            mine["error"] = f"{place(self._grid)}: {save.problem}"
        self._context.pulse.enter(Phase.SAVE)
        statuses = exchange(self._grid, lambda: mine)
        self.abandon()
        self._context.pulse.enter(Phase.STEP)
        superseded = [s["superseded"] for s in statuses if "superseded" in s]
        if superseded:
            raise SupersededError(superseded[0])
        problem = f"checkpoint {save.name} not saved: {summary(errors(statuses))}"
        if self._is_first:
            self._context.report("checkpoint_failed", step=save.name.step, error=problem)
        return Ended(save.name.step, problem)
