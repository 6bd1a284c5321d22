"""The weights in a checkpoint of ours, each in its most precise form: the float32 master where there is one.

Owns: that choice. Does not own: reading (reading.py), or what is done with the weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...launcher.run.manifest import InvalidCheckpointError
from ..box import Box
from .reading import CHUNK, Checkpoint, open_checkpoint

MODEL, MASTER = "model/", "optim/master/"


class CheckpointWeights:
    """A `hf.weights.WeightSource` over an open checkpoint, which it closes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        names = [name.removeprefix(MODEL) for name in checkpoint.tensors if name.startswith(MODEL)]
        self._entries = {n: MASTER + n if MASTER + n in checkpoint.tensors else MODEL + n for n in names}
        self.shapes = {name: checkpoint.tensors[MODEL + name].shape for name in names}

    @property
    def has_masters(self) -> bool:
        return any(entry.startswith(MASTER) for entry in self._entries.values())

    def dtype(self, name: str) -> torch.dtype:
        """See WeightSource."""
        return self.checkpoint.tensors[self._entries[name]].dtype

    def trained_dtype(self, name: str) -> torch.dtype:
        """That the model computed in."""
        return self.checkpoint.tensors[MODEL + name].dtype

    def fill(self, name: str, box: Box, out: Tensor) -> None:
        """See WeightSource."""
        if box.numel == 0:
            return
        entry = self._entries[name]
        if not box.shape:
            out.copy_(self.checkpoint.read(entry))
            return
        tensor = self.checkpoint.tensors[entry]
        step = max(1, CHUNK * tensor.rows // tensor.nbytes)
        taken = (slice(None), *box.slices_in(Box.whole(tensor.shape))[1:])
        for done in range(0, box.shape[0], step):
            count = min(step, box.shape[0] - done)
            rows = self.checkpoint.read(entry, box.start[0] + done, count)
            out[done : done + count].copy_(rows[taken])

    def close(self) -> None:
        """See WeightSource."""
        self.checkpoint.close()


def open_weights(directory: Path) -> CheckpointWeights:
    """Raises InvalidCheckpointError: it is no checkpoint, damaged at a look, or has no weights."""
    weights = CheckpointWeights(open_checkpoint(directory))
    if not weights.shapes:
        weights.close()
        raise InvalidCheckpointError(f"{directory}: has no tensors whose names begin with {MODEL}")
    return weights
