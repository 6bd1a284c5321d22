"""Whatever the rules accept trains, and computes what one process computes; what they refuse they refuse with words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
from random_layouts import Sections, draw
from stoker.conf.checks import check, errors
from stoker.conf.schema import Config

# Of the hundred below four that are accepted, and between them have all axes and kinds of data parallelism.
QUICK = (25, 35, 74, 92)
# Losses of lower precision, relative: batches are summed in other orders, and roundings add up.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


def _configured(prefix: Path, world: int, sections: Sections) -> Config:
    config = parity.configured(prefix, **sections)
    config.cluster = replace(config.cluster, nodes=1, procs_per_node=world)
    return config


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in range(100) if n not in QUICK)]
)
def test_what_is_accepted_computes_what_one_process_computes(run_ranks: Any, tiny_data: Path, seed: int) -> None:
    world, sections = draw(seed)
    config = _configured(tiny_data, world, sections)
    refused = errors(check(config, files=False))
    if refused:
        assert seed not in QUICK, refused
        assert all(problem.field and problem.message for problem in refused)
        return
    alone = {name: fields for name, fields in sections.items() if name not in ("parallel", "memory")}
    expected = parity.run(None, parity.configured(tiny_data, **alone))
    found = parity.run(run_ranks, config, world)
    precision = sections["precision"]["params"]
    if precision == "float64":
        parity.assert_same(found, expected)
    else:
        np.testing.assert_allclose(found.losses, expected.losses, rtol=_TOLERANCE[precision])


def test_most_of_what_is_drawn_is_accepted(tiny_data: Path) -> None:
    """Else the hundred would show little."""
    drawn = [_configured(tiny_data, *draw(seed)) for seed in range(100)]
    accepted = [config for config in drawn if not errors(check(config, files=False))]
    assert len(accepted) >= 60
    assert {config.parallel.data.value for config in accepted} == {"ddp", "zero1", "fsdp", "hsdp"}
