"""What the trainer is given of the run it works for, and how it tells what happens. Model code never sees this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..launcher.run.attempts import Fence
from ..launcher.run.layout import AttemptDir, RunDir
from .pulse import Pulse
from .state.persist import Persister
from .state.segment import Memory

Report = Callable[..., None]  # report("checkpoint_saved", step=..., seconds=...)


def _silent(event: str, **fields: Any) -> None:
    pass


@dataclass(frozen=True)
class RunContext:
    """`report(event, **fields)` goes to the agent, which writes it down as an event and tells the supervisor."""

    run: RunDir
    run_id: str
    attempt: AttemptDir
    generation: int
    fence: Fence
    pulse: Pulse
    report: Report = field(default=_silent)
    # The state segments and the way to the node's writer, which outlive a pass of the worker; None: own ones.
    memories: tuple[Memory, Memory] | None = None
    persister: Persister | None = None
