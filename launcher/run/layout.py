"""The run directory: what is where (the table stands in docs/architecture.md).

Owns: names and paths, and the numbering of attempts, submissions and checkpoints.
Does not own: reading or writing what stands in the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ATTEMPT = re.compile(r"\d{4,}")
_CHECKPOINT = re.compile(r"step-(\d{8,})-a(\d{4,})")
_UNFINISHED = re.compile(rf"\.tmp-({_CHECKPOINT.pattern})-(g\d{{4,}}-[0-9a-f]+)")
_METRICS = re.compile(r"metrics-g(\d{4,})\.jsonl")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """`step-00001000-a0001`: the state after optimizer step 1000, published by attempt 1. Sorts by age."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}-a{self.attempt:04d}"

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        m = _CHECKPOINT.fullmatch(name)
        return CheckpointName(int(m[1]), int(m[2])) if m else None

    def unfinished(self, token: str) -> str:
        """The directory's name while it is written. `token` (gNNNN-HEX: generation and number of the save) tells
        preparations of one name apart."""
        found = f".tmp-{self}-{token}"
        assert _UNFINISHED.fullmatch(found), found
        return found

    @staticmethod
    def parse_unfinished(name: str) -> tuple[CheckpointName, str] | None:
        """(name, token)."""
        m = _UNFINISHED.fullmatch(name)
        return (CheckpointName(int(m[2]), int(m[3])), m[4]) if m else None


@dataclass(frozen=True)
class AttemptDir:
    """One attempt's own files. Only that attempt writes here."""

    path: Path
    number: int

    def events(self, writer: str) -> Path:
        """Event lines of one writer: a node's name, or `supervisor`."""
        return self.path / "events" / f"{writer}.jsonl"

    def log(self, node: str) -> Path:
        return self.path / "logs" / f"{node}.log"

    def metrics(self, generation: int) -> Path:
        return self.path / f"metrics-g{generation:04d}.jsonl"

    def all_metrics(self) -> list[tuple[int, Path]]:
        """(generation, file), oldest first."""
        found = ((_METRICS.fullmatch(p.name), p) for p in self.path.glob("metrics-g*.jsonl"))
        return sorted((int(m[1]), p) for m, p in found if m)

    @property
    def start(self) -> Path:
        """Written once by the supervisor at its start: job, nodes, restart count."""
        return self.path / "start.json"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def health(self) -> Path:
        return self.path / "health.json"


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def overrides(self) -> Path:
        return self.path / "overrides.txt"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def code(self) -> Path:
        return self.path / "code.tar.gz"

    @property
    def script(self) -> Path:
        return self.path / "submit.sbatch"

    @property
    def submissions(self) -> Path:
        return self.path / "submissions"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def job_logs(self) -> Path:
        """Where Slurm puts the batch script's own output; made before submission, Slurm does not make it."""
        return self.path / "slurm"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{number:04d}", number)

    def all_attempts(self) -> list[AttemptDir]:
        """Oldest first."""
        if not self.attempts.is_dir():
            return []
        numbers = (int(p.name) for p in self.attempts.iterdir() if _ATTEMPT.fullmatch(p.name))
        return [self.attempt(n) for n in sorted(numbers)]

    def checkpoint(self, name: CheckpointName) -> Path:
        return self.checkpoints / str(name)

    def all_checkpoints(self) -> list[CheckpointName]:
        """Every directory with a checkpoint's name, newest first; whether it is valid is manifest.verify's to say."""
        if not self.checkpoints.is_dir():
            return []
        found = (CheckpointName.parse(p.name) for p in self.checkpoints.iterdir())
        return sorted((c for c in found if c), reverse=True)


def open_run(path: str | Path) -> RunDir:
    """The run directory at `path`.

    Raises:
        ValueError: there is no run there; says what was expected.
    """
    run = RunDir(Path(path).resolve())
    if not run.run.is_file():
        raise ValueError(
            f"{path}: not a run directory (no run.json in it); `stoker launch` prints the directory it made"
        )
    return run
