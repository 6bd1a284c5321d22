"""What retention lets go, as a table, and what holds for any collection of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stoker.launcher.run.layout import CheckpointName
from stoker.launcher.run.manifest import Manifest, read_manifest
from stoker.launcher.run.retention import Retention, looked, validation_of


def parse(text: str) -> list[CheckpointName]:
    """`30.2 20.1`: step 30 of attempt 2, step 20 of attempt 1."""
    return [CheckpointName(*map(int, item.split("."))) for item in text.split()]


def names(text: str) -> frozenset[CheckpointName]:
    return frozenset(parse(text))


def manifest(name: CheckpointName, validation: Any = None) -> Manifest:
    return Manifest("run", name.step, name.attempt, 1, 0.0, {}, {"validation": validation}, ())


@pytest.mark.parametrize(
    ("found", "invalid", "proven", "keep", "going"),
    [
        ("40.1 30.1 20.1 10.1", "", "40.1", 2, "20.1 10.1"),
        ("40.1 30.1 20.1 10.1", "", "40.1", 9, ""),
        ("40.1 30.1 20.1 10.1", "", "40.1", 0, "30.1 20.1 10.1"),
        # Invalid ones do not count; they go when their age comes.
        ("40.1 30.1 20.1 10.1", "30.1", "40.1", 2, "10.1"),
        ("40.1 30.1 20.1 10.1", "10.1", "40.1", 2, "20.1 10.1"),
        ("40.1 30.1", "40.1 30.1", "", 1, ""),
        # The last one that was proven good stays, however old.
        ("40.1 30.1 20.1 10.1", "", "10.1", 2, "20.1"),
        ("40.1 30.1 20.1 10.1", "", "20.1 10.1", 1, "30.1 10.1"),
        # It may have been taken away, or damaged since: then the one before it stays.
        ("40.1 30.1 20.1 10.1", "", "25.1 10.1", 1, "30.1 20.1"),
        ("40.1 30.1 20.1 10.1", "20.1", "20.1 10.1", 1, "30.1"),
        # Of a later attempt nothing is touched or counted.
        ("50.3 40.2 30.1 20.1", "", "30.1", 1, "20.1"),
        ("50.2 40.3 30.1", "", "50.2", 1, "30.1"),
        ("20.2 20.1 10.1", "", "20.2", 1, "20.1 10.1"),
    ],
)
def test_what_goes(found: str, invalid: str, proven: str, keep: int, going: str) -> None:
    retention = Retention(keep, attempt=2, proven=names(proven))
    assert retention.superfluous(parse(found), lambda n: None if n in names(invalid) else manifest(n)) == parse(going)
    rejected = Retention(keep, attempt=2, proven=names(proven), rejected=names(invalid))
    assert rejected.superfluous(parse(found), manifest) == (
        parse(going) if invalid != "20.1" else parse("30.1 20.1")  # rejected: not even proven any more
    )


@pytest.mark.parametrize(
    ("found", "every", "staying"),
    [
        ("50.1 40.1 30.1 20.1 10.1", 20, "50.1 40.1 20.1"),
        ("50.1 40.1 30.1 20.1 10.1", 50, "50.1"),
        # A step that was done again stands for the one before.
        ("50.2 40.2 40.1 30.1 20.1", 20, "50.2 40.2 20.1"),
        # Saves that had to wait: the first one from there on.
        ("25.1 22.1 15.1 12.1 5.1", 10, "25.1 22.1 12.1"),
        ("26.2 23.1 23.2 19.1", 20, "26.2 23.2"),
    ],
)
def test_those_at_regular_steps_stay(found: str, every: int, staying: str) -> None:
    going = Retention(1, keep_every=every).superfluous(parse(found), manifest)
    assert sorted(names(found) - {*going}, reverse=True) == parse(staying)


@pytest.mark.parametrize(
    ("best", "losses", "staying"),
    [
        (1, {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.6}, [40, 20]),
        (2, {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.6}, [40, 30, 20]),
        (1, {10: 2.0, 20: 2.0, 30: 2.5, 40: 2.6}, [40, 20]),  # of two equal ones the newer
        (1, {10: float("nan"), 20: None, 30: 2.5, 40: 2.6}, [40, 30]),
        (3, {10: float("nan"), 20: None, 30: float("-inf"), 40: 2.6}, [40]),
        (1, {10: "low", 20: 9.0, 30: None, 40: None}, [40, 20]),
    ],
)
def test_the_best_by_validation_stay(best: int, losses: dict[int, Any], staying: list[int]) -> None:
    look = lambda n: manifest(n, {"step": n.step, "loss": losses[n.step]})  # noqa: E731
    found = parse("40.1 30.1 20.1 10.1")
    going = Retention(1, keep_best=best).superfluous(found, look)
    assert [n.step for n in found if n not in going] == staying


def test_one_validation_makes_one_best() -> None:
    """Saved every 10 steps and validated every 20: the one that was measured stays, not the one that remembers it."""
    measured = {10: None, 20: 20, 30: 20, 40: 40, 50: 40, 60: 60}
    loss = {20: 2.0, 40: 2.1, 60: 2.2}
    look = lambda n: manifest(n, (at := measured[n.step]) and {"step": at, "loss": loss[at]})  # noqa: E731
    found = parse("60.1 50.1 40.1 30.1 20.1 10.1")
    assert Retention(1, keep_best=2).superfluous(found, look) == parse("50.1 30.1 10.1")


def test_a_retention_travels_as_json() -> None:
    retention = Retention(3, 100, 2, 4, names("20.1 10.1"), names("5.1"))
    assert Retention.of(json.loads(json.dumps(retention.to_json()))) == retention
    assert Retention.of(Retention(1).to_json()) == Retention(1)


def test_without_best_and_every_only_the_newest_are_looked_at() -> None:
    looked = []
    Retention(2).superfluous(parse("40.1 30.1 20.1 10.1"), lambda n: looked.append(n) or manifest(n))
    assert looked == parse("40.1 30.1")


def test_storage_that_does_not_answer_is_not_taken_for_damage(tmp_path: Path) -> None:
    assert looked(lambda: read_manifest(tmp_path)) is None  # no manifest: not a checkpoint
    (tmp_path / "manifest.json").mkdir()  # reads with EISDIR, which stands for any error but "no such file"
    with pytest.raises(IsADirectoryError):
        looked(lambda: read_manifest(tmp_path))


NAMES = st.builds(CheckpointName, st.integers(1, 12), st.integers(1, 4))
VALIDATIONS = st.none() | st.fixed_dictionaries(
    {"step": st.integers(0, 12), "loss": st.sampled_from([1.0, 2.0, 2.5]) | st.floats() | st.none()}
)
FOUND = st.dictionaries(NAMES, st.tuples(st.booleans(), VALIDATIONS), max_size=14)


@settings(max_examples=300, deadline=None)
@given(FOUND, st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.none() | st.integers(1, 4), st.data())
def test_invariants(
    found: dict[CheckpointName, tuple[bool, Any]],
    keep: int,
    every: int,
    best: int,
    attempt: int | None,
    data: st.DataObject,
) -> None:
    some = st.frozensets(st.sampled_from(sorted(found))) if found else st.just(frozenset())
    proven, rejected = data.draw(some, "proven"), data.draw(some, "rejected")
    retention = Retention(keep, every, best, attempt, proven, rejected)
    look = lambda n: manifest(n, found[n][1]) if found[n][0] else None  # noqa: E731
    going = retention.superfluous(data.draw(st.permutations(sorted(found))), look)
    mine = [n for n in sorted(found, reverse=True) if attempt is None or n.attempt <= attempt]
    valid = [n for n in mine if n not in rejected and look(n) is not None]
    staying = set(found) - {*going}
    assert going == sorted(set(going), reverse=True)
    assert set(going) <= set(mine)
    assert set(valid[: max(keep, 1)]) <= staying
    assert not valid or max(going, default=valid[0]) <= valid[0]
    trusted = sorted(proven - rejected, reverse=True)
    assert set(trusted[:1]) <= staying
    assert not set(valid) & set(trusted) or set(valid) & set(trusted) & staying
    assert not every or {n.step for n in valid if n.step % every == 0} <= {n.step for n in valid if n in staying}
    measured = [(v.loss, n) for n in valid if (v := validation_of(look(n)))]
    if best and measured:
        assert min(loss for loss, _ in measured) in [loss for loss, n in measured if n in staying]
    assert len(staying & set(valid)) <= max(keep, 1) + (len(valid) if every else 0) + best + 1 + len(set(proven))
    # Once more changes nothing.
    assert retention.superfluous(staying, look) == []
    # No reason, no stay: what stays of mine is new, regular, best, proven, or not older than the newest that count.
    reasons = retention.reasons(found, look)
    assert {n for n, why in reasons.items() if not why} == set(going)
