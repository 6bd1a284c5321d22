"""torch.compile for the blocks of a model, each by itself: small graphs, one compilation for all blocks of one shape.

Owns: what is compiled. Under the compiler linear layers leave their weight gradients to autograd (linear.project).
Nothing here is imported, and no compiler loaded, unless `kernels.compile` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from .model.block import Block


def compile_blocks(blocks: Iterable[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """In place. A block is one graph, or it fails: nothing falls back to running eagerly in silence.

    Only the forward method is replaced, so that what others hook onto calls of the module stays outside of the graph.
    The first block without a branch before it, and passes without gradients, are compiled separately.
    """
    forward = torch.compile(Block.forward, fullgraph=True, dynamic=False, backend=backend)
    for block in blocks:
        assert isinstance(block, Block)
        block.forward = MethodType(forward, block)  # type: ignore[method-assign]
