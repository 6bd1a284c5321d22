"""Restoring: the newest checkpoint that is valid on all ranks.

Owns: the order in which candidates are tried, and the ranks' agreement on each. Does not own: reading and copying
(loader.py, source.py), or what follows from a rejection for retention (checkpointer.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ...launcher.run.index_bounds import Bounds
from ...launcher.run.layout import CheckpointName
from ...launcher.run.manifest import INDEX, OFFSETS, InvalidCheckpointError, Manifest, read_manifest
from ...launcher.run.outcome import Cause
from ..context import RunContext
from ..grid import Grid
from ..storage.base import Shelf
from .agreement import SHOWN, Status, errors, exchange, first_rank, summary
from .entry import Entry
from .index import Index
from .loader import Match, load, match
from .reader import VerifiedReader
from .source import ByteSource


class NoValidCheckpointError(Exception):
    """There are checkpoints, and none can be loaded. The tensors given to restore are void: do not train from them."""

    cause = Cause.STORAGE  # starting again finds the same files


@dataclass(frozen=True)
class Restored:
    name: CheckpointName
    manifest: Manifest


class Restorer:
    """Tries candidates, newest first; `rejected` are those that turned out bad."""

    def __init__(self, context: RunContext, grid: Grid, shelf: Shelf) -> None:
        self._context, self._grid, self._shelf = context, grid, shelf
        self.rejected: set[CheckpointName] = set()

    def restore(self, entries: Sequence[Entry]) -> Restored | None:
        """See Checkpointer.restore."""
        began = time.monotonic()
        candidates = self._candidates()
        failed: list[str] = []
        while True:
            offer = first_rank(self._grid, lambda: next(candidates, {}))
            if "name" not in offer:
                break
            name = CheckpointName.parse(offer["name"])
            assert name is not None
            manifest = None if "error" in offer else self._try(name, entries, offer)
            if manifest is not None:
                self._report("restored", step=name.step, name=str(name), seconds=round(time.monotonic() - began, 3))
                return Restored(name, manifest)
            failed.append(offer["error"])
            self.rejected.add(name)
            self._report("checkpoint_rejected", name=str(name), error=offer["error"])
            if self._grid.rank == 0:
                print(f"{name} cannot be loaded, the one before it is tried: {offer['error']}", file=sys.stderr)
        if errors([offer]):  # starting afresh would be wrong then too
            where = self._context.run.checkpoints
            raise NoValidCheckpointError(f"{where}: cannot say which checkpoints there are: {summary(errors([offer]))}")
        if failed:
            raise NoValidCheckpointError(
                f"{self._context.run.checkpoints}: no checkpoint can be loaded: {summary(failed)}. "
                "To start from the beginning, move them away"
            )
        return None

    def _report(self, event: str, **fields: object) -> None:
        if self._grid.rank == 0:
            self._context.report(event, **fields)

    def _candidates(self) -> Iterator[Status]:
        """Newest first, with what is wrong already at a look at the small files."""
        run = self._context.run
        for name in self._shelf.names():
            offer = {"name": str(name)}
            try:
                manifest = self._shelf.manifest(name)
                if manifest.run != self._context.run_id:
                    offer["error"] = f"{run.checkpoint(name)}: belongs to run {manifest.run}"
            except InvalidCheckpointError as e:
                offer["error"] = str(e)
            yield offer

    def _try(self, name: CheckpointName, entries: Sequence[Entry], offer: Status) -> Manifest | None:
        """Load one checkpoint on all ranks. If it is unfit, None, and the reason is put into `offer`."""
        directory = self._context.run.checkpoint(name)
        source = self._shelf.source(name)
        try:
            mine = _Load(directory, source, entries)
            statuses = exchange(self._grid, mine.open)
            if not errors(statuses):
                differences = sorted({d for s in statuses for d in s["differences"]})
                differences += self._only_stored(mine.index, mine.match)
                if differences:
                    raise ValueError(f"checkpoint {name} does not fit this model: {summary(differences)}")
                statuses = exchange(self._grid, mine.load)
            if errors(statuses):
                offer["error"] = summary(errors(statuses))
                return None
            return mine.manifest
        finally:
            source.close()

    def _only_stored(self, index: Index, found: Match) -> list[str]:
        """Tensors of the checkpoint that no rank has. One byte per tensor is exchanged, not the names."""
        marks = torch.zeros(len(index), dtype=torch.uint8)
        marks[list(found.lines)] = 1
        self._grid.control.all_reduce(marks, dist.ReduceOp.MAX)
        unused = (marks == 0).nonzero().flatten().tolist()
        return [f"{index.name(number)}: only in the checkpoint" for number in unused]


class _Load:
    """One rank's work on one candidate: first all that can be said without touching a tensor, then the tensors."""

    manifest: Manifest
    reader: VerifiedReader
    index: Index
    match: Match

    def __init__(self, directory: Path, source: ByteSource, entries: Sequence[Entry]) -> None:
        self._directory, self._source, self._entries = directory, source, entries

    def open(self) -> Status:
        self.manifest = read_manifest(self._directory)
        self.reader = VerifiedReader(self._source, self.manifest)
        self.index = Index(
            self.reader.small(INDEX), self.reader.small(OFFSETS), self._source.where(INDEX), Bounds.of(self.manifest)
        )
        self.match = match(self.index, self._entries)
        return {"differences": self.match.differences[:SHOWN]}

    def load(self) -> Status:
        load(self.reader, self.match.pieces, is_by_all=True)
        return {}
