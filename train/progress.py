"""The numbers of a run: how far it is, what one step summed up to, and what of the settings it began with.

Owns: what a checkpoint holds besides tensors. Does not own: the tensors (loop.py), the file (state/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from ..conf.load import to_plain
from ..conf.schema import Config


@dataclass
class Progress:
    """With weights and optimizer state, all that training is a function of. Changed only in the loop's commit."""

    step: int = 0  # optimizer steps completed, skipped ones included
    updates: int = 0  # those that changed the weights
    consumed_samples: int = 0
    consumed_tokens: int = 0  # targets that counted
    bad_steps: int = 0  # skipped in a row, up to now; 0 in every checkpoint
    validation: dict[str, Any] | None = None  # the last one up to now: its `step`, and its `loss`, which is finite

    def to_state(self, config: Config, fingerprints: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """For the checkpoint's manifest: JSON all the way down."""
        return asdict(self) | {"settings": settings(config), "data": [dict(f) for f in fingerprints]}

    @staticmethod
    def from_state(state: Mapping[str, Any], config: Config) -> tuple[Progress, list[str]]:
        """Progress, and which settings are not those that the checkpoint was made with (`name: was -> is`).

        Raises:
            ValueError: the seed is another, so the samples would come in another order.
        """
        now, was = settings(config), state["settings"]
        if was["seed"] != now["seed"]:
            raise ValueError(
                f"seed = {now['seed']}, but the checkpoint was made with seed {was['seed']}: the order of the data "
                "would change; set it back, or start a new run"
            )
        changed = [f"{k}: {was.get(k)} -> {now.get(k)}" for k in sorted({*was, *now}) if was.get(k) != now.get(k)]
        return Progress(**{name: state.get(name, default) for name, default in asdict(Progress()).items()}), changed


def settings(config: Config) -> dict[str, Any]:
    """The settings that decide how training goes on, by dotted name; data has its fingerprints instead."""
    plain = to_plain(config)
    sections = {section: plain[section] for section in ("train", "model", "optim", "precision")}
    flat = {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}
    return {"seed": config.seed, **flat}


@dataclass(frozen=True)
class Totals:
    """A step's sums over all ranks, on the host."""

    loss: float  # cross-entropy, nats
    tokens: int  # targets that counted
    grad_norm: float  # of the scaled gradient sum

    @property
    def problem(self) -> str | None:
        """Why the step must not change the weights; the same on all ranks."""
        if self.tokens == 0:
            return "no target counts in this batch"
        if not isfinite(self.loss):
            return "the loss is not finite"
        return None if isfinite(self.grad_norm) else "the gradient is not finite"
