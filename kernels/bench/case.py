"""What is measured: one op with inputs of one size. Owns how inputs are made and how much memory they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


@dataclass
class Maker:
    """Fresh inputs on a device. dtype: of activations. The same seed makes the same inputs."""

    device: torch.device
    dtype: torch.dtype
    seed: int

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normally distributed, standard deviation `scale`."""
        values = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(dtype or self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        """int64, 0 .. below - 1."""
        return torch.randint(below, shape, generator=self._generator, device=self.device)


@dataclass(frozen=True)
class Case:
    """title: sizes, for people. make: the op's tensors (lists for multi-tensor ops). call: the op on them; returns what
    is to be compared, first of all outputs that gradients can start from. gradients: positions of tensors that have
    one. reads: positions of the inputs that a backward pass cannot do without. exact: what is wanted, from the inputs,
    or where there are gradients from float64 copies of them; None: `call` with the reference on such copies. in_place:
    positions of what the op overwrites. flops, backward_flops: of either pass, 0: bound by memory; an op that forms
    its gradients on the way forward has them in `flops`. tolerance: of errors, in place of the dtype's. slack: how many
    times the dtype's, where implementations may round to it in between.
    """

    op: str
    title: str
    make: Callable[[Maker], list[Any]]
    call: Callable[[Function, list[Any]], tuple[Tensor, ...]]
    gradients: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    exact: Callable[[list[Any]], tuple[Tensor, ...]] | None = None
    in_place: tuple[int, ...] = ()
    flops: int = 0
    backward_flops: int = 0
    tolerance: float = 0.0
    slack: float = 1.0


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors, those in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(tensors_in(value))
    return found


def bytes_of(values: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(values))


def widened(values: Sequence[Any]) -> list[Any]:
    """Floating tensors as float64, copies; the rest as it is."""
    wide: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            wide.append(value.detach().double() if value.is_floating_point() else value)
        elif isinstance(value, list):
            wide.append(widened(value))
        else:
            wide.append(value)
    return wide


def forward_bytes(case: Case, inputs: list[Any], outputs: Sequence[Tensor]) -> int:
    """Least traffic: every input read once, every output written once, what is overwritten both."""
    return bytes_of(inputs) + (bytes_of(inputs[i] for i in case.in_place) if case.in_place else bytes_of(outputs))


def backward_bytes(case: Case, inputs: list[Any], outputs: Sequence[Tensor]) -> int:
    """Least traffic: outputs' gradients and `reads` read once, inputs' gradients written once."""
    return bytes_of(outputs) + bytes_of(inputs[i] for i in (*case.reads, *case.gradients))
