"""`stoker resume RUN [KEY=VALUE ...]`: submit an ended run once more; it goes on from its newest checkpoint.

Owns: when that is allowed, and what may be changed for it. A change is written beside the new submission
(run/effective.py); what was frozen stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from . import avoid
from .cancel import learn_jobs, live_jobs, local_processes, poll
from .errors import UserError, environment_error
from .find import find_run
from .launch import start_here, submit_frozen, tell, wait
from .process import ProcessId
from .run.effective import config_path, effective_config, script_path
from .run.files import create_exclusive, create_json, read_json
from .run.layout import RunDir
from .run.outcome import EXIT_FINISHED
from .run.submissions import Submission, TakenError, new_submission, next_number, submissions
from .state import State, look, queue_of
from .storage import is_directory

CLEARING = 90.0  # seconds; KillWait is 30 by default
UNDER_WAY = 900.0  # seconds for which a submission from another host may still be under way (submit.py gives up sooner)
# What may change without making it another run: where and how it is computed, but not what. A checkpoint of any layout
# loads into any other.
ALLOWED = (
    *("cluster.", "container.", "tracking.", "resilience.", "checkpoint.", "parallel.", "memory."),
    *("train.steps", "train.micro_batch"),
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker resume", description="Submit an ended run once more.")
    parser.add_argument("run", metavar="RUN", help="run directory, or job id")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"changes to {', '.join(ALLOWED)}")
    parser.add_argument("--nodes", type=int, metavar="N", help="the same as cluster.nodes=N")
    parser.add_argument("--time", metavar="T", help="the same as cluster.time=T")
    parser.add_argument("--wait", action="store_true", help="wait for the run's end and exit with its exit code")
    parser.add_argument("--follow", action="store_true", help="the same, and show the logs meanwhile")
    arguments = parser.parse_intermixed_args(argv)
    run = find_run(arguments.run)
    overrides = list(arguments.overrides)
    overrides += [f"cluster.nodes={arguments.nodes}"] if arguments.nodes is not None else []
    overrides += [f"cluster.time={arguments.time}"] if arguments.time is not None else []
    resume(run, overrides)
    if arguments.wait or arguments.follow:
        return wait(run, arguments.follow)
    tell(f"next:          stoker status {shlex.quote(str(run.path))}")
    return EXIT_FINISHED


def resume(run: RunDir, overrides: Sequence[str], by: str | None = None, number: int | None = None) -> None:
    """Submit the run again; prints the job.

    Args:
        by: noted with the submission.
        number: the submission's; whoever decided on the ground of an earlier look at the run gives the number that was
            the next one then.

    Raises:
        UserError: it still runs or waits, has nothing left to do, the changes are not allowed, or somebody else has
            submitted it meanwhile.
    """
    number = number or next_number(run)  # before any look at the run: what is submitted after this takes the number
    refuse_if_alive(run)
    _refuse_if_out_of_sight(run)
    plain = effective_config(run)
    changed = changed_config(plain, overrides) if overrides else plain
    _refuse_if_done(run, changed["train"]["steps"], changed is not plain)
    script = _script(run, changed) if overrides else None  # before anything is written: it finds problems
    is_local = changed["cluster"]["kind"] == "local"
    fields: dict[str, Any] = {"by": by} if by else {}
    options = _begin_at_once(changed, overrides)
    fields |= {"options": options if is_local else [*options, *avoid.options(run, changed)]}
    try:
        submission = new_submission(run, "local", number, **fields) if is_local else _intend(run, number, fields)
    except TakenError as e:
        raise environment_error(str(e)) from e
    if script is not None:
        create_json(config_path(run, submission.number), changed)
        create_exclusive(script_path(run, submission.number), script, mode=0o755)
    tell(f"run directory: {run.path}")
    if is_local:
        start_here(submission)
    else:
        _submit(run, submission)


def _begin_at_once(plain: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """cluster.begin is of the first start: `16:00` in the script would keep a resumed run waiting until tomorrow."""
    is_new = "cluster.begin" in map(_key, overrides)
    return ["--begin=now"] if plain["cluster"].get("begin") and not is_new else []


def _intend(run: RunDir, number: int, fields: dict[str, Any]) -> Submission:
    from .executor import intend

    return intend(run, number, **fields)


def _submit(run: RunDir, submission: Submission) -> None:
    from .submit import SubmissionError

    try:
        submit_frozen(run, submission)
    except SubmissionError as e:
        if not e.may_be_queued:  # no job was made: leave no trace of the intention either
            for path in sorted(run.submissions.glob(f"{submission.number:04d}.*")):
                path.unlink()
        raise


def refuse_if_alive(run: RunDir) -> None:
    """Two jobs on one run would fence each other out.

    Raises:
        UserError: a job or a process of the run is there, or nobody can tell.
    """
    learn_jobs(run)
    found = submissions(run)
    if found and is_under_way(found[-1]):
        raise environment_error(f"{run.path}: somebody is just submitting it (submission {found[-1].number})")
    state = look(run, queue_of([run]))
    if state.is_over and (ending := live_jobs(found)):
        # Its last word is spoken; Slurm is still clearing up after it.
        tell(f"waiting for job {', '.join(s.job_id or '?' for s in ending)} to leave the queue")
        poll(lambda: not live_jobs(ending), CLEARING)
    live = [f"job {s.job_id}" for s in live_jobs(found)]
    live += [f"process {p.pid} on {p.host}" for p in local_processes(found) if p.is_alive() is not False]
    cancel = f"stoker cancel {shlex.quote(str(run.path))}"
    if live:
        raise environment_error(
            f"{run.path}: {', '.join(live)} still works on it ({state.state.value}); `{cancel}` first"
        )
    if state.state is State.UNKNOWN and not found[-1].is_cancelled and found[-1].job_id:
        raise environment_error(f"{run.path}: {state.detail}; `{cancel}` first, if it is sure that nothing runs")


def is_under_way(submission: Submission) -> bool:
    """Whether somebody is still at submitting it: there is an intention, no job yet, and whoever had it lives."""
    intention = submission.intention
    if submission.job_id is not None or intention.get("mode") in ("local", "salloc", "adopted"):
        return False
    submitter = ProcessId.of(intention.get("process") or {})
    if submitter is None:
        return False
    alive = submitter.is_alive()
    return time.time() - float(intention["time"]) < UNDER_WAY if alive is None else alive


def _refuse_if_out_of_sight(run: RunDir) -> None:
    """A link that leads nowhere is not a run without checkpoints."""
    if run.checkpoints.is_symlink() and not run.checkpoints.exists():
        place = os.readlink(run.checkpoints)
        raise environment_error(f"{run.checkpoints} leads to {place}, which is not there; is its file system mounted?")


def _refuse_if_done(run: RunDir, total: int, is_changed: bool) -> None:
    saved = [c.step for c in run.all_checkpoints()]
    step = max(saved, default=0)
    if step >= total and (is_changed or look(run, None).state is State.FINISHED):
        raise UserError(
            f"{run.path}: is at step {step} of train.steps={total}; to train further: train.steps=N, N > {step}"
        )


def changed_config(plain: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration with `overrides` put into it.

    Raises:
        UserError, ConfigError: an override that is wrong, or that would make it another run.
    """
    from ..conf.compose import compose
    from ..conf.load import from_plain

    keys = [_key(text) for text in overrides]
    refused = [key for key in keys if not any(key == a or (a.endswith(".") and key.startswith(a)) for a in ALLOWED)]
    if refused:
        raise UserError(
            "\n".join(
                f"{key}: cannot change on resume (only {', '.join(ALLOWED)}); launch a new run" for key in refused
            )
        )
    # Composed with the defaults: that parses, types and checks the values like any launch; only they are taken over.
    values = compose(overrides).plain
    changed = deepcopy(plain)
    for key in keys:
        *folders, last = key.split(".")
        source, target = values, changed
        for name in folders:
            source, target = source[name], target.setdefault(name, {})
        target[last] = source[last]
    _refuse_other_directory(plain["checkpoint"].get("storage"), changed["checkpoint"].get("storage"))
    from_plain(changed)
    return changed


