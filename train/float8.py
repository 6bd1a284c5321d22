"""Matrix products of the blocks in float8, through torchao: inputs, weights and output gradients are scaled and cast
anew in every pass; weights, activations and what is accumulated stay as they are.

Owns: which layers, what a device must have, and the bridge to torchao's layer. Nothing here is imported unless
`precision.fp8` asks for it. Output layer, router and experts are left out: they are where range matters, or small.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..conf.schema import Fp8
from .linear import WeightGradients
from .model.attention import Attention
from .model.feedforward import FeedForward

_CAPABILITY = {Fp8.tensorwise: (8, 9), Fp8.rowwise: (9, 0)}  # Ada and Hopper; by row only from Hopper on


def use_float8(blocks: Iterable[nn.Module], kind: Fp8, device: torch.device) -> None:
    """In place. Weight gradients of these layers are formed at once, by autograd.

    Raises ValueError: what the device or the environment lacks.
    """
    _check_device(kind, device)
    _convert(blocks, Products(kind))


def _convert(blocks: Iterable[nn.Module], products: Products) -> None:
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Attention | FeedForward):
                module.queue = WeightGradients(product=products)


class Products:
    """x @ weight.T in float8, differentiable in both, for any of the weights it is called with."""

    def __init__(self, kind: Fp8, emulate: bool = False) -> None:
        """emulate: with float8's digits and without its matrix units, on any device. Raises ValueError: no torchao."""
        try:
            self._torchao: Any = importlib.import_module("torchao.float8")
        except ImportError as e:
            raise ValueError(
                f"precision.fp8={kind.value} needs the package torchao (pip install torchao): {e}; install it, or set "
                "precision.fp8=none"
            ) from e
        self._config = replace(self._torchao.Float8LinearConfig.from_recipe_name(kind.value), emulate=emulate)
        self._layers: dict[Tensor, nn.Module] = {}

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [..., I], weight: a parameter [O, I], to [..., O]; all bfloat16."""
        layer = self._layers.get(weight)
        if layer is None:
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            plain.weight = weight
            layer = self._layers[weight] = self._torchao.convert_to_float8_training(plain, config=self._config)
        return layer(x)


def _check_device(kind: Fp8, device: torch.device) -> None:
    needed = _CAPABILITY[kind]
    text = f"precision.fp8={kind.value} needs a GPU of compute capability {needed[0]}.{needed[1]} or more"
    if device.type != "cuda":
        raise ValueError(f"{text}, and this run is on {device.type}; set precision.fp8=none")
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{text}, and {name} has {found[0]}.{found[1]}; set precision.fp8=none")
