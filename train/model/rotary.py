"""Rotary position embedding: its frequencies (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-2i / E), float32 [E / 2] (section 3.2.2)."""
    return theta ** -(torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
