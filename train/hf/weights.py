"""The weights of a model by our names, wherever they come from; and those of a Hugging Face directory in that form.

Owns: `WeightSource`, which importing, exporting and the start of a run read from, a region at a time. Does not own:
names and geometry (maps.py), bytes (files.py), or the weights in a checkpoint of ours (checkpoint/source.py).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..box import Box
from ..params import ParamTable, decoder_table
from ..state.agreement import summary
from .config import Described, read_config
from .files import Reader, Stored, check_floating, tensors_of
from .maps import Layout, layout

# In files of older versions, without influence: what a model computes anew when it is built.
_BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq")
_GPT2_PREFIX = "transformer."  # left out where the body alone was saved


class WeightSource(Protocol):
    """Whole weights by their names in the parameter table. Used by one thread."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all that are there."""

    def dtype(self, name: str) -> torch.dtype:
        """That it is kept in."""

    def fill(self, name: str, box: Box, out: Tensor) -> None:
        """Copy a region into `out`, of the region's shape and any dtype, device and stride.

        Raises:
            ValueError, InvalidCheckpointError: it cannot be read, or is damaged; names the file.
        """

    def close(self) -> None: ...


class HfWeights:
    """A `WeightSource` over the safetensors files of a Hugging Face directory."""

    def __init__(self, described: Described, stored: Mapping[str, Stored], table: ParamTable, where: Path) -> None:
        """Use `open_hf`."""
        self._layout, self.described = layout(table, described.family.rules), described
        self.shapes = {facts.name: facts.shape for facts in table.owned()}
        self._stored = _chosen(stored, self._layout, where, described.model.tied_embeddings)
        self._reader = Reader()

    def dtype(self, name: str) -> torch.dtype:
        """See WeightSource; one that holds the values of all pieces."""
        return reduce(torch.promote_types, (self._stored[piece.theirs].dtype for piece in self._layout.ours[name]))

    def fill(self, name: str, box: Box, out: Tensor) -> None:
        """See WeightSource."""
        for piece in self._layout.ours[name]:
            common = piece.mine.intersect(box)
            if common is not None:
                view = piece.as_theirs(out[common.slices_in(box)])
                self._reader.fill(self._stored[piece.theirs], piece.to_theirs(common), view)

    def close(self) -> None:
        """See WeightSource."""
        self._reader.close()


def open_hf(directory: Path) -> HfWeights:
    """The weights of a directory as transformers writes it.

    Raises:
        ValueError: config.json or files are missing, damaged, or of a model that cannot be taken over; tensors are
            missing, left over or of another shape. Names the file or the tensor.
    """
    described, stored = read_config(directory), tensors_of(directory)
    for count in ("num_layers", "num_experts"):  # before a table of so many is made
        if getattr(described.model, count) > len(stored):
            raise ValueError(
                f"{directory}: weights and config.json differ: {len(stored)} tensors, too few for "
                f"model.{count}={getattr(described.model, count)}"
            )
    return HfWeights(described, stored, decoder_table(described.model), directory)


def _chosen(stored: Mapping[str, Stored], planned: Layout, where: Path, is_tied: bool) -> dict[str, Stored]:
    """Where each of their tensors lies; what config.json promises is there, and nothing else."""
    chosen: dict[str, Stored] = {}
    problems: list[str] = []
    short = {name: name.removeprefix(_GPT2_PREFIX) for name in planned.theirs}
    for name in planned.theirs:
        found = stored.get(name) or stored.get(short[name])
        if found is None:
            problems.append(f"{name} is missing")
            continue
        if found.shape != planned.shape(name):
            problems.append(f"{name} is {list(found.shape)}, by config.json {list(planned.shape(name))}")
        check_floating(name, found)
        chosen[name] = found
    problems += [
        f"{name} has no place in the model" for name in _left_over(stored, {*chosen, *short.values()}, is_tied)
    ]
    if problems:
        raise ValueError(f"{where}: weights and config.json differ: {summary(problems)}")
    return chosen


def _left_over(stored: Mapping[str, Stored], used: set[str], is_tied: bool) -> Sequence[str]:
    ignored = (*_BUFFERS, "lm_head.weight") if is_tied else _BUFFERS
    left = [name for name in stored if name not in used]
    return sorted(name for name in left if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored))
