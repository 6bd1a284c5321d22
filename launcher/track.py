"""`stoker track RUN`: sends a run's metrics to Weights & Biases, live or later. The only module that imports wandb.

Owns: the W&B run (one id over all attempts), what is sent to it, and that each step is sent once. Does not own: which
line of a step counts (track_feed.py). Whatever fails here, the run itself does not notice.

How "once" holds over kills at any moment: nothing is remembered beside what W&B itself has. Offline, those steps were
sent that stand in wandb's log files below report/wandb (track_log.py); online, those up to the step that the server
names when the W&B run is resumed. Steps only go up, so one number says it all. report/track.jsonl is for people, and
stands in for log files that were cleaned away after an offline session had ended in order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError, environment_error
from .find import find_run
from .run.effective import effective_config
from .run.files import read_json
from .run.layout import RunDir
from .run.outcome import EXIT_FAILED, EXIT_FINISHED, Outcome
from .run.submissions import submissions
from .run.views import last_outcome
from .track_feed import Feed, Row, final_outcome
from .track_log import cut_torn_end, log_files, recorded_step, wait_for_writers, wait_until_unchanged
from .track_notes import Notes
from .track_process import Signals, ends_within, only_tracker, prepare_environment, say
from .track_values import public_config, public_identity, values_of

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

_CONNECT = 30.0  # seconds the server may take to answer before the tracker records offline
_FAILURES = 5  # of wandb in a row, with no step sent between them
_MARGIN = 10.0  # seconds beyond the patience after which the process is ended
_NICE = 10
_KEY_HINT = (
    "online tracking needs a W&B key: run `wandb login` once, or set WANDB_API_KEY in the environment, never in a file "
    "of the run; `--mode offline` needs none"
)


class WandbError(Exception):
    """wandb failed in a way that a new session may mend."""


class NoServerError(Exception):
    """The W&B server cannot be reached."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker track", description="Send a run's metrics to Weights & Biases.")
    parser.add_argument("run", metavar="RUN", help="run directory, or job id")
    parser.add_argument("--once", action="store_true", help="send what there is and end; default: until the run ends")
    parser.add_argument(
        "--mode", choices=("offline", "online"), help="default: tracking.mode; online if disabled there"
    )
    parser.add_argument("--interval", type=float, metavar="SECONDS", help="between looks; default: tracking.interval")
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS", help="for the rest at the end; default: %(default)g"
    )
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)  # for track_start.py
    options = parser.parse_args(argv)
    for name in ("interval", "patience"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name}={value:g}: expected a number of seconds above 0")
    run = find_run(options.run)
    if options.background:
        os.nice(_NICE)
    with Signals(is_child=options.background) as signals:
        return Tracker(run, options, signals).serve()


class Tracker:
    """Sessions with W&B, one after the other, until the run is over or somebody asks for the end."""

    def __init__(self, run: RunDir, options: argparse.Namespace, signals: Signals) -> None:
        tracking = effective_config(run)["tracking"]
        configured = "online" if tracking["mode"] == "disabled" else str(tracking["mode"])
        self.run, self.signals = run, signals
        self.mode: str = options.mode or configured
        self.interval: float = options.interval or float(tracking["interval"])
        self.patience: float = options.patience
        self.is_once: bool = options.once
        self.is_background: bool = options.background
        self.identity = read_json(run.run)
        self.wandb_id = str(self.identity["wandb_id"])
        self.directory = run.report / "wandb"
        self.notes = Notes(run.report / "track.jsonl")

    def serve(self) -> int:
        """The exit code.

        Raises:
            UserError: another tracker is at work; no wandb, no key.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with only_tracker(self.run, self._wait_for_turn if self.is_background else None) as is_mine:
            if not is_mine:
                return EXIT_FINISHED
            prepare_environment(self.directory)
            _import_wandb()
            return self._sessions()

    def _wait_for_turn(self) -> bool:
        """While another tracker works on the run. It may end before the run does; then this one goes on."""
        self.signals.wait(self.interval)
        return self.signals.since_stop() is None and final_outcome(self.run) is None

    def _sessions(self) -> int:
        failures, best = 0, 0
        while True:
            session = Session(self)
            try:
                session.begin()
                return self._work(session)
            except WandbError as e:
                session.abandon()
                failures, best = (1, session.sent) if session.sent > best else (failures + 1, best)
                if failures >= _FAILURES or self.signals.since_stop() is not None:
                    self.notes.write("gave_up", mode=self.mode, sent=session.sent, error=str(e))
                    say(f"wandb failed: {e}. The run is not affected; `stoker track` sends the rest later")
                    return EXIT_FAILED
                say(f"wandb failed: {e}; trying again")
                self.signals.wait(2.0 ** (failures - 1))

    def _work(self, session: Session) -> int:
        feed = Feed(self.run, session.sent)
        while True:
            # In this order: the last look sees everything that was there when it was decided on.
            is_last = self.is_once or self._shall_end()
            outcome = final_outcome(self.run)
            for row in feed.take(outcome is not None):
                session.send(row)
                if self._is_late():
                    break
            session.follow_config()
            if outcome is not None or is_last:
                break
            self.signals.wait(self.interval)
        with ends_within(self.patience + _MARGIN):
            return session.end(feed, outcome)

    def _shall_end(self) -> bool:
        """Slurm tells everybody at once: the supervisor's last word and the last steps may be still to come."""
        if self.signals.since_stop() is None:
            return False
        newest = last_outcome(self.run)
        return not self.is_background or self._is_late() or newest is None or newest[1] is not None

    def _is_late(self) -> bool:
        """Whether half the patience has gone since the end was asked for: the upload needs the other half."""
        since = self.signals.since_stop()
        return since is not None and since > self.patience / 2


