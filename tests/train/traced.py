"""What the compiler traced of autograd.Functions: outputs that are known by more names than one.

Such an output gets no gradient on torch 2.11 (see `distinct` in kernels/numerics.py). Newer versions are right all the
same, but trace alike, so that the fault can be seen without the old one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx

tells_outputs = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="this torch's graphs do not tell outputs from what lies between; there, gradients show the fault itself",
)


class Traced:
    """A backend for torch.compile that runs graphs as they are. functions: how many autograd.Functions it has seen;
    ambiguous: `graph: output` of each output of theirs that has a second name."""

    def __init__(self) -> None:
        self.functions = 0
        self.ambiguous: list[str] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        for name, body in graph.named_children():
            if name.startswith("fwd_body"):
                assert isinstance(body, fx.GraphModule)
                self.functions += 1
                self.ambiguous += [f"{name}: {output}" for output in _ambiguous(body)]
        return graph.forward


def _ambiguous(body: fx.GraphModule) -> list[fx.Node]:
    (last,) = [node for node in body.graph.nodes if node.op == "output"]
    outputs, _ = last.args[0]  # and what it saves for the backward pass
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    held = (node.meta.get("example_value") for node in body.graph.nodes)
    names = Counter(id(value) for value in held if isinstance(value, Tensor))
    return [node for node in outputs if names[id(node.meta["example_value"])] > 1]
