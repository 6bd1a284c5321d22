"""Which checkpoints stay: the newest, those at regular steps, the best by validation, and the last that was proven.

Owns: that choice, as a pure function of names and manifests; the writer that prunes after it has published and
`stoker checkpoint prune` make it alike. Does not own: removing. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from .layout import CheckpointName
from .manifest import InvalidCheckpointError, Manifest


class Stateful(Protocol):
    """A manifest, or what is left of one."""

    @property
    def state(self) -> Mapping[str, Any]: ...


Look = Callable[[CheckpointName], "Stateful | None"]  # the manifest of one that is valid at a look; None: it is not
LATER, NEWEST, EVERY, BEST, PROVEN = "later attempt", "newest", "every", "best", "proven"


@dataclass(frozen=True)
class Validation:
    """Of a checkpoint: the loss at the last validation before it was saved, and the step of that validation."""

    step: int
    loss: float  # finite


@dataclass(frozen=True)
class Retention:
    """What stays. As plain JSON it is the field `keep` of a request to publish."""

    keep: int  # so many of the newest valid ones, at least one
    keep_every: int = 0  # steps; from each multiple of it on the first valid one; 0: none because of that
    keep_best: int = 0  # so many with the lowest validation loss
    attempt: int | None = None  # whoever asks; those of later attempts are a successor's. None: there is nobody later
    proven: frozenset[CheckpointName] = frozenset()  # all their bytes were checked, or written by whoever asks
    rejected: frozenset[CheckpointName] = frozenset()  # turned out bad, whatever a look says

    def to_json(self) -> dict[str, Any]:
        numbers = {"keep": self.keep, "keep_every": self.keep_every, "keep_best": self.keep_best}
        names = {"proven": sorted(map(str, self.proven)), "rejected": sorted(map(str, self.rejected))}
        return {**numbers, "attempt": self.attempt, **names}

    @staticmethod
    def of(raw: Mapping[str, Any]) -> Retention:
        """Back from `to_json`."""
        names = {field: frozenset(map(_parsed, raw[field])) for field in ("proven", "rejected")}
        return Retention(raw["keep"], raw["keep_every"], raw["keep_best"], raw["attempt"], **names)

    def superfluous(self, names: Iterable[CheckpointName], look: Look) -> list[CheckpointName]:
        """What goes, newest first. `names`: all that are there, in any order.

        An invalid one counts nowhere, and goes when it is older than the newest ones that stay. `look` is called once
        for each name at most, and for no more than it takes: with neither `keep_every` nor `keep_best`, for the newest.
        """
        return [name for name, reasons in self.reasons(names, look).items() if not reasons]

    def reasons(self, names: Iterable[CheckpointName], look: Look) -> dict[CheckpointName, tuple[str, ...]]:
        """Why each one stays, newest first: LATER, NEWEST, EVERY, BEST, PROVEN. With no reason, it goes."""
        ordered = sorted(names, key=lambda n: (n.step, n.attempt), reverse=True)
        why: dict[CheckpointName, list[str]] = {name: [] for name in ordered}
        looked: dict[CheckpointName, Stateful | None] = {}

        def valid(name: CheckpointName) -> Stateful | None:
            if name not in looked:
                looked[name] = None if name in self.rejected else look(name)
            return looked[name]

        mine = []
        for name, found in why.items():
            if self.attempt is not None and name.attempt > self.attempt:
                found.append(LATER)
            else:
                mine.append(name)
        kept = 0
        for name in mine:
            if kept == max(self.keep, 1):
                break
            why[name].append(NEWEST)  # an invalid one too: it may be what a person wants to look at
            kept += valid(name) is not None
        for name in self._every(mine, valid):
            why[name].append(EVERY)
        for name in self._best(mine, valid):
            why[name].append(BEST)
        for name in sorted(self.proven & why.keys() - self.rejected, reverse=True):
            why[name].append(PROVEN)
            if valid(name) is not None:  # else it has been damaged since, and the next older one is what one can trust
                break
        return {name: tuple(found) for name, found in why.items()}

    def _every(self, mine: Iterable[CheckpointName], valid: Look) -> list[CheckpointName]:
        """From each such step on the first one: a save that was due there may have had to wait for another. Of one step
        the newest attempt's: a step that was done again stands for the one before."""
        if self.keep_every <= 0:
            return []
        chosen: dict[int, CheckpointName] = {}
        for name in sorted(mine, key=lambda n: (n.step, -n.attempt)):
            number = name.step // self.keep_every
            if number and number not in chosen and valid(name) is not None:
                chosen[number] = name
        return list(chosen.values())

    def _best(self, mine: Iterable[CheckpointName], valid: Look) -> list[CheckpointName]:
        """By loss; of several with one validation the nearest after it, then the newer."""
        if self.keep_best <= 0:
            return []
        ranked = []
        for name in mine:
            manifest = valid(name)
            measured = validation_of(manifest) if manifest is not None else None
            if measured is not None:
                order = (measured.loss, name.step - measured.step, -name.step, -name.attempt)
                ranked.append((order, measured, name))
        # A loss that several checkpoints carry was measured once, and is one place among the best.
        best: dict[Validation, CheckpointName] = {}
        for _, measured, name in sorted(ranked, key=lambda r: r[0]):
            best.setdefault(measured, name)
        return list(best.values())[: self.keep_best]


def looked(read: Callable[[], Manifest]) -> Manifest | None:
    """What `read` gives, None for what is no valid checkpoint.

    Raises:
        OSError: storage does not say. What is good must not go because of that.
    """
    try:
        return read()
    except InvalidCheckpointError as e:
        if isinstance(e.__cause__, OSError) and not isinstance(e.__cause__, FileNotFoundError):
            raise e.__cause__ from e
        return None


def validation_of(manifest: Stateful) -> Validation | None:
    """What `state["validation"]` says; None where there was none, or none with a finite loss."""
    found = manifest.state.get("validation")
    if not isinstance(found, Mapping):
        return None
    step, loss = found.get("step"), found.get("loss")
    if not isinstance(step, int) or not isinstance(loss, (int, float)) or not isfinite(loss):
        return None
    return Validation(step, float(loss))


def _parsed(text: str) -> CheckpointName:
    name = CheckpointName.parse(text)
    if name is None:
        raise ValueError(f"{text!r}: not a checkpoint's name")
    return name
