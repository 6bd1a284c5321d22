"""The planner's verb: what its help shows works."""

from __future__ import annotations

import pytest
from stoker.conf.checks import check, errors
from stoker.conf.compose import compose
from stoker.conf.load import from_plain
from stoker.launcher.plan import EPILOG, _parser, _set_processes


@pytest.mark.parametrize("example", [line.strip() for line in EPILOG.splitlines() if "--world" in line])
def test_layouts_of_the_examples_are_not_refused(example: str) -> None:
    arguments = _parser().parse_intermixed_args(example.split())
    plain = compose(arguments.overrides, arguments.config_dir).plain
    _set_processes(plain["cluster"], arguments.world, arguments.gpus_per_node)
    found = errors(check(from_plain(plain), files=False))
    assert {p.field for p in found} <= {"data.sources.0.prefix"}, found
