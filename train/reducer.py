"""The gradient reducer: where gradients live, and their sum over the data axis.

Owns: one flat buffer of gradients, its cut into buckets, and the order in which buckets are reduced. A bucket's
all-reduce starts as soon as its last gradient of the step is in, while the backward pass goes on. Sums, never means.
Does not own: when a step begins and ends (loop.py), what gradients are used for (optim.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .comm import Communicator, Work
from .linear import add_or_copy, gradient_dtype
from .params import ParamTable

_ALIGNMENT = 16  # elements: each gradient begins on a 64-byte boundary


@dataclass(frozen=True)
class _Slot:
    """One parameter's gradient."""

    name: str
    gradient: Tensor  # view of the flat buffer, in the parameter's shape
    uses: int
    bucket: int


@dataclass(frozen=True)
class _Bucket:
    flat: Tensor  # view of the flat buffer
    contributions: int  # how many make it full


class GradientReducer:
    """A GradientSink (linear.py) that reduces over `comm` in the last micro-step of each step."""

    def __init__(self, model: nn.Module, table: ParamTable, comm: Communicator, bucket_bytes: int) -> None:
        self._comm = comm
        # Gradients come in the reverse order of the forward pass; so do buckets, on all ranks alike.
        order = [(f.name, table.local(model, f.name), table.uses(f.name)) for f in reversed(table.owned())]
        self._slots, self._buckets, self.flat = _lay_out(order, bucket_bytes)
        self.gradients = {slot.name: slot.gradient for slot in self._slots.values()}
        self._holds_sum: set[Tensor] = set()
        self._uses: dict[Tensor, int] = {}  # contributions that the pass under way still owes, by parameter
        self._left = [0] * len(self._buckets)  # and by bucket
        self._is_last = False
        self._works: list[Work] = []
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for _, p, _ in order]

    def begin_step(self) -> None:
        """A new sum: what the buffer holds is void."""
        self._holds_sum.clear()
        self._works.clear()

    def begin_micro_step(self, is_last: bool) -> None:
        """One backward pass's contributions follow; in the last one of a step, buckets are reduced as they fill."""
        self._is_last = is_last
        self._uses = {weight: slot.uses for weight, slot in self._slots.items()}
        self._left = [bucket.contributions for bucket in self._buckets]

    def target(self, weight: Tensor) -> tuple[Tensor, bool]:
        """See GradientSink."""
        holds_sum = weight in self._holds_sum
        self._holds_sum.add(weight)
        return self._slots[weight].gradient, holds_sum

    def ready(self, weight: Tensor) -> None:
        """See GradientSink. Starts the reduction of every bucket that is full, in order. Raises PeerLostError."""
        slot = self._slots[weight]
        assert self._uses[weight] > 0, f"{slot.name}: more gradients than uses"
        self._uses[weight] -= 1
        self._left[slot.bucket] -= 1
        while self._is_last and len(self._works) < len(self._left) and self._left[len(self._works)] == 0:
            self._works.append(self._comm.all_reduce_async(self._buckets[len(self._works)].flat))

    def finish(self) -> None:
        """Wait for the reductions: `flat` is then the sum over ranks and micro-steps. Raises PeerLostError."""
        assert self._is_last
        assert not any(self._left), "a parameter got no gradient in this step"
        for work in self._works:
            work.wait()
        self._works.clear()

    def close(self) -> None:
        """Let go of the model; reductions under way are left to the process group's end."""
        for hook in self._hooks:
            hook.remove()
        self._works.clear()

    def _take(self, parameter: Tensor) -> None:
        """Gradients that autograd itself accumulates (norms) come this way; for the others the hook sees None."""
        if parameter.grad is None:
            return
        add_or_copy(parameter.grad, *self.target(parameter))
        parameter.grad = None
        self.ready(parameter)


def _lay_out(
    order: list[tuple[str, Tensor, int]], bucket_bytes: int
) -> tuple[dict[Tensor, _Slot], list[_Bucket], Tensor]:
    """Slots by parameter, buckets, and the flat buffer [elements], which starts as zeros (gaps stay zero)."""
    dtype = gradient_dtype(order[0][1].dtype)
    starts, ends, numbers = [], [0], []
    begin = 0
    for _, parameter, _ in order:
        if (ends[-1] - begin) * dtype.itemsize >= bucket_bytes and ends[-1] > begin:
            begin = ends[-1]
        starts.append(ends[-1])
        numbers.append(begin)
        ends.append(ends[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT)
    flat = torch.zeros(ends[-1], dtype=dtype, device=order[0][1].device)
    begins = sorted(set(numbers))
    slots = {
        p: _Slot(name, flat[start : start + p.numel()].view(p.shape), uses, begins.index(number))
        for (name, p, uses), start, number in zip(order, starts, numbers, strict=True)
    }
    buckets = [
        _Bucket(flat[begin:end], sum(s.uses for s in slots.values() if s.bucket == i))
        for i, (begin, end) in enumerate(zip(begins, [*begins[1:], ends[-1]], strict=True))
    ]
    return slots, buckets, flat
