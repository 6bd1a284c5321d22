"""Gradients of a rank, counted into buckets: which have come, and which bucket is complete.

Owns: the order in which buckets go out, the same on all ranks, and what happens to gradients that autograd itself
accumulates. Does not own: the memory of gradients and their reduction (subclasses: ddp.py, zero1.py, fsdp.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from ..linear import GradientSink, add_or_copy


@dataclass(frozen=True)
class Slot:
    """One parameter: number of its bucket, and of the contributions that one backward pass makes to its gradient."""

    name: str
    bucket: int
    uses: int


S = TypeVar("S", bound=Slot)


class BucketedGradients(ABC, Generic[S]):
    """A GradientSink. `slots` are by parameter, as the backward pass knows it; every bucket has at least one."""

    def __init__(self, slots: Mapping[Tensor, S]) -> None:
        self._slots = dict(slots)
        self._contributions = [0] * (1 + max(slot.bucket for slot in slots.values()))
        for slot in slots.values():
            self._contributions[slot.bucket] += slot.uses
        self._holds_sum: set[Tensor] = set()
        self._owed: dict[Tensor, int] = {}  # contributions that are still to come before buckets go out, by parameter
        self._left = list(self._contributions)  # and by bucket
        self._sent = 0  # buckets that went out
        self._passes, self._rounds = 1, 0  # backward passes before buckets go out; how many times they yet will
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in slots]

    @property
    def sink(self) -> GradientSink:
        """See DataParallel."""
        return self

    def begin_step(self, passes: int, rounds: int = 1) -> None:
        """See DataParallel. What the buffers hold is void. rounds: buckets go out so often, each time after equally
        many passes, whose contributions then must not mix."""
        assert passes % rounds == 0
        self._passes, self._rounds = passes // rounds, rounds
        self._begin_round()

    def _begin_round(self) -> None:
        self._holds_sum.clear()
        self._rounds -= 1
        self._owed = {weight: self._passes * slot.uses for weight, slot in self._slots.items()}
        self._left, self._sent = [self._passes * contributions for contributions in self._contributions], 0

    def target(self, weight: Tensor) -> tuple[Tensor, bool]:
        """See GradientSink."""
        holds_sum = weight in self._holds_sum
        self._holds_sum.add(weight)
        return self._buffer(self._slots[weight]), holds_sum

    def ready(self, weight: Tensor) -> None:
        """See GradientSink. Sends every bucket that is full, in order. Raises PeerLostError."""
        slot = self._slots[weight]
        assert self._owed[weight] > 0, f"{slot.name}: more gradients than uses"
        self._owed[weight] -= 1
        self._left[slot.bucket] -= 1
        while self._sent < len(self._left) and self._left[self._sent] == 0:
            self._sent += 1
            self._send(self._sent - 1)
        if self._sent == len(self._left) and self._rounds > 0:
            self._begin_round()

    def check_complete(self) -> None:
        """All gradients of the step have come (an invariant of ours)."""
        assert self._rounds == 0 and not any(self._left), "a parameter got too few gradients in this step"  # noqa: PT018

    def close(self) -> None:
        """See DataParallel."""
        for hook in self._hooks:
            hook.remove()

    @abstractmethod
    def _buffer(self, slot: S) -> Tensor:
        """Where the parameter's gradient is summed, in its shape."""

    @abstractmethod
    def _send(self, bucket: int) -> None:
        """Begin to reduce a bucket. Raises PeerLostError."""

    def _take(self, parameter: Tensor) -> None:
        """Gradients that autograd itself accumulates (norms) come this way; for the others the hook sees None."""
        if parameter.grad is None:
            return
        add_or_copy(parameter.grad, *self.target(parameter))
        parameter.grad = None
        self.ready(parameter)
