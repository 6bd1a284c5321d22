"""`stoker checkpoint diff A B`: two checkpoints of any layouts, tensor by tensor, in bounded memory.

Owns: the comparison and its text. Equal means the same bits; layouts, times and places do not count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ...launcher.run.chosen import NOTATION, find_checkpoint
from .bar import Bar
from .reading import Checkpoint, Logical, model_settings, open_checkpoint

EPILOG = """examples:
  stoker checkpoint diff llama-261130-104733-x7q2:1000 llama-261130-104733-x7q2:2000
  stoker checkpoint diff before after --only 'model/*' --json
Exit code 0: the same tensors, bit for bit, and the same settings; 1: not; 2: they cannot be compared."""
_CHUNK = 16 * 1024 * 1024  # bytes of each; several copies in float64 are made of it
_MOST = 20  # lines of any list


@dataclass(frozen=True)
class Values:
    """How the values of one tensor differ."""

    name: str
    different: int  # values
    of: int
    max_abs: float  # NaN where one is NaN or infinite and the other is not the same
    max_rel: float  # relative to the larger one


@dataclass(frozen=True)
class Difference:
    """All differences of two checkpoints."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    kinds: dict[str, str]  # by name: `F32 [2, 3] / BF16 [2, 3]`
    values: tuple[Values, ...]  # of those that have one shape, largest first
    equal: int  # tensors that are the same, bit for bit
    settings: dict[str, list[Any]]  # by name: the two values
    progress: dict[str, list[Any]]  # likewise; does not count

    @property
    def is_none(self) -> bool:
        return not (self.only_a or self.only_b or self.kinds or self.values or self.settings)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "stoker checkpoint diff",
        description="Compare two checkpoints of any layouts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("a", metavar="A", help=NOTATION)
    p.add_argument("b", metavar="B")
    p.add_argument("--only", metavar="GLOB", default="*", help="tensors of these names")
    p.add_argument("--json", action="store_true", help="everything, as one JSON object")
    arguments = p.parse_intermixed_args(argv)
    places = [find_checkpoint(text) for text in (arguments.a, arguments.b)]
    with open_checkpoint(places[0]) as a, open_checkpoint(places[1]) as b, Bar("compare") as bar:
        found = compare(a, b, arguments.only, bar.advance)
    if arguments.json:
        print(json.dumps(_plain(found) | {"a": str(places[0]), "b": str(places[1]), "same": found.is_none}))
    else:
        print("\n".join([f"A: {places[0]}", f"B: {places[1]}", *text_of(found)]))
    return 0 if found.is_none else 1


def compare(
    a: Checkpoint, b: Checkpoint, only: str = "*", progress: Callable[[int, int], object] = lambda count, total: None
) -> Difference:
    """`progress(count, total)`: so many bytes more of all. Raises InvalidCheckpointError."""
    names = {which: {n for n in c.tensors if fnmatchcase(n, only)} for which, c in (("a", a), ("b", b))}
    both = sorted(names["a"] & names["b"])
    total = sum(a.tensors[n].nbytes + b.tensors[n].nbytes for n in both)
    kinds, values, equal = {}, [], 0
    for name in both:
        one, other = a.tensors[name], b.tensors[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            kinds[name] = f"{_kind(one)} / {_kind(other)}"
        if one.shape == other.shape:
            found = _values(a, b, name, lambda count: progress(count, total))
            if found.different:
                values.append(found)
            equal += not found.different and one.dtype == other.dtype
    values.sort(key=lambda v: (v.max_abs == v.max_abs, -v.max_abs))  # NaN first
    settings, state = _unlike(_settings(a), _settings(b)), _unlike(_progress(a), _progress(b))
    only_a, only_b = sorted(names["a"] - names["b"]), sorted(names["b"] - names["a"])
    return Difference(tuple(only_a), tuple(only_b), kinds, tuple(values), equal, settings, state)


def _kind(t: Logical) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def _values(a: Checkpoint, b: Checkpoint, name: str, progress: Callable[[int], object]) -> Values:
    one, other = a.tensors[name], b.tensors[name]
    different, max_abs, max_rel = 0, 0.0, 0.0
    rows = one.rows
    step = max(1, _CHUNK * rows // max(one.nbytes, other.nbytes, 1))
    for first in range(0, rows if one.nbytes else 0, step):
        count = min(step, rows - first)
        x, y = a.read(name, first, count), b.read(name, first, count)
        progress(x.nbytes + y.nbytes)
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        unlike, chunk_abs, chunk_rel = _distance(x, y)
        different += unlike
        max_abs, max_rel = _larger(max_abs, chunk_abs), _larger(max_rel, chunk_rel)
    return Values(name, different, one.numel, max_abs, max_rel)


def _bits(t: Tensor) -> Tensor:
    return t.flatten().view(torch.uint8)


def _distance(x: Tensor, y: Tensor) -> tuple[int, float, float]:
    """How many values are not the same, and the largest absolute and relative distance."""
    if x.dtype == y.dtype:  # 0.0 and -0.0 are two, a NaN and the same NaN one
        unlike = (_bits(x).view(-1, x.element_size()) != _bits(y).view(-1, y.element_size())).any(dim=1)
    else:
        unlike = (x.double() != y.double()).flatten()
    p, q = x.double().flatten()[unlike], y.double().flatten()[unlike]
    if not p.numel():
        return 0, 0.0, 0.0
    distance = (p - q).abs()
    larger = torch.maximum(p.abs(), q.abs())
    relative = torch.where(larger > 0, distance / larger, 0.0)
    return p.numel(), float(distance.max()), float(relative.max())  # max of torch gives NaN if there is one


def _larger(a: float, b: float) -> float:
    return b if b != b or b > a else a


def _settings(c: Checkpoint) -> dict[str, Any]:
    settings = c.manifest.state.get("settings")
    if isinstance(settings, Mapping):
        return dict(settings)
    return {f"model.{key}": value for key, value in model_settings(c.manifest.state).items()}


def _progress(c: Checkpoint) -> dict[str, Any]:
    return {k: v for k, v in c.manifest.state.items() if k not in ("settings", "model")}


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {k: [a.get(k), b.get(k)] for k in sorted({*a, *b}) if a.get(k) != b.get(k)}


def _plain(found: Difference) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    plain = asdict(found)
    for v in plain["values"]:
        for key in ("max_abs", "max_rel"):
            v[key] = v[key] if abs(v[key]) < float("inf") else None
    return plain


def text_of(found: Difference) -> list[str]:
    """For people."""
    lines = [f"{found.equal} tensors are the same, bit for bit"]
    lines += _listed("only in A", found.only_a)
    lines += _listed("only in B", found.only_b)
    lines += _listed("of other types or shapes", [f"{name}: {kind}" for name, kind in found.kinds.items()])
    told = [
        f"{v.name}: max abs {v.max_abs:.3e}, max rel {v.max_rel:.3e}, {v.different:,} of {v.of:,} values"
        for v in found.values
    ]
    lines += _listed("of other values, largest difference first", told)
    for title, pairs in (("settings", found.settings), ("progress (does not count)", found.progress)):
        lines += _listed(title, [f"{key}: {json.dumps(x)} / {json.dumps(y)}" for key, (x, y) in pairs.items()])
    return lines


def _listed(title: str, items: list[str] | tuple[str, ...]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - _MOST} more (--json has all)"] if len(items) > _MOST else []
    return [f"{len(items)} {title}:", *(f"  {item}" for item in items[:_MOST]), *more]
