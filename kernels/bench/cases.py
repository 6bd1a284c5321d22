"""The ops at the sizes of one layer of Llama 3 8B on one GPU, and at sizes a CPU can emulate.

A row here is what makes an op measured: forward, backward if it has one, and against float64 before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..attention import chunked_attention
from ..rope import rope_cos_sin
from ..rounding import RoundingAddress
from .case import Case, Function, Maker, widened

EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """sequences x length tokens; `logits`: tokens whose logits exist at once; elements: of the optimizer's tensors."""

    sequences: int
    length: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    classes: int
    logits: int
    elements: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


LARGE = Sizes(2, 4096, 4096, 32, 8, 128, 14336, 128256, 4096, 2**28)
SMALL = Sizes(1, 24, 64, 4, 2, 16, 96, 500, 24, 10_000)


def cases(sizes: Sizes) -> tuple[Case, ...]:
    """All of them."""
    parts = (_norms, _pointwise, _attention, _losses, _products, _experts, _float8, _optimizer)
    return tuple(case for part in parts for case in part(sizes))


def _norms(s: Sizes) -> Iterator[Case]:
    def rows(m: Maker) -> list[Any]:
        return [m.normal(s.tokens, s.hidden), 1 + m.normal(s.hidden, scale=0.1)]

    def heads(m: Maker) -> list[Any]:
        return [m.normal(s.sequences, s.length, s.heads, s.head), 1 + m.normal(s.head, scale=0.1)]

    def alone(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        return (op(v[0], v[1], EPS),)

    def summed(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        y, total = op(v[0], v[1], EPS, v[2])
        return y, total

    size, of_heads = f"{s.tokens} x {s.hidden}", f"{s.tokens * s.heads} x {s.head}"
    yield Case(
        "rmsnorm", f"{size}, residual", lambda m: [*rows(m), m.normal(s.tokens, s.hidden)], summed, (0, 1), (0, 1)
    )
    yield Case("rmsnorm", size, rows, alone, (0, 1), (0, 1))
    yield Case("rmsnorm", f"{of_heads}, queries", heads, alone, (0, 1), (0, 1))
    yield Case(
        "layernorm",
        size,
        lambda m: [*rows(m), m.normal(s.hidden, scale=0.1)],
        lambda op, v: (op(v[0], v[1], v[2], EPS),),
        (0, 1, 2),
        (0, 1),
    )


def _pointwise(s: Sizes) -> Iterator[Case]:
    def rotary(m: Maker) -> list[Any]:
        q = m.normal(s.sequences, s.length, s.heads, s.head)
        k = m.normal(s.sequences, s.length, s.kv_heads, s.head)
        positions = torch.arange(s.length, device=m.device).expand(s.sequences, -1)
        frequencies = 500_000.0 ** -(torch.arange(0, s.head, 2, device=m.device) / s.head)
        return [q, k, *rope_cos_sin(positions, frequencies, dtype=m.dtype), positions, frequencies]

    def gated(m: Maker) -> list[Any]:
        return [m.normal(s.tokens, s.ffn), m.normal(s.tokens, s.ffn)]

    heads = f"{s.tokens} x ({s.heads} + {s.kv_heads}) x {s.head}"
    for layout, interleaved in (("halves", False), ("interleaved", True)):
        yield Case("rope", f"{heads}, {layout}", rotary, _rotate(interleaved), (0, 1))
    for op in ("swiglu", "geglu"):
        yield Case(op, f"{s.tokens} x {s.ffn}", gated, lambda f, v: (f(v[0], v[1]),), (0, 1), (0, 1))
    yield Case("gelu", f"{s.tokens} x {s.ffn}", lambda m: gated(m)[:1], lambda f, v: (f(v[0]),), (0,), (0,))

    def rows(m: Maker) -> list[Any]:
        return [m.normal(s.tokens, s.hidden), torch.arange(s.tokens, device=m.device)]

    # The gradient's mask is drawn again from the rows' numbers.
    yield Case(
        "dropout", f"{s.tokens} x {s.hidden}, 0.1", rows, lambda f, v: (f(v[0], 0.1, 1234, 7, 1, v[1]),), (0,), (1,)
    )


def _rotate(interleaved: bool) -> Callable[[Function, list[Any]], tuple[Tensor, ...]]:
    def call(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        q, k, cos, sin, positions, frequencies = v
        return tuple(op(q, k, positions, frequencies, interleaved=interleaved, cos_sin=(cos, sin)))

    return call


def _attention(s: Sizes) -> Iterator[Case]:
    """One document per row, and eight of equal length packed into each."""

    def inputs(m: Maker) -> list[Any]:
        return [m.normal(s.sequences, s.length, heads, s.head) for heads in (s.heads, s.kv_heads, s.kv_heads)]

    def packed(m: Maker) -> list[Any]:
        numbers = torch.arange(s.length, device=m.device) // (s.length // documents)
        return [*inputs(m), numbers.expand(s.sequences, -1).contiguous()]

    def exactly(v: list[Any]) -> tuple[Tensor, ...]:
        # By chunks: torch's own attention holds all scores at once in float64.
        return chunked_attention(v[0], v[1], v[2], v[3] if len(v) > 3 else None, None, None, None)[:1]

    documents, size = 8, f"{s.sequences} x {s.length} x ({s.heads} + {s.kv_heads}) x {s.head}"
    # Two products forwards and five backwards, of half of the scores.
    product = s.sequences * s.heads * s.length**2 * s.head
    for title, make, share in ((size, inputs, 1), (f"{size}, {documents} documents", packed, documents)):
        forwards, backwards = 2 * product // share, 5 * product // share
        call = lambda f, v: (f(*v),)  # noqa: E731
        # Fused attention rounds probabilities and partial gradients: of 2,000 draws the worst was at 2.1 times.
        yield Case("attention", title, make, call, (0, 1, 2), (), exactly, (), forwards, backwards, slack=4.0)


def _products(s: Sizes) -> Iterator[Case]:
    def inputs(m: Maker) -> list[Any]:
        total = m.normal(s.ffn, s.hidden, dtype=torch.float32)
        return [total, m.normal(s.tokens, s.ffn, scale=s.tokens**-0.5), m.normal(s.tokens, s.hidden)]

    def added(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        op(*v, True)
        return (v[0],)

    title, flops = f"{s.ffn} x {s.hidden} of {s.tokens} tokens", 2 * s.tokens * s.ffn * s.hidden
    yield Case("weight_gradient", f"{title}, to float32", inputs, added, in_place=(0,), flops=flops)


def _experts(s: Sizes) -> Iterator[Case]:
    """Mixtral's 8 experts of which 2 are chosen, and a router of 256 with 8."""

    def plan(m: Maker) -> list[Any]:
        choice = m.normal(s.tokens, 8, dtype=torch.float32).argsort(1)[:, :2].contiguous()
        return list(reference.moe_sort(choice, 8)[:2])

    def unsorted(m: Maker) -> list[Any]:
        return [m.normal(s.tokens, s.hidden), *plan(m)]

    def weighted(m: Maker) -> list[Any]:
        return [m.normal(2 * s.tokens, s.hidden), *plan(m), m.normal(s.tokens, 2, dtype=torch.float32)]

    def sort(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        return tuple(op(v[0], 8))

    def scores(m: Maker) -> list[Any]:
        return [m.normal(s.tokens, 256, dtype=torch.float32).sigmoid_(), m.normal(256, dtype=torch.float32, scale=0.1)]

    size = f"{s.tokens} x {s.hidden}"
    yield Case("moe_topk", f"{s.tokens} x 256, 8 chosen", scores, lambda f, v: (f(v[0], 8, v[1], True)[1],), (0,), (0,))
    yield Case("moe_sort", f"{s.tokens} x 2", lambda m: [m.integers(8, s.tokens, 2)], sort)
    yield Case("moe_permute", f"{size}, 2 each", unsorted, lambda f, v: (f(v[0], v[1], v[2]),), (0,))
    yield Case("moe_unpermute", f"{size}, 2 each", weighted, lambda f, v: (f(*v),), (0, 3), (0, 3))


def _float8(s: Sizes) -> Iterator[Case]:
    def inputs(m: Maker) -> list[Any]:
        return [m.normal(s.tokens, s.hidden)]

    def bytes_and_scale(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        values, scale, turned = op(v[0], torch.float8_e4m3fn, True)
        return values.view(torch.uint8), turned.view(torch.uint8), scale

    def exactly(v: list[Any]) -> tuple[Tensor, ...]:
        return bytes_and_scale(reference.quantize_fp8, v)

    # Of equal bits; float64 is not what it is about.
    yield Case(
        "quantize_fp8",
        f"{s.tokens} x {s.hidden}, and transposed",
        inputs,
        bytes_and_scale,
        exact=exactly,
        tolerance=1e-7,
    )


def _losses(s: Sizes) -> Iterator[Case]:
    def logits(m: Maker) -> list[Any]:
        return [m.normal(s.logits, s.classes, scale=4.0), m.integers(s.classes, s.logits)]

    def shard(m: Maker) -> list[Any]:
        values, targets = logits(m)
        return [values, targets, values.float().logsumexp(-1), m.normal(s.logits, dtype=torch.float32)]

    def head(m: Maker) -> list[Any]:
        x, weight = m.normal(s.tokens, s.hidden), m.normal(s.classes, s.hidden, scale=s.hidden**-0.5)
        return [x, weight, m.integers(s.classes, s.tokens)]

    size = f"{s.logits} x {s.classes}"
    yield Case("cross_entropy", size, logits, lambda f, v: (f(v[0], v[1], -100, 1e-4),), (0,), (0, 1))
    yield Case("cross_entropy_stats", size, logits, lambda f, v: tuple(f(v[0], v[1])))
    yield Case("cross_entropy_grad", size, shard, lambda f, v: (f(*v),))
    yield Case(
        "linear_cross_entropy",
        f"{s.tokens} x {s.hidden} x {s.classes}",
        head,
        # The promise is what the trainer gives: gradients are formed on the way forward.
        lambda f, v: (f(v[0], v[1], v[2], token_grad=1.0).sum(),),
        (0, 1),
        flops=6 * s.tokens * s.hidden * s.classes,
    )


def _optimizer(s: Sizes) -> Iterator[Case]:
    lengths = [s.elements // 2, s.elements // 4, s.elements // 8, *[s.elements // 128] * 16]

    def state(m: Maker) -> list[Any]:
        masters = [m.normal(n, dtype=torch.float32, scale=0.02) for n in lengths]
        averages = [m.normal(n, dtype=torch.float32, scale=1e-3) for n in lengths]
        squares = [a.square() for a in averages]
        return [
            [w.to(m.dtype) for w in masters],
            [m.normal(n, scale=1e-3) for n in lengths],
            averages,
            squares,
            masters,
        ]

    def step(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        params, grads, averages, squares, masters = v
        op(params, grads, averages, squares, masters, 1e-3, 0.9, 0.95, 1e-8, 0.1, 100, 0.5)
        return tuple(masters[0:1] + params[0:1])

    def exact_step(v: list[Any]) -> tuple[Tensor, ...]:
        _, grads, averages, squares, masters = widened(v)
        reference.adamw(masters, grads, averages, squares, None, 1e-3, 0.9, 0.95, 1e-8, 0.1, 100, 0.5)
        return masters[0], masters[0]

    count = f"{sum(lengths)} elements in {len(lengths)} tensors"
    yield Case("adamw", f"{count}, float32 masters", state, step, exact=exact_step, in_place=(0, 2, 3, 4))
    yield Case(
        "l2norm",
        count,
        lambda m: [[m.normal(n) for n in lengths]],
        lambda f, v: (f(v[0]),),
        tolerance=1e-6,
    )
    yield from _copies(s)


def _copies(s: Sizes) -> Iterator[Case]:
    """What an optimizer moves besides."""
    rows, columns = s.elements // 2 // 1024 or 1, 1024
    where = RoundingAddress(1, 1, 1, (0, 0), (rows, columns))
    size = f"2 x {rows} x {columns}"

    def wide(m: Maker) -> list[Tensor]:
        return [m.normal(rows, columns, dtype=torch.float32) for _ in range(2)]

    def scaled(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        op(v[0], 0.37)
        return tuple(v[0])

    def copied(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        targets = [torch.empty_like(t, dtype=torch.bfloat16) for t in v[0]]
        op(targets, v[0])
        return tuple(targets)

    def rounded(op: Function, v: list[Any]) -> tuple[Tensor, ...]:
        targets = [torch.empty_like(t, dtype=torch.bfloat16) for t in v[0]]
        op(targets, v[0], [where, where])
        return tuple(targets)

    yield Case("scale", size, lambda m: [[m.normal(rows, columns) for _ in range(2)]], scaled, in_place=(0,))
    same = lambda v: tuple(widened(v)[0])  # noqa: E731
    yield Case("cast_copy", f"{size}, to bfloat16", lambda m: [wide(m)], copied, exact=same, tolerance=2.0**-8)
    yield Case("stochastic_round", size, lambda m: [wide(m)], rounded, exact=same, tolerance=2.0**-7)
