"""The weights that a run begins with: those of a Hugging Face directory or of a checkpoint of ours, into any layout.

Owns: what `model.init_from` means. Every rank reads what its own shards need, and nothing is sent. A run that has
checkpoints of its own never comes here. Does not own: formats (hf/, checkpoint/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..conf.fields import build
from ..conf.schema import ModelConfig
from ..launcher.run.manifest import InvalidCheckpointError
from .grid import Grid
from .hf.config import CHANGEABLE, differences, explain
from .hf.weights import WeightSource, open_hf
from .state.agreement import Status, errors, exchange, summary
from .state.entry import Entry

HF, _MODEL, _MASTER = "hf:", "model/", "optim/master/"


@dataclass(frozen=True)
class Loaded:
    """Where weights came from; `notes`: settings of the model that are others there, and may be."""

    where: str
    notes: tuple[str, ...]


def load_initial(chosen: str, model: ModelConfig, grid: Grid, entries: Sequence[Entry]) -> Loaded:
    """Fill the weights among `entries`, and their masters, from `chosen` (hf:DIR or DIR). Collective.

    Raises (on all ranks the same):
        ValueError: it cannot be read, is damaged, or is of another model; names what and where.
        PeerLostError: another rank is gone.
    """
    notes: list[str] = []

    def work() -> Status:
        source, theirs = _open(chosen)
        try:
            found = differences(model, theirs) if theirs is not None else {}
            wrong = [explain(name, pair, chosen) for name, pair in found.items() if name not in CHANGEABLE]
            if wrong:
                return {"error": summary(wrong)}
            notes.extend(explain(name, pair, chosen) for name, pair in found.items())
            _fill(source, chosen, entries)
        finally:
            source.close()
        return {}

    def guarded() -> Status:
        try:
            return work()
        except (ValueError, InvalidCheckpointError) as e:
            return {"error": str(e)}

    problems = list(dict.fromkeys(errors(exchange(grid, guarded))))
    if problems:
        raise ValueError(f"model.init_from: {summary(problems)}")
    return Loaded(chosen, tuple(notes))


def _open(chosen: str) -> tuple[WeightSource, ModelConfig | None]:
    """The weights, and the model that they are of, as far as it is known."""
    if chosen.startswith(HF):
        weights = open_hf(Path(chosen.removeprefix(HF)))
        return weights, weights.described.model
    from .checkpoint.source import open_weights

    ours = open_weights(Path(chosen))
    return ours, model_of(ours.checkpoint.model)


def model_of(plain: dict[str, Any]) -> ModelConfig | None:
    """The settings that a checkpoint carries; None if it carries none, or those of another version of the schema."""
    known = {name: value for name, value in plain.items() if name in ModelConfig.__dataclass_fields__}
    if not known:
        return None
    problems: list[Any] = []
    model = build(ModelConfig, known, ("model",), problems, complete=False)
    return None if problems else model


@torch.no_grad()
def _fill(source: WeightSource, chosen: str, entries: Sequence[Entry]) -> None:
    masters = {e.name.removeprefix(_MASTER): e for e in entries if e.name.startswith(_MASTER)}
    weights = {e.name.removeprefix(_MODEL): e for e in entries if e.name.startswith(_MODEL)}
    # The bias of a router is no weight: it begins at zero where a source has none.
    expected = {name: e for name, e in weights.items() if name in source.shapes or not name.endswith(".router_bias")}
    problems = [
        f"{name}: {list(source.shapes[name])} there, {list(e.shape)} here" if name in source.shapes else f"no {name}"
        for name, e in expected.items()
        if source.shapes.get(name) != e.shape
    ]
    if problems:
        raise ValueError(f"{chosen} does not fit this model: {summary(problems)}")
    for name, weight in expected.items():
        master = masters.get(name)
        if master is None:
            source.fill(name, weight.box, weight.tensor.detach())
            continue
        assert master.box == weight.box, f"{name}: {master.box} of the master, {weight.box} of the weight"
        source.fill(name, master.box, master.tensor.detach())
        weight.tensor.detach().copy_(master.tensor)
