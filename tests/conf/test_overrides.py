"""Overrides are judged one by one; nothing that people can type makes the judge itself fail."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from stoker.conf.overrides import prepare

CHOICES = {"model": ("small", "tiny"), "experiment": ("demo",), "presets": ("long",)}
DEFAULTS = ("model", "experiment")

READY = {
    "model=tiny": ["model=tiny"],
    "+model=tiny": ["model=tiny"],
    "presets=long": ["+presets=long"],
    "experiment=null": [],
    "~experiment": [],
    "train.steps=5": ["++train.steps=5"],
    "+train.steps=5": ["++train.steps=5"],
    "data.sources[0].weight=2": ["++data.sources.0.weight=2"],
    "cluster.exclude=n1,n2": ["++cluster.exclude='n1,n2'"],
    "cluster.exclude=null": ["++cluster.exclude=null"],
    "cluster.constraint=a'b": ["++cluster.constraint='a\\'b'"],
    "model={hidden_size: 64}": ["++model={hidden_size: 64}"],
    "~cluster.env.A": ["~cluster.env.A"],
}


@pytest.mark.parametrize("override", READY)
def test_overrides_become_hydras(override: str) -> None:
    assert prepare([override], CHOICES, DEFAULTS) == (READY[override], [])


WEIRD = st.text(st.sampled_from("ab1-.,:=[]{}()'\"\\ ${}~+@/#%&*!?\t\n\u00fc"), max_size=12)


@given(st.one_of(WEIRD, st.text(max_size=12)), WEIRD)
@example("~", "")
@example("a.", "'")
def test_any_text_is_either_ready_or_a_problem(key: str, value: str) -> None:
    for override in (key, f"{key}={value}", f"train.steps={value}", f"model={value}", f"cluster.env={value}"):
        ready, problems = prepare([override], CHOICES, DEFAULTS)
        assert len(ready) + len(problems) >= (0 if "experiment" in override else 1)
        OverridesParser.create().parse_overrides(ready)


@given(st.text(st.sampled_from("ab1-.,:=[]{}()'\"\\ ~+@/#%&*!?\u00fc"), max_size=12))
def test_a_string_that_hydra_reads_as_something_else_is_kept_to_the_letter(value: str) -> None:
    (ready,), problems = prepare([f"name={value}"], CHOICES, DEFAULTS)
    assert problems == []
    (parsed,) = OverridesParser.create().parse_overrides([ready])
    text = value.strip()
    if text and text[0] not in "'\"" and "\\" not in text:  # quotes and escapes are Hydra's own
        assert parsed.value() == text
    else:
        assert isinstance(parsed.value(), str)
