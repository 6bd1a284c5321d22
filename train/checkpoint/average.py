"""`stoker checkpoint average`: the mean of several checkpoints' weights, as a weights-only checkpoint.

Owns: the choice of checkpoints, that they are of one model, and the mean: in float64, of the float32 masters where all
have them, rounded once to the type that the model has. Source: https://arxiv.org/abs/1803.05407 (averaging weights).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...launcher.run.chosen import NOTATION, find_checkpoint, is_checkpoint, run_at
from ...launcher.run.verdict_note import newest_valid
from ..hf.exporting import LENGTH, copy_companions, trained_length
from ..storage.new_directory import new_directory
from .bar import Bar
from .reading import Checkpoint, open_checkpoint
from .weights import MODEL, Origin, Weight, write_weights

EPILOG = """examples:
  stoker checkpoint average llama-261130-104733-x7q2 --last 5 --out averaged
  stoker checkpoint average RUN:9000 RUN:9500 RUN:10000 --out averaged --json
The result is what model.init_from=averaged begins with, and `stoker checkpoint export` exports."""
_MASTER = "optim/master/"
_CHUNK = 16 * 1024 * 1024  # bytes of one; copies in float64 are made of it
_SHOWN = 5  # differences that a message names

Progress = Callable[[int], object]  # called with bytes of float64 that have been added up since


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "stoker checkpoint average",
        description="Average the weights of several checkpoints of one model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("what", nargs="+", metavar="RUN|CHECKPOINT", help=NOTATION)
    p.add_argument("--last", type=int, metavar="K", help="of one RUN the K newest valid ones")
    p.add_argument("--out", type=Path, metavar="DIR", required=True, help="the new checkpoint's directory")
    p.add_argument("--json", action="store_true", help="print what was made as JSON")
    arguments = p.parse_intermixed_args(argv)
    chosen = choose(arguments.what, arguments.last)
    with ExitStack() as stack, Bar("average") as bar:
        opened = [stack.enter_context(open_checkpoint(d)) for d in chosen]
        total = len(opened) * sum(8 * t.numel for name, t in opened[0].tensors.items() if name.startswith(MODEL))
        average(opened, arguments.out, lambda count: bar.advance(count, total))
    if arguments.json:
        print(json.dumps({"out": str(arguments.out), "averaged": [str(d) for d in chosen]}))
    else:
        print(f"{arguments.out}: the mean of {', '.join(d.name for d in chosen)}")
    return 0


def choose(texts: Sequence[str], last: int | None) -> list[Path]:
    """The directories that are meant.

    Raises:
        ValueError: fewer than two, one of them twice, or not so many as asked for.
    """
    if last is None:
        found = [find_checkpoint(text) for text in texts]
    else:
        if last < 2:
            raise ValueError(f"--last {last}: expected at least 2")
        if len(texts) > 1 or is_checkpoint(Path(texts[0])):
            raise ValueError(f"--last {last}: expected one RUN beside it, found {' '.join(texts)}")
        run = run_at(texts[0])
        found = [run.checkpoint(name) for _, (name, _) in zip(range(last), newest_valid(run), strict=False)]
        if len(found) < last:
            raise ValueError(f"{run.checkpoints}: {len(found)} valid checkpoints, --last {last} asks for more")
    if len(found) < 2:
        raise ValueError(f"{found[0]}: one checkpoint has no mean; name several, or one RUN and --last K")
    if len(set(found)) < len(found):
        raise ValueError(f"{' '.join(texts)}: names a checkpoint twice")
    return found


def average(opened: Sequence[Checkpoint], out: Path, progress: Progress = lambda count: None) -> None:
    """Write the mean to the new directory `out`, with the tokenizer that an export needs.

    Raises:
        ValueError: they are not of one model (names the first differences), or `out` exists.
        OSError, InvalidCheckpointError: see `write_weights` and `Checkpoint`.
    """
    for other in opened[1:]:
        differences = list(unlike(opened[0], other))
        if differences:
            more = f" (and {len(differences) - _SHOWN} more)" if len(differences) > _SHOWN else ""
            raise ValueError(
                f"{other.directory.name} is of another model than {opened[0].directory.name}: "
                f"{'; '.join(differences[:_SHOWN])}{more}"
            )
    names = [name for name in opened[0].tensors if name.startswith(MODEL)]
    if not names:
        raise ValueError(f"{opened[0].directory}: has no weights (names that begin with {MODEL})")
    weights = [
        Weight(name, (t := opened[0].tensors[name]).dtype, t.shape, partial(_mean, opened, name, progress))
        for name in names
    ]
    newest, *rest = sorted(opened, key=lambda c: c.manifest.name, reverse=True)
    state: dict[str, Any] = {"averaged": [f"{c.manifest.run}/{c.manifest.name}" for c in opened]}
    lengths = [trained_length(c.directory, c.manifest.state) for c in (newest, *rest)]
    length = next((n for n in lengths if n is not None), None)
    state |= {} if length is None else {LENGTH: length}
    with new_directory(out) as unfinished:
        write_weights(unfinished, weights, newest.model, Origin(newest.manifest.run, newest.manifest.step, state))
        any(copy_companions(c.directory, unfinished) for c in (newest, *rest))  # of the first that has a tokenizer


def unlike(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Differences of their models: settings and weights."""
    # Where the weights came from does not change what they are.
    one, other = ({k: v for k, v in c.model.items() if k != "init_from"} for c in (a, b))
    for key in sorted({*one, *other}) if one and other else []:
        if one.get(key) != other.get(key):
            yield f"model.{key}: {other.get(key)} instead of {one.get(key)}"
    for name in sorted({n for n in {*a.tensors, *b.tensors} if n.startswith(MODEL)}):
        x, y = a.tensors.get(name), b.tensors.get(name)
        if x is None or y is None:
            yield f"{name}: only in {(a if y is None else b).directory.name}"
        elif (x.dtype, x.shape) != (y.dtype, y.shape):
            yield f"{name}: {y.dtype} {list(y.shape)} instead of {x.dtype} {list(x.shape)}"


def _mean(opened: Sequence[Checkpoint], name: str, progress: Progress) -> Iterator[Tensor]:
    """Rows of the mean, in order; one checkpoint's are in memory at a time."""
    t = opened[0].tensors[name]
    master = _MASTER + name.removeprefix(MODEL)
    source = master if all(master in c.tensors for c in opened) else name
    step = max(1, _CHUNK * t.rows // max(t.nbytes, 1))
    for first in range(0, t.rows if t.nbytes else 0, step):
        count = min(step, t.rows - first)
        rows = (c.read(source, first, count) for c in opened)
        yield _mean_of(rows, len(opened), progress).to(t.dtype) if t.dtype.is_floating_point else _same(name, rows)


def _mean_of(rows: Iterator[Tensor], count: int, progress: Progress) -> Tensor:
    total = next(rows).double()
    progress(total.nbytes)
    for other in rows:
        total += other
        progress(total.nbytes)
    return total / count


def _same(name: str, rows: Iterator[Tensor]) -> Tensor:
    first = next(rows)
    if any(not torch.equal(first, other) for other in rows):
        raise ValueError(f"{name}: {first.dtype} has no mean, and its values differ")
    return first
