"""`stoker checkpoint show RUN|CHECKPOINT`: what one checkpoint is: layout, progress, settings, tensors.

Owns: reading manifest and index, and the layout of the text. Tensors' values are not read. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .checkpoint_look import checkpoint_at
from .checkpoint_ls import amount
from .errors import environment_error
from .run.chosen import NOTATION
from .run.index_bounds import Bounds
from .run.manifest import INDEX, LARGEST_SMALL, InvalidCheckpointError, Manifest, check_sizes, read_manifest
from .run.outcome import EXIT_FAILED, EXIT_FINISHED
from .run.retention import validation_of
from .run.verdict_note import read_note
from .run.verification import expanded, nbytes_of, parse_index
from .status import duration

EPILOG = """examples:
  stoker checkpoint show runs/llama-261130-104733-x7q2                     (its newest valid one)
  stoker checkpoint show llama-261130-104733-x7q2:1000 --tensors
  stoker checkpoint show runs/llama-.../checkpoints/step-00001000-a0001 --tensors 'model/*norm*' --json"""


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "stoker checkpoint show",
        description="Show what a checkpoint is.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("what", metavar="RUN|CHECKPOINT", help=NOTATION)
    p.add_argument("--tensors", nargs="?", const="*", metavar="GLOB", help="list the tensors (of these names)")
    p.add_argument("--json", action="store_true", help="one JSON object, for programs")
    arguments = p.parse_args(argv)
    directory = checkpoint_at(arguments.what)
    try:
        manifest = read_manifest(directory)
    except InvalidCheckpointError as e:
        raise environment_error(str(e)) from e
    tensors, bad_index = index_lines(directory, manifest)
    note = read_note(directory, manifest)
    problem = problem_of(directory, manifest) or bad_index or (note.problem if note is not None else None)
    verified = note.time if note is not None and note.problem is None else None
    chosen = [t for t in tensors if arguments.tensors is None or fnmatchcase(t["name"], arguments.tensors)]
    if arguments.json:
        listed = chosen if arguments.tensors is not None else None
        print(json.dumps(_as_json(directory, manifest, problem, verified, tensors, listed), allow_nan=False))
    else:
        print("\n".join(_text(directory, manifest, problem, verified, tensors)))
        if arguments.tensors is not None:
            table = ["their names lie with the bytes"] if manifest.location else _table(chosen)
            print("\n".join(["", *table]))
    return EXIT_FINISHED if problem is None else EXIT_FAILED


def problem_of(directory: Path, manifest: Manifest) -> str | None:
    """What is wrong with sizes and small files; None if nothing is."""
    try:
        check_sizes(directory, manifest)
    except InvalidCheckpointError as e:
        return str(e)
    return None


def index_lines(directory: Path, manifest: Manifest) -> tuple[list[dict[str, Any]], str | None]:
    """The lines of an index that lies in `directory`, and what is wrong with it; none if it is not there, or has not
    the size that it should (`problem_of` says so)."""
    size = next((f.size for f in manifest.files if f.name == INDEX), 0)
    try:
        with open(directory / INDEX, "rb") as f:
            data = f.read(min(size, LARGEST_SMALL) + 1)
        if len(data) != size:
            return [], None
        return parse_index(data, Bounds.of(manifest)), None
    except OSError:
        return [], None
    except ValueError as e:
        return [], f"{directory / INDEX}: {e}"


def _text(
    directory: Path,
    manifest: Manifest,
    problem: str | None,
    verified: float | None,
    tensors: Sequence[Mapping[str, Any]],
) -> list[str]:
    state, loss = manifest.state, validation_of(manifest)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    written += f", {duration(time.time() - manifest.time)} ago"
    health = "valid at a look" if problem is None else f"DAMAGED: {problem}"
    if problem is None and verified is not None:
        health = f"verified {duration(time.time() - verified)} ago"
    shards = [f for f in manifest.files if f.blocks is not None]
    size = sum(f.size for f in manifest.files)
    rows = [
        ("checkpoint", str(manifest.name) if manifest.attempt else f"made by a tool, of step {manifest.step}"),
        ("directory", str(directory)),
        *([("bytes", f"in {manifest.location}")] if manifest.location else []),
        ("run", manifest.run or "-"),
        ("state", health),
        ("written", written),
        (
            "size",
            f"{amount(size)}; shards: {len(shards)}, the largest {amount(max((f.size for f in shards), default=0))}",
        ),
        ("layout", ", ".join(f"{axis} {count}" for axis, count in manifest.layout.items()) or "-"),
        ("progress", ", ".join(f"{key} {value}" for key, value in progress_of(state).items()) or "-"),
        ("validation", "-" if loss is None else f"loss {loss.loss:.4f} at step {loss.step}"),
    ]
    for kind, (count, numel, nbytes) in kinds_of(tensors).items():
        rows.append((kind, f"{count} tensors, {numel:,} values, {amount(nbytes)}"))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    settings = settings_in(state)
    if settings:
        lines += ["", "settings", *(f"  {key} = {json.dumps(value)}" for key, value in settings.items())]
    return lines


def progress_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's numbers: what stands in the state by itself."""
    return {k: v for k, v in state.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def settings_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted name; of a weights-only checkpoint those of the model."""
    if isinstance(state.get("settings"), Mapping):
        return dict(state["settings"])
    model = state.get("model")
    return {f"model.{key}": value for key, value in model.items()} if isinstance(model, Mapping) else {}


def kinds_of(tensors: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int, int]]:
    """(tensors, values, bytes) of each kind: `model`, `optim/exp_avg`, ..."""
    found: dict[str, tuple[int, int, int]] = {}
    for t in tensors:
        parts = t["name"].split("/")
        kind = "/".join(parts[: 2 if parts[0] == "optim" and len(parts) > 2 else 1])
        count, numel, nbytes = found.get(kind, (0, 0, 0))
        found[kind] = (count + 1, numel + _numel(t), nbytes + nbytes_of(dict(t)))
    return found


def _numel(t: Mapping[str, Any]) -> int:
    n = 1
    for size in t["shape"]:
        n *= size
    return n


def _table(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    if not tensors:
        return ["no tensor of such a name"]
    rows = [("TENSOR", "DTYPE", "SHAPE", "SIZE", "SLICES")]
    for t in tensors:
        shape = "x".join(map(str, t["shape"])) or "scalar"
        rows.append((t["name"], t["dtype"], shape, amount(nbytes_of(dict(t))), str(t["slices"]["count"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _as_json(
    directory: Path,
    manifest: Manifest,
    problem: str | None,
    verified: float | None,
    tensors: Sequence[Mapping[str, Any]],
    listed: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    kinds = kinds_of(tensors)
    plain: dict[str, Any] = {
        "name": str(manifest.name),
        "directory": str(directory),
        "run": manifest.run,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "generation": manifest.generation,
        "time": manifest.time,
        "verified": verified,
        "problem": problem,
        "layout": manifest.layout,
        "state": manifest.state,
        "files": [{"name": f.name, "bytes": f.size} for f in manifest.files],
        "kinds": {kind: {"tensors": c, "values": n, "bytes": b} for kind, (c, n, b) in kinds.items()},
    }
    if listed is not None:
        plain["tensors"] = [
            {key: t[key] for key in ("name", "dtype", "shape")}
            | {"bytes": nbytes_of(dict(t)), "slices": expanded(dict(t))}
            for t in listed
        ]
    return plain
