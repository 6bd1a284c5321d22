"""Our trainer, as trainer.py builds it, with everything that a step of it does."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from clock import STEPS, Clock, numel
from trainer import our_config, our_trainer, write_data

clock = Clock()
scratch = Path(tempfile.mkdtemp())
write_data(scratch / "data")
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    trainer = our_trainer(scratch / "run", our_config(scratch / "data", STEPS))
parameters = numel(trainer.model.parameters())
while True:
    trainer.step()
    clock.tick(parameters)