def _refuse_other_directory(old: str | None, new: str | None) -> None:
    """RUN/checkpoints is a directory or a link for good; only to and from an object store a run can move."""
    if old != new and (is_directory(old) or is_directory(new)):
        raise UserError(
            f"checkpoint.storage={new}: cannot change on resume from {old or 'the run directory'}; launch a new run"
        )


def _key(text: str) -> str:
    key = text.partition("=")[0].lstrip("+").strip()
    return re.sub(r"\[(\d+)\]", r".\1", key)


def _script(run: RunDir, plain: dict[str, Any]) -> str:
    from .. import __version__
    from ..conf.load import from_plain
    from ..conf.schema import ClusterKind
    from . import stage
    from .launch import print_warnings
    from .prepare import environment_to_stage, interpreter, problems_of
    from .render import render, script_of

    config = from_plain(plain)
    errors, warnings = problems_of(config, needs_slurm=config.cluster.kind is ClusterKind.slurm)
    if errors:
        raise UserError("\n".join(errors))
    print_warnings(warnings)
    is_given = config.cluster.python or config.cluster.conda
    python = interpreter(config, Path.cwd()) if is_given else str(read_json(run.env).get("python") or "")
    staged = environment_to_stage(config, python)
    if staged is not None:
        stage.ensure(staged)
    archive = staged.archive if staged else None
    return render(script_of(config, run.path, str(read_json(run.run)["id"]), __version__, python, archive))
