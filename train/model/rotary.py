"""Rotary frequencies: by what angles positions turn, stretched to contexts longer than those of the first training.

Owns: the frequencies of each kind of layer, and their cosines and sines for one batch. The rotation is kernels/rope's.

Shapes: B rows, S positions, E features per head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...conf.schema import ModelConfig, Positions, RopeScaling
from ...kernels.rope import rope_cos_sin
from ..params import head_dim, layer_window


class Rotation(NamedTuple):
    """What the rotation of one batch needs, for one kind of layer."""

    frequencies: Tensor  # float32 [E / 2]
    factor: float  # of cosines and sines
    cos_sin: tuple[Tensor, Tensor]  # [B, S, E / 2] each


class Rotary:
    """The frequencies of a model's layers: one kind for all of them, or a second one for those with a window.

    Frequencies are formed on the CPU, so that every device turns by the same angles, and kept for each device.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._kinds = _kinds(config)
        self._on_device: dict[torch.device, list[tuple[Tensor, float]]] = {}

    def rotations(self, positions_BS: Tensor, dtype: torch.dtype) -> list[Rotation]:
        """For queries and keys of a dtype, per kind of layer: `kind_of` says which is whose."""
        found = self._on_device.get(positions_BS.device)
        if found is None:
            made = (inverse_frequencies(self.config, is_local) for is_local in self._kinds)
            found = [(frequencies.to(positions_BS.device), factor) for frequencies, factor in made]
            self._on_device[positions_BS.device] = found
        return [Rotation(f, factor, rope_cos_sin(positions_BS, f, factor, dtype)) for f, factor in found]


def kind_of(config: ModelConfig, layer: int) -> int | None:
    """Which of `rotations` is a layer's; None for a model without rotary embedding."""
    kinds = _kinds(config)
    return kinds.index(_is_local(config, layer)) if kinds else None


def _kinds(config: ModelConfig) -> list[bool]:
    """The values of `is_local` that occur in the whole model."""
    if config.positions is not Positions.rope:
        return []
    return sorted({_is_local(config, layer) for layer in range(config.num_layers)})


def _is_local(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has frequencies of its own for its window."""
    return config.rope_theta_local is not None and layer_window(config, layer) is not None


def inverse_frequencies(config: ModelConfig, is_local: bool = False) -> tuple[Tensor, float]:
    """(float32 [E / 2] on the CPU, factor of cosines and sines).

    Unscaled: theta^(-2i / E) (Su et al. 2021, arXiv:2104.09864, section 3.2.2). is_local: of a layer with a window, if
    those have a base of their own; it is not scaled, since a window does not grow with the context (Gemma 3).
    """
    width = head_dim(config)
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    if is_local and config.rope_theta_local is not None:
        return 1.0 / config.rope_theta_local**exponents, 1.0
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is RopeScaling.linear:
        return frequencies / config.rope_factor, 1.0
    if config.rope_scaling is RopeScaling.llama3:
        return _llama3(frequencies, config), 1.0
    if config.rope_scaling is RopeScaling.yarn:
        # Attention becomes sharper with the square of this factor (Peng et al. 2023, section 3.4).
        return _yarn(frequencies, config), 0.1 * math.log(config.rope_factor) + 1.0
    return frequencies, 1.0


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a straight line between (Llama 3.1's published code)."""
    turns = config.rope_original_length * frequencies / (2 * math.pi)  # within the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / config.rope_factor + kept * frequencies


def _yarn(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """The same with a line over the numbers of the features (Peng et al. 2023, arXiv:2309.00071, section 3.2), whose
    ends are rounded outwards, as in the authors' code."""
    width = 2 * len(frequencies)

    def feature_that_turns(times: float) -> float:
        ratio = config.rope_original_length / (2 * math.pi * times)
        return width * math.log(ratio) / (2 * math.log(config.rope_theta))

    first = max(math.floor(feature_that_turns(config.rope_beta_fast)), 0)
    last = min(math.ceil(feature_that_turns(config.rope_beta_slow)), width - 1)
    # A step rather than a division by zero where both ends meet.
    length = last - first if last != first else 0.001
    scaled = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / length).clamp(0.0, 1.0)
    return frequencies / config.rope_factor * scaled + frequencies * (1 - scaled)
