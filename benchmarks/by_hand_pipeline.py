"""1F1B over a few ranks as one writes it for one job: sends that go on by themselves, receives that wait.

The stages are cut as ours are; gradients are accumulated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bare import BATCH, LENGTH, BareBlock
from stoker.conf.schema import ModelConfig
from stoker.train.parallel.stages import StageSpec
from torch import Tensor, nn

MICRO = 4


class Stage(nn.Module):
    def __init__(self, c: ModelConfig, spec: StageSpec) -> None:
        super().__init__()
        if spec.is_first:
            self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleDict({str(i): BareBlock(c) for i in spec.layers})
        if spec.is_last:
            self.norm = nn.Parameter(torch.ones(c.hidden_size))
            self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.spec, self.eps = spec, c.norm_eps
        width = c.hidden_size // c.num_heads
        angle = torch.outer(torch.arange(LENGTH), c.rope_theta ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("cos", torch.cat((angle.cos(), angle.cos()), -1))
        self.register_buffer("sin", torch.cat((angle.sin(), angle.sin()), -1))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The stream, or in the last stage this micro-batch's share of the mean loss."""
        if self.spec.is_first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, self.cos, self.sin)
        if not self.spec.is_last:
            return x
        logits = self.head(F.rms_norm(x, x.shape[-1:], self.norm, self.eps))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1)) / MICRO


class PipelineLoop:
    """`load` fills the model with the initial weights, `finish` clips and updates it, given its squared norm."""

    def __init__(
        self, c: ModelConfig, spec: StageSpec, ranks: int, samples: Callable[[], Any], load: Any, finish: Any
    ) -> None:
        self.model, self.samples, self.ranks, self.rank = Stage(c, spec), samples, ranks, spec.index
        self.shape = (BATCH // MICRO, LENGTH, c.hidden_size)
        load(self.model)
        self.update = finish(self.model)

    def step(self) -> float:
        rows = torch.from_numpy(self.samples().astype(np.int64)).chunk(MICRO)
        warm, waiting, sends, total = self.ranks - self.rank - 1, [], [], torch.zeros(())
        for i in range(MICRO + warm):
            if i < MICRO:
                x = rows[i][:, :-1]
                if self.rank > 0:
                    x = self.receive(self.rank - 1).requires_grad_()
                y = self.model(x, rows[i][:, 1:])
                waiting.append((x, y))
                if self.rank < self.ranks - 1:
                    sends.append(dist.isend(y.detach(), self.rank + 1))
                else:
                    total += y.detach()
            if i >= warm:
                x, y = waiting.pop(0)
                y.backward(None if self.rank == self.ranks - 1 else self.receive(self.rank + 1))
                if self.rank > 0:
                    sends.append(dist.isend(x.grad, self.rank - 1))
        for work in sends:
            work.wait()
        square = torch.stack([n.square() for n in torch._foreach_norm([p.grad for p in self.model.parameters()])]).sum()
        sums = torch.stack([square, total])
        dist.all_reduce(sums)
        self.update(sums[0].sqrt())
        return sums[1].item()

    def receive(self, source: int) -> Tensor:
        x = torch.empty(self.shape)
        dist.recv(x, source)
        return x