class Session:
    """From wandb.init to finish. Offline, wandb is only started when there is a step to record.

    `sent`: the last step that was sent before it began, and then the last one that it sent itself.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._t = tracker
        self._wb: Run | None = None
        self._submission = 0
        self.sent = 0

    def begin(self) -> None:
        """Find out what was sent.

        Raises:
            WandbError: wandb failed.
            UserError: no key, or the server refuses it; a process that is not ours to end still writes the log files.
        """
        self._settle()
        if self._t.mode == "online":
            try:
                self._wb = self._init()
                with _wandb_errors():
                    self.sent = max(0, self._wb.starting_step - 1)
                    self._note_opened(str(self._wb.url))
                return
            except NoServerError as e:
                say(f"no connection to W&B ({e}); recording offline below {self._t.directory}")
                self.abandon()
                self._t.mode = "offline"
        self.sent = max(self._recorded(), self._t.notes.recorded_step())

    def _settle(self) -> None:
        """Make sure of what the sessions before have left. Raises UserError."""
        files = log_files(self._t.directory, self._t.wandb_id)
        left = wait_for_writers(self._t.directory)
        if left is not None:
            raise environment_error(f"process {left} still writes below {self._t.directory}; end it, then try again")
        if self._t.notes.ended_elsewhere():
            wait_until_unchanged(files)
        for path in files:
            cut_torn_end(path)

    def _init(self) -> Run:
        """Raises UserError, NoServerError, WandbError."""
        import wandb

        t = self._t
        self._submission = _newest_submission(t.run)
        config = effective_config(t.run)
        tracking = config["tracking"]
        try:
            return wandb.init(
                project=tracking["project"],
                entity=tracking["entity"],
                group=tracking["group"],
                tags=tracking["tags"],
                name=t.run.path.name,
                id=t.wandb_id,
                resume="allow",
                dir=t.run.report,
                config=public_config(config) | {"stoker": public_identity(t.identity, t.run)},
                settings=_settings(t.mode, t.patience),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as e:
            raise environment_error(f"{_one_line(e)}\n{_KEY_HINT}") from e
        except (wandb.errors.CommError, TimeoutError) as e:
            if re.search(r"\b40[13]\b", str(e)):
                raise environment_error(f"W&B refuses: {_one_line(e)}\n{_KEY_HINT}") from e
            raise NoServerError(_one_line(e)) from e
        except Exception as e:
            raise WandbError(_one_line(e)) from e

    def send(self, row: Row) -> None:
        """Raises WandbError."""
        with _wandb_errors():
            if self._wb is None:
                self._wb = self._init()
                self._note_opened(str(Path(self._wb.dir).parent))
            self._wb.log(values_of(row), step=row.step, commit=True)
        self.sent = row.step

    def follow_config(self) -> None:
        """`stoker resume` may have changed the configuration while this session lasts. Raises WandbError."""
        newest = _newest_submission(self._t.run)
        if self._wb is None or newest == self._submission:
            return
        self._submission = newest
        with _wandb_errors():
            changed: Any = self._wb.config
            changed.update(public_config(effective_config(self._t.run)), allow_val_change=True)

    def end(self, feed: Feed, outcome: Outcome | None) -> int:
        """Finish the session; the exit code.

        Raises:
            WandbError: wandb failed, or the log files lack steps that it took.
        """
        if self._wb is None:
            say(f"no new steps; those up to {self.sent} are below {self._t.directory}" if self.sent else "no steps yet")
            return EXIT_FINISHED
        is_complete = self._finish(feed, outcome)
        if self._t.mode == "offline" and (recorded := self._recorded()) < self.sent:
            raise WandbError(f"step {self.sent} was sent, but the log files end with step {recorded}")
        self._t.notes.write("closed", mode=self._t.mode, sent=self.sent, complete=is_complete)
        if not is_complete:
            say("not everything reached W&B in time; `stoker track` sends the rest later")
            return EXIT_FAILED
        say(f"steps up to {self.sent} {'recorded' if self._t.mode == 'offline' else 'sent'}")
        return EXIT_FINISHED

    def _finish(self, feed: Feed, outcome: Outcome | None) -> bool:
        import wandb

        wb, self._wb = self._wb, None
        assert wb is not None
        with _wandb_errors():
            if feed.rewinds:
                wb.summary["rewind/count"] = len(feed.rewinds)
                wb.summary["rewind/steps_total"] = sum(r.steps for r in feed.rewinds)
            if outcome is None:
                wb.mark_preempting()  # it goes on later: neither finished nor failed
            try:
                wb.finish(exit_code=EXIT_FAILED if outcome is None else outcome.exit_code)
            except TimeoutError:
                return False
            finally:
                with contextlib.suppress(Exception):
                    wandb.teardown()
        return True

    def abandon(self) -> None:
        """Let go of wandb after a failure, so that a new session can begin."""
        import wandb

        self._wb = None
        with ends_within(self._t.patience + _MARGIN), contextlib.suppress(Exception):
            wandb.teardown(exit_code=EXIT_FAILED)

    def _recorded(self) -> int:
        return recorded_step(self._t.directory, self._t.wandb_id, step_of)

    def _note_opened(self, where: str) -> None:
        self._t.notes.write("opened", mode=self._t.mode, sent=self.sent, where=where)
        say(f"{self._t.mode}, from step {self.sent + 1} on, to {where}")


def step_of(payload: bytes) -> int | None:
    """The step of a record in wandb's log files, None if it is no history record."""
    from wandb.proto import wandb_internal_pb2

    schema: Any = wandb_internal_pb2  # it has no types
    try:
        record = schema.Record.FromString(payload)
    except Exception:  # protobuf's DecodeError: not a dependency of ours to import
        return None
    if record.WhichOneof("record_type") != "history":
        return None
    if record.history.HasField("step"):
        return int(record.history.step.num)
    named = (i for i in record.history.item if i.key == "_step" or list(i.nested_key) == ["_step"])
    return next((int(json.loads(i.value_json)) for i in named), None)


