"""From a Hugging Face directory to a weights-only checkpoint, with the settings and the tokenizer beside it.

Owns: what lies in the directory that `stoker checkpoint import --hf` makes. Does not own: reading (weights.py), the
checkpoint's files (checkpoint/weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from ...conf.schema import ModelConfig
from ..box import Box
from ..checkpoint.weights import MODEL, Origin, Weight, write_weights
from ..storage.new_directory import new_directory
from .config import CONFIG, settings_text
from .tokenizer import FILES, GENERATION, copy_files
from .weights import HfWeights, WeightSource, open_hf

CHUNK = 64 * 1024 * 1024  # bytes of a tensor that are in memory at once
SETTINGS = "config/model/imported.yaml"  # `--config-dir OUT/config model=imported`


@dataclass(frozen=True)
class Imported:
    """What was made. `settings`: of the model, where they differ from the defaults; `unread`: fields of config.json
    that nobody here knows."""

    family: str
    parameters: int
    settings: dict[str, Any]
    unread: tuple[str, ...]
    tokenizer: tuple[str, ...]


def import_hf(
    source: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], object] = lambda n, m: None,
) -> Imported:
    """Make the checkpoint `out`, whole or not at all. dtype: of its weights; default: as they are in the files.

    progress: called with the bytes written since, and all that there are.

    Raises:
        ValueError: `out` exists, or `source` cannot be taken over; names file, field or tensor.
        OSError: storage refused.
    """
    found = open_hf(source)
    try:
        model = found.described.model
        weights = [_weight(found, name, shape, dtype) for name, shape in found.shapes.items()]
        total = sum(w.nbytes for w in weights)
        origin = Origin(state={"hugging_face": {"model_type": found.described.family.model_type}})
        with new_directory(out) as unfinished:
            write_weights(unfinished, weights, plain(model), origin, lambda count: progress(count, total))
            tokenizer = copy_files(source, unfinished, FILES)
            # For exporting again: token ids and what else has no setting of ours.
            copy_files(source, unfinished, (CONFIG, GENERATION))
            _write_settings(unfinished / SETTINGS, found, source)
    finally:
        found.close()
    numel = sum(w.nbytes // w.dtype.itemsize for w in weights)
    return Imported(found.described.family.name, numel, settings_text(model), found.described.unread, tuple(tokenizer))


def plain(model: ModelConfig) -> dict[str, Any]:
    """All settings, as JSON has them."""
    return {name: getattr(v := getattr(model, name), "value", v) for name in ModelConfig.__dataclass_fields__}


def _weight(source: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Weight:
    kept = dtype or source.dtype(name)
    return Weight(MODEL + name, kept, shape, partial(rows_of, partial(source.fill, name), shape, kept))


def rows_of(fill: Callable[[Box, Tensor], None], shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor of `shape` in pieces of about CHUNK bytes along dim 0, each filled by `fill`."""
    whole = Box.whole(shape)
    if not shape:
        boxes = [whole]
    else:
        step = max(1, CHUNK // max(1, whole.numel // shape[0] * dtype.itemsize)) if shape[0] else 1
        boxes = [whole.rows(first, min(step, shape[0] - first)) for first in range(0, shape[0], step)]
    for box in boxes:
        out = torch.empty(box.shape, dtype=dtype)
        fill(box, out)
        yield out


def _write_settings(path: Path, found: HfWeights, source: Path) -> None:
    path.parent.mkdir(parents=True)
    settings = yaml.safe_dump(settings_text(found.described.model), sort_keys=False)
    path.write_text(f"# {found.described.family.name}, from {str(source)!a}\n{settings}", encoding="utf-8")
