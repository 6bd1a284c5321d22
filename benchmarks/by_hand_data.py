"""Data parallelism by hand, for parallel.py: torch's DistributedDataParallel, and ZeRO-1 with one flat buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bare import LR, MODEL, BareModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Samples = Callable[[], "np.ndarray[Any, Any]"]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)


def own_rows(samples: Samples) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of this rank's share of a batch."""
    rows = torch.from_numpy(samples().astype(np.int64)).chunk(dist.get_world_size())[dist.get_rank()]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, samples: Samples) -> Tensor:
    tokens, targets = own_rows(samples)
    return F.cross_entropy(model(tokens).view(-1, MODEL.vocab_size), targets.reshape(-1))


def mean_over_ranks(loss: Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


class DdpLoop:
    def __init__(self, initial: Callable[[nn.Module], None], samples: Samples) -> None:
        model = BareModel(MODEL)
        initial(model)
        self.model, self.samples, self.optimizer = DistributedDataParallel(model), samples, adamw(model.parameters())

    def step(self) -> float:
        loss = loss_of(self.model, self.samples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss)


class Zero1Loop:
    """Weights and gradients lie in one buffer each; a rank's shard is one piece of it, wherever that ends."""

    def __init__(self, initial: Callable[[nn.Module], None], samples: Samples) -> None:
        self.model, self.samples = BareModel(MODEL), samples
        initial(self.model)
        parameters, size = list(self.model.parameters()), dist.get_world_size()
        length = -(-sum(p.numel() for p in parameters) // size)
        self.weights, self.grads = torch.zeros(size * length), torch.zeros(size * length)
        begin = 0
        for p in parameters:
            place = slice(begin, begin + p.numel())
            self.weights[place] = p.detach().flatten()
            p.data, p.grad = self.weights[place].view(p.shape), self.grads[place].view(p.shape)
            begin += p.numel()
        self.shard = nn.Parameter(self.weights[dist.get_rank() * length : (dist.get_rank() + 1) * length])
        self.shard.grad = torch.zeros(length)
        self.optimizer = adamw([self.shard])

    def step(self) -> float:
        loss = loss_of(self.model, self.samples)
        loss.backward()
        grad = self.shard.grad
        assert grad is not None
        dist.reduce_scatter_single(grad, self.grads)
        grad /= dist.get_world_size()
        square = grad.square().sum()
        dist.all_reduce(square)
        grad.mul_((1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        dist.all_gather_single(self.weights, self.shard.detach())
        self.grads.zero_()
        return mean_over_ranks(loss)
