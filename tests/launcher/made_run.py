"""A run directory whose attempts are written by hand, for tests of what reads one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.conf.schema import Config
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.files import create_json
from stoker.launcher.run.layout import AttemptDir, RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission

WANDB_ID = "261130-104733-x7q2"


def line(step: int, **fields: Any) -> str:
    """A metrics line as the trainer writes it."""
    parts = {"data": 0.01, "forward_backward": 0.2, "communication": 0.03, "optimizer": 0.04, "save": 0.0}
    record = {
        "step": step,
        "loss": 4.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens": 2048,
        "consumed_samples": 8 * step,
    }
    record |= {"step_seconds": 0.28, "tokens_per_second": 7314.0, "mfu": None, "memory_gib": 1.25, "parts": parts}
    return json.dumps(record | {"time": 1_700_000_000.0 + step} | fields) + "\n"


def make_run(root: Path, mode: str = "offline", **tracking: Any) -> RunDir:
    """A frozen and submitted run that has not started."""
    run = RunDir(root / f"tiny-{WANDB_ID}")
    for folder in (run.path, run.job_logs, run.checkpoints):
        folder.mkdir()
    identity = {"id": WANDB_ID, "name": "tiny", "wandb_id": WANDB_ID, "stoker_version": "0.1.0", "seed": 0}
    create_json(run.run, identity | {"git": {"sha": "abc123"}, "command": "stoker launch password=hunter2"})
    config = json.loads(json.dumps(asdict(Config())))
    config["tracking"] |= {"mode": mode, "interval": 0.1} | tracking
    create_json(run.config_json, config)
    new_submission(run, "sbatch")
    return run


def start_attempt(run: RunDir, first: int = 1, last: int = 0, **fields: Any) -> AttemptDir:
    """Claim an attempt; with `last`, it has written these steps."""
    attempt = claim(run)
    create_json(attempt.start, {"submission": 1, "time": 1_700_000_000.0})
    if last:
        add_steps(attempt, first, last, **fields)
    return attempt


def add_steps(attempt: AttemptDir, first: int, last: int, generation: int = 1, **fields: Any) -> None:
    add_text(attempt, "".join(line(step, **fields) for step in range(first, last + 1)), generation)


def add_text(attempt: AttemptDir, text: str, generation: int = 1) -> None:
    with open(attempt.metrics(generation), "a", encoding="utf-8") as f:
        f.write(text)


def end_attempt(attempt: AttemptDir, cause: Cause, then: Next = Next.REQUEUE, code: int = 75, **fields: Any) -> None:
    assert Outcome(cause, then, code, f"ended by {cause.value}", **fields).write(attempt)


def finish(attempt: AttemptDir) -> None:
    end_attempt(attempt, Cause.FINISHED, Next.NOTHING, 0)
