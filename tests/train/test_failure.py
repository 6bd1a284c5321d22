"""What an exception that ended a worker is called, and who gets to see a traceback."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.layout import Layout
from stoker.conf.schema import Config, DataSource
from stoker.train.data.indexed import IndexedTokens
from stoker.train.errors import BadInputError, DivergedError
from stoker.train.failure import Failure, failure_of
from stoker.train.worker import _import_plugin


def failure(action: Callable[[], Any]) -> Failure:
    """As `Trainer.build` and the worker make it of what `action` raises."""
    try:
        try:
            action()
        except (ValueError, FileNotFoundError) as e:
            raise BadInputError(str(e)) from e
    except BaseException as e:
        return failure_of(e)
    raise AssertionError


def test_a_sentence_of_ours_is_all_that_is_told(tmp_path: Path) -> None:
    found = failure(lambda: IndexedTokens(tmp_path / "x"))
    assert (found.cause.value, found.traceback) == ("bad_config", None)
    assert found.error == f"{tmp_path}/x.idx: no such file (data prefix '{tmp_path}/x' needs both .bin and .idx)"


def test_a_layout_that_does_not_fit_is_told_without_a_traceback() -> None:
    config = Config(data=Config().data)
    config.parallel.tensor = 3
    try:
        Layout.of(config, 2)
    except ValueError as e:
        found = failure_of(e)
    assert (found.cause.value, found.traceback) == ("bad_config", None)
    assert found.error.startswith("parallel.tensor=3: ")


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (lambda: int("x"), "BadInputError: invalid literal for int() with base 10: 'x'"),
        (lambda: json.loads("{"), "BadInputError: Expecting property name enclosed in double quotes"),
        (lambda: DataSource(**{"no": 1}), "TypeError: "),
        (lambda: (_ for _ in ()).throw(RuntimeError("a slip")), "RuntimeError: a slip"),
    ],
    ids=["our own slip", "a library's ValueError", "another type", "a RuntimeError"],
)
def test_what_nobody_raised_for_the_user_keeps_its_traceback(action: Callable[[], Any], error: str) -> None:
    found = failure(action)
    assert found.error.startswith(error)
    assert found.traceback is not None
    assert found.traceback.startswith("Traceback")


def test_causes_that_are_not_the_users() -> None:
    assert failure_of(OSError(errno.ENOSPC, "full")).cause.value == "storage"
    assert failure_of(MemoryError()).cause.value == "out_of_memory"
    assert failure_of(DivergedError("x")).cause.value == "diverged"
    assert failure_of(KeyError("x")).cause.value == "crash"


def test_a_plugin_that_is_not_there_is_the_users_mistake_and_what_fails_inside_of_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_plugin.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = failure(lambda: _import_plugin("no_such_module.part"))
    assert (found.cause.value, found.traceback) == ("bad_config", None)
    assert found.error.startswith("plugins: no_such_module.part: no module 'no_such_module' here; expected in ")
    inside = failure(lambda: _import_plugin("a_plugin"))
    assert (inside.cause.value, inside.error) == (
        "crash",
        "ModuleNotFoundError: No module named 'nothing_of_that_name'",
    )
    assert inside.traceback is not None
