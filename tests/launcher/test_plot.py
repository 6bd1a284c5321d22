"""What the loss plot shows: the story as values, and that a picture comes out of it."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for the module below

from made_run import add_steps, add_text, end_attempt, finish, line, make_run, start_attempt
from stoker.launcher import cli
from stoker.launcher.errors import UserError
from stoker.launcher.plot import Interruption, Story, _thinned, draw, plot_loss, story
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.outcome import Cause, Next


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def test_an_undisturbed_run_has_one_line_and_no_interruption(run: RunDir) -> None:
    attempt = start_attempt(run, 1, 3)
    add_text(attempt, line(4, eval_loss=2.5) + line(5, loss=None))
    finish(attempt)
    found = story(run)
    assert found.title == run.path.name
    assert list(found.losses) == [1]
    assert found.losses[1][:4] == [(1, 4.0), (2, 2.0), (3, 4 / 3), (4, 1.0)]
    assert math.isnan(found.losses[1][4][1])
    assert (found.validation, found.interruptions, found.checkpoints) == ([(4, 2.5)], [], [])


def test_each_kind_of_interruption_stands_where_it_happened_and_says_why(run: RunDir) -> None:
    end_attempt(start_attempt(run, 1, 10), Cause.NODE_FAILURE)
    end_attempt(start_attempt(run), Cause.LAUNCH_FAILED)  # no step: told together with the one before
    third = start_attempt(run, 6, 20)
    EventLog(third.events("supervisor"), "supervisor", 3).write("trouble", cause="hang", reason="rank 1 is silent")
    add_steps(third, 16, 22, generation=2)  # workers restarted in place; then killed without a word
    end_attempt(start_attempt(run, 21, 30), Cause.TIME_LIMIT)
    end_attempt(start_attempt(run, 31, 40), Cause.DIVERGED, Next.NOTHING, 1)
    found = story(run)
    assert found.interruptions == [
        Interruption(10, "node_failure, launch_failed", 5),
        Interruption(20, "hang", 15),
        Interruption(22, "lost", 20),
        Interruption(30, "time_limit", 30),
        Interruption(40, "diverged", None),
    ]
    assert {a: (p[0][0], p[-1][0]) for a, p in found.losses.items()} == {
        1: (1, 5),
        3: (6, 20),
        4: (21, 30),
        5: (31, 40),
    }


def test_a_running_attempt_is_no_interruption(run: RunDir) -> None:
    start_attempt(run, 1, 3)
    assert story(run).interruptions == []


def test_only_published_checkpoints_are_shown(run: RunDir) -> None:
    start_attempt(run, 1, 3)
    for step in (2, 3):
        run.checkpoint(CheckpointName(step, 1)).mkdir()
    (run.checkpoint(CheckpointName(2, 1)) / "manifest.json").touch()
    assert story(run).checkpoints == [2]


def pixels(png: bytes) -> Counter[tuple[int, int, int]]:
    """How often each colour occurs."""
    from matplotlib.image import imread

    picture = (imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)
    assert picture.shape == (605, 1210, 3)
    return Counter(map(tuple, picture.reshape(-1, 3).tolist()))


def reds(found: Counter[tuple[int, int, int]]) -> int:
    """Pixels of a thin red line, whose edges are blended with what lies below."""
    return sum(n for (r, g, b), n in found.items() if r - g > 80 and abs(g - b) < 20)


def test_the_picture_shows_attempts_interruptions_and_steps_done_again() -> None:
    blue, orange, grey = (31, 119, 180), (255, 127, 14), (224, 224, 224)
    first: list[tuple[int, float]] = [(n, 9.0 - n) for n in range(1, 5)]
    second: list[tuple[int, float]] = [(n, 9.0 - n) for n in range(5, 9)]
    plain = pixels(draw(Story("plain", {1: first}, [], [], [])))
    full = pixels(draw(Story("full", {1: first, 2: second}, [(4, 5.5)], [Interruption(6, "hang", 4)], [8])))
    assert [plain[blue] > 50, plain[orange] > 50, reds(plain) > 200] == [True, False, False]
    assert [full[blue] > 50, full[orange] > 50, reds(full) > 200] == [True, True, True]
    assert full[grey] - plain[grey] > 20_000


def test_one_step_and_many_attempts_can_be_drawn() -> None:
    losses: dict[int, list[tuple[int, float]]] = {n: [(n, 1.0)] for n in range(1, 30)}
    assert draw(Story("many", losses, [], [Interruption(n, "crash", n) for n in range(1, 30)], []))[:4] == b"\x89PNG"
    assert draw(Story("one", {1: [(1, math.nan)]}, [], [], []))[:4] == b"\x89PNG"


def test_a_long_run_is_thinned_without_losing_a_spike() -> None:
    points = [(n, 100.0 if n == 77_777 else 1.0 + n % 7) for n in range(1, 100_001)]
    few = _thinned(points)
    assert len(few) <= 4002
    assert (few[0], few[-1], max(few, key=lambda p: p[1])) == (points[0], points[-1], (77_777, 100.0))
    assert few == sorted(few)


def test_the_verb_writes_the_picture_into_the_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    start_attempt(run, 1, 3)
    assert cli.main(["plot", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.report / "loss.png")
    assert (run.report / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_nothing_to_draw_is_one_clear_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", str(run.path)]) == 2
    assert capsys.readouterr().err == (
        f"stoker plot: error: {run.path}: no step has been done yet, there is nothing to draw\n"
    )
    assert not run.report.exists()


def test_without_matplotlib_it_says_what_to_install(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    start_attempt(run, 1, 3)
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"drawing needs matplotlib .*pip install matplotlib"):
        plot_loss(run, run.path / "loss.png")
    assert not (run.path / "loss.png").exists()
