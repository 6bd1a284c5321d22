"""`stoker plot RUN`: the loss over the steps as a picture, with what interrupted the run and where it went on.

Owns: what the picture shows (`story`, plain values) and how it is drawn. matplotlib is an optional dependency.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError, environment_error
from .find import find_run
from .run import views
from .run.files import read_lines, write_atomic
from .run.layout import AttemptDir, RunDir
from .run.outcome import EXIT_FINISHED, Cause, Next, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 4000  # per line; more than the picture has pixels
_NAMED = 8  # attempts in the legend; of more only the first and the last
_SIZE = (11.0, 5.5)  # inches
_DPI = 110
_VALIDATION, _INTERRUPTION, _AGAIN = "black", "tab:red", "0.88"
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:cyan", "tab:olive", "tab:pink")

Points = list[tuple[int, float]]  # (step, loss); not finite: nan


@dataclass(frozen=True)
class Interruption:
    """`step`: the last one done before. `kept`: the step from which the run went on, None if it has not."""

    step: int
    label: str
    kept: int | None


@dataclass(frozen=True)
class Story:
    """What the picture shows. Losses are those of the view: per step, the line whose weights went on."""

    title: str
    losses: dict[int, Points]  # by attempt
    validation: Points
    interruptions: list[Interruption]
    checkpoints: list[int]  # steps of those on the disk


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker plot", description="Draw a run's loss with its interruptions.")
    parser.add_argument("run", metavar="RUN", help="run directory, or job id")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="PNG file; default: report/loss.png in the run directory"
    )
    options = parser.parse_args(argv)
    run = find_run(options.run)
    print(plot_loss(run, options.out or run.report / "loss.png"))
    return EXIT_FINISHED


def plot_loss(run: RunDir, path: Path) -> Path:
    """Draw the run's loss into a PNG file, whatever state the run is in. Returns `path`.

    Raises:
        UserError: matplotlib is not installed, or the run has no steps yet.
        OSError: the file cannot be written.
    """
    found = story(run)
    if not found.losses:
        raise UserError(f"{run.path}: no step has been done yet, there is nothing to draw")
    data = draw(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    return path


def story(run: RunDir) -> Story:
    """Gather it from the run's files."""
    losses: dict[int, Points] = {}
    validation: Points = []
    for record in views.metrics(run):
        losses.setdefault(record["attempt"], []).append((record["step"], _number(record.get("loss"))))
        if "eval_loss" in record:
            validation.append((record["step"], _number(record["eval_loss"])))
    steps = {c.step for c in run.all_checkpoints() if (run.checkpoint(c) / "manifest.json").is_file()}
    return Story(run.path.name, losses, validation, _interruptions(run), sorted(steps))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _interruptions(run: RunDir) -> list[Interruption]:
    """Ends of attempts, restarts of workers within one, and the run's end where it is not the planned one."""
    found: list[Interruption] = []
    reached = 0
    waiting: list[str] = []  # what happened since the last step, in order
    for attempt in run.all_attempts():
        reasons = _restarts(attempt)
        for i, (_, path) in enumerate(attempt.all_metrics()):
            if i > 0:
                waiting.append(reasons[i - 1] if i <= len(reasons) else "restart")
            steps = [r["step"] for r in read_lines(path) if isinstance(r.get("step"), int)]
            if steps and waiting:
                found.append(Interruption(reached, ", ".join(waiting), min(steps) - 1))
                waiting = []
            reached = max([reached, *steps])
        waiting += _end_of(attempt, is_newest=attempt.number == run.all_attempts()[-1].number)
    if waiting:
        found.append(Interruption(reached, ", ".join(waiting), None))
    return found


def _restarts(attempt: AttemptDir) -> list[str]:
    """Why workers were started again within an attempt, in order."""
    return [str(e.get("cause", "restart")) for e in views.attempt_events(attempt) if e.get("event") == "trouble"]


def _end_of(attempt: AttemptDir, is_newest: bool) -> list[str]:
    outcome = Outcome.read(attempt)
    if outcome is None:
        # It was killed before it could say: Slurm took the job away from under it, or its host went down.
        return [] if is_newest else ["lost"]
    is_planned = outcome.cause is Cause.FINISHED and outcome.next is Next.NOTHING
    return [] if is_planned else [outcome.cause.value]


def draw(story: Story) -> bytes:
    """The picture as a PNG file's content.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise environment_error(f"drawing needs matplotlib ({e}): `pip install matplotlib`") from e
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")  # no pyplot: no display, no global state
    axes = figure.add_subplot()
    _draw_losses(axes, story)
    _draw_interruptions(axes, story.interruptions)
    if story.checkpoints:
        ground = axes.get_xaxis_transform()  # y in parts of the height
        at = [0.015] * len(story.checkpoints)
        axes.plot(story.checkpoints, at, "^", color="0.35", markersize=6, transform=ground, label="checkpoints")
    axes.set(title=story.title, xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.margins(x=0.02)
    axes.legend(loc="upper right", framealpha=0.9, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_losses(axes: Axes, story: Story) -> None:
    named = list(story.losses) if len(story.losses) <= _NAMED else [min(story.losses), max(story.losses)]
    for i, (attempt, points) in enumerate(story.losses.items()):
        some = _thinned(points)
        marker = "." if len(some) < 3 else ""  # a line of one point cannot be seen
        colour = _COLOURS[i % len(_COLOURS)]
        label = f"loss, attempt {attempt}" if attempt in named else None
        axes.plot(*_columns(some), color=colour, linewidth=1.3, marker=marker, label=label)
    if story.validation:
        columns = _columns(_thinned(story.validation))
        axes.plot(*columns, "o--", color=_VALIDATION, markersize=4, linewidth=0.9, label="validation loss")


def _draw_interruptions(axes: Axes, interruptions: Sequence[Interruption]) -> None:
    low, high = axes.get_xlim()
    near = 0.025 * (high - low)
    previous, level = -math.inf, 0
    is_explained = False
    for item in interruptions:
        level = (level + 1) % 3 if item.step - previous < near else 0  # texts beside one another step down
        previous = item.step
        if item.kept is not None and item.kept < item.step:
            span = axes.axvspan(item.kept, item.step, color=_AGAIN, zorder=0)
            if not is_explained:
                span.set_label("steps done again")
            is_explained = True
        axes.axvline(item.step, color=_INTERRUPTION, linewidth=1.0, linestyle="--" if item.kept is not None else "-")
        axes.annotate(
            f"{item.label.replace('_', ' ')} @ {item.step}",
            (item.step, 0.98 - 0.3 * level),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            color=_INTERRUPTION,
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.75},
        )


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]


def _thinned(points: Points) -> Points:
    """At most about _POINTS of them: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= _POINTS:
        return points
    width = math.ceil(2 * len(points) / _POINTS)
    kept: set[tuple[int, float]] = {points[0], points[-1]}
    for start in range(0, len(points), width):
        stretch = [p for p in points[start : start + width] if math.isfinite(p[1])]
        if stretch:
            kept |= {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
    return sorted(kept)