def _settings(mode: str, patience: float) -> Any:
    """wandb's settings, those of them that the installed version has."""
    import wandb

    wanted: dict[str, Any] = {
        "mode": mode,
        "silent": True,
        "console": "off",
        "finish_timeout": 0.4 * patience,  # half of it may have gone with what was left to send
        "finish_timeout_raises": True,
        # The tracker's own host, program, packages and load say nothing of the run.
        "disable_code": True,
        "disable_git": True,
        "save_code": False,
        "x_disable_machine_info": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
        "x_transaction_log_flush_interval": 2.0,
    }
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        wanted["init_timeout"] = _CONNECT
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in wandb.Settings.model_fields})


def _import_wandb() -> None:
    try:
        import wandb  # noqa: F401
    except ImportError as e:
        raise environment_error(f"{sys.executable} cannot import wandb ({e}); `pip install wandb`") from e


def _newest_submission(run: RunDir) -> int:
    known = submissions(run)
    return known[-1].number if known else 0


@contextlib.contextmanager
def _wandb_errors() -> Iterator[None]:
    """Whatever wandb raises becomes a WandbError; UserErrors pass."""
    try:
        yield
    except (WandbError, UserError):
        raise
    except Exception as e:
        raise WandbError(_one_line(e)) from e


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split()) or type(e).__name__


if __name__ == "__main__":
    from .cli import main as cli

    sys.exit(cli(["track", *sys.argv[1:]]))
