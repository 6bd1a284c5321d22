"""What one rank's dry run came to, as values.

Owns: the records, and their extension to more layers. Filling them is dry_run.py's, showing them report.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from .silent import Traffic


class DryRunError(ValueError):
    """A rank's work that failed, with the place."""


@dataclass(frozen=True)
class Memory:
    """Bytes of live tensors on one rank: what stays, and what a step adds at its highest."""

    weights: int
    gradients: int
    masters: int
    moments: int
    gathered: int  # whole weights and gradients of FSDP, at the moment at which `activations` is most
    sends: int  # tensors that went to other stages, where torch's schedule keeps them until the step ends
    inputs: int  # tokens, targets, positions of the micro-batches at hand
    activations: int  # kept between forward and backward passes, when that is most
    host: int  # optimizer state under memory.offload_optimizer; not part of the total
    transient: int  # what is alive besides at the peak: within a pass, or in the optimizer
    peak_at: str  # the work during which it is

    @property
    def state(self) -> int:
        """What stays between steps."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.sends + self.inputs + self.activations + self.transient


@dataclass(frozen=True)
class DryRun:
    """What a rank's step came to."""

    rank: int
    coordinates: dict[str, int]  # by axis
    layers: list[list[int]]  # per stage
    parameters: int  # elements of weights that it computes with
    owned: int  # elements that its optimizer updates
    memory: Memory
    per_micro_batch: dict[int, int]  # bytes of activations of one micro-batch, by stage
    micro_steps: int
    traffic: dict[str, Traffic] = field(default_factory=dict)  # of a whole step, by axis


def extended(one: DryRun, two: DryRun, layers: float) -> DryRun:
    """What a rank with stages of so many layers comes to, from those with stages of one layer and of two."""

    def at(a: float, b: float) -> float:
        return a + (b - a) * (layers - 1)

    numbers = [f.name for f in fields(Memory) if f.name != "peak_at"]
    memory = Memory(
        **{n: round(at(getattr(one.memory, n), getattr(two.memory, n))) for n in numbers}, peak_at=two.memory.peak_at
    )
    traffic = {
        axis: Traffic(round(at(t.calls, two.traffic[axis].calls)), at(t.sent_bytes, two.traffic[axis].sent_bytes))
        for axis, t in one.traffic.items()
    }
    return replace(
        two,
        parameters=round(at(one.parameters, two.parameters)),
        owned=round(at(one.owned, two.owned)),
        memory=memory,
        per_micro_batch={s: round(at(n, two.per_micro_batch[s])) for s, n in one.per_micro_batch.items()},
        traffic=traffic,
    )
