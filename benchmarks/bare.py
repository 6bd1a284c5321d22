"""The bare PyTorch loop that our step is measured against: what a good engineer writes for one job.

torch's own fused pieces; no accumulation, no checkpoints, no metrics beyond the loss. Its model has the mathematics of
ours; `Loop` has a way for each precision that such a loop would use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from stoker.conf.schema import Config, ModelConfig
from stoker.train.init import initial_value
from stoker.train.params import decoder_table
from torch import Tensor, nn

MODEL = ModelConfig(
    vocab_size=8192, hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, ffn_size=768, tied_embeddings=False
)
BATCH, LENGTH, LR = 8, 256, 3e-4


class BareBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        width = c.hidden_size // c.num_heads
        self.heads, self.kv_heads, self.width, self.eps = c.num_heads, c.num_kv_heads, width, c.norm_eps
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(c.hidden_size)) for _ in range(2))
        self.wq = nn.Linear(c.hidden_size, c.num_heads * width, bias=False)
        self.wk = nn.Linear(c.hidden_size, c.num_kv_heads * width, bias=False)
        self.wv = nn.Linear(c.hidden_size, c.num_kv_heads * width, bias=False)
        self.wo = nn.Linear(c.num_heads * width, c.hidden_size, bias=False)
        self.gate = nn.Linear(c.hidden_size, c.ffn_size, bias=False)
        self.up = nn.Linear(c.hidden_size, c.ffn_size, bias=False)
        self.down = nn.Linear(c.ffn_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, s, d = x.shape
        h = F.rms_norm(x, (d,), self.norm1, self.eps)
        q = rotate(self.wq(h).view(n, s, self.heads, self.width).transpose(1, 2), cos, sin)
        k = rotate(self.wk(h).view(n, s, self.kv_heads, self.width).transpose(1, 2), cos, sin)
        v = self.wv(h).view(n, s, self.kv_heads, self.width).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(out.transpose(1, 2).reshape(n, s, -1))
        h = F.rms_norm(x, (d,), self.norm2, self.eps)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class BareModel(nn.Module):
    def __init__(self, c: ModelConfig, length: int = LENGTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(BareBlock(c) for _ in range(c.num_layers))
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.eps = c.norm_eps
        width = c.hidden_size // c.num_heads
        angle = torch.outer(torch.arange(length), c.rope_theta ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("cos", torch.cat((angle.cos(), angle.cos()), -1))
        self.register_buffer("sin", torch.cat((angle.sin(), angle.sin()), -1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(F.rms_norm(x, x.shape[-1:], self.norm, self.eps))


def initial_weights(c: ModelConfig = MODEL) -> dict[str, Tensor]:
    """Those that our model begins with, by the bare model's names."""

    def name(ours: str) -> str:
        if not ours.startswith("blocks."):
            return ours if ours == "norm" else f"{ours}.weight"
        _, layer, part, leaf = ours.split(".")
        short = {"norm": "norm1" if part == "attention" else "norm2"}.get(leaf, f"{leaf}.weight")
        return f"blocks.{layer}.{short}"

    return {name(facts.name): initial_value(facts, Config().seed) for facts in decoder_table(c)}


class BareLoop:
    """float32; or bfloat16 by `autocast` over float32 weights, or with `masters`: bfloat16 weights and gradients, and
    float32 copies of both for clipping and update. compiled: each block by itself."""

    def __init__(
        self,
        initial: dict[str, Tensor],
        samples: Callable[[], np.ndarray],
        precision: str = "float32",
        compiled: bool = False,
        model: ModelConfig = MODEL,
        length: int = LENGTH,
    ) -> None:
        self.model, self.samples, self.precision = BareModel(model, length), samples, precision
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(initial[name])
        self.masters: list[Tensor] | None = None
        if precision == "masters":
            self.model.to(torch.bfloat16)
            self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        for block in self.model.blocks if compiled else ():
            block.compile(fullgraph=True, dynamic=False)
        self.updated = self.masters or list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.updated, LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)

    def step(self, micro_batches: int = 1) -> float:
        rows = torch.from_numpy(self.samples().astype(np.int64))
        total = 0.0
        for part in rows.chunk(micro_batches):
            with torch.autocast("cpu", torch.bfloat16) if self.precision == "autocast" else nullcontext():
                logits = self.model(part[:, :-1])
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), part[:, 1:].reshape(-1)) / micro_batches
            loss.backward()
            total += loss.item()
        self.update()
        return total

    @torch.no_grad()
    def update(self) -> None:
        weights = list(self.model.parameters())
        if self.masters is not None:
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in weights])
        torch.nn.utils.clip_grad_norm_(self.updated, 1.0)
        self.optimizer.step()
        if self.masters is not None:
            torch._foreach_copy_(weights, self.masters)
        self.model.zero_grad()
