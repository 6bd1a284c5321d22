"""`stoker run`: what it shows decides nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stoker.launcher import foreground, logs
from stoker.launcher.run.layout import RunDir


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed")])
def test_logs_that_cannot_be_shown_do_not_end_the_run(
    error: Exception, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[bool] = []

    class Broken:
        def poll(self, with_torn: bool = False) -> bool:
            polls.append(with_torn)
            raise error

    monkeypatch.setattr(logs, "follower", lambda run: Broken())
    shown = foreground._shown(make_run())
    with shown:
        shown._thread.join(10.0)  # it has given up
    assert polls == [False, True]
