"""`stoker launch KEY=VALUE ...`: freeze a run and submit it.

Owns: the verb's arguments, what is printed, and taking the run directory away again when Slurm refuses. The steps are
prepare.py's, freeze.py's and executor.py's; they are imported after the arguments are read, so that help is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .avoid import findings
from .avoid import options as bad_nodes
from .errors import UserError
from .local import local_log, start_detached
from .options import parse, parser, request
from .run.effective import effective_config
from .run.layout import RunDir
from .run.outcome import EXIT_FINISHED
from .run.submissions import Submission, new_submission

if TYPE_CHECKING:
    from .prepare import Prepared


def main(argv: list[str]) -> int:
    p = parser("launch", "Freeze a run and submit it to Slurm; cluster=local starts it in the background.")
    p.add_argument("--no-submit", action="store_true", help="freeze, and print the sbatch line")
    p.add_argument(
        "--after", action="append", default=[], metavar="RUN_OR_JOB", help="start when that is over; repeatable"
    )
    p.add_argument(
        "--after-ok",
        action="append",
        default=[],
        metavar="RUN_OR_JOB",
        help="start when that has succeeded; repeatable",
    )
    p.add_argument("--wait", action="store_true", help="wait for the run's end and exit with its exit code")
    p.add_argument("--follow", action="store_true", help="the same, and show the logs meanwhile")
    arguments = parse(p, argv)
    from ..conf.load import to_plain
    from ..conf.schema import ClusterKind
    from .freeze import freeze
    from .prepare import prepare

    is_trial = arguments.dry_run or arguments.no_submit
    prepared = prepare(request("launch", argv, arguments), needs_slurm=not is_trial)
    print_warnings(prepared.warnings)
    is_local = prepared.config.cluster.kind is ClusterKind.local
    options = _dependency(arguments, is_local)
    if not is_local:
        options += bad_nodes(RunDir(prepared.plan.directory), to_plain(prepared.config))
    if arguments.dry_run:
        show(prepared, options)
        return EXIT_FINISHED
    root_is_new = not prepared.plan.directory.parent.exists()
    run = freeze(prepared.plan, os.environ)
    tell(f"run directory: {run.path}")
    if arguments.no_submit:
        tell(f"to start it:   {_start_line(run, is_local, options)}")
        return EXIT_FINISHED
    if is_local:
        start_here(new_submission(run, "local"))
    else:
        _submit_new(run, root_is_new, options)
    if arguments.wait or arguments.follow:
        return wait(run, arguments.follow)
    for verb in ("status", "logs -f", "cancel"):
        tell(f"next:          stoker {verb} {shlex.quote(str(run.path))}")
    return EXIT_FINISHED


def tell(text: str) -> None:
    """Print what must not decide whether a run starts: there may be a full disk, or nobody, behind standard output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (lives as long as we)
    except OSError as e:
        print(f"stoker: warning: standard output: {e}; what is told goes here\n{text}", file=sys.stderr)
        sys.stdout = sys.stderr


def print_warnings(warnings: Iterable[str]) -> None:
    with contextlib.suppress(OSError):  # nobody there: as in `tell`
        for line in warnings:
            print(f"stoker: warning: {line}", file=sys.stderr)


def _dependency(arguments: argparse.Namespace, is_local: bool) -> list[str]:
    """sbatch's options for --after and --after-ok; notes on them are printed."""
    if not arguments.after and not arguments.after_ok:
        return []
    if is_local:
        raise UserError("--after: Slurm does the waiting, and cluster=local has none; start it when that is over")
    from .after import dependencies

    found = dependencies(arguments.after, arguments.after_ok)
    print_warnings(found.notes)
    return [f"--dependency={found.dependency}"] if found.dependency else []


def show(prepared: Prepared, options: Sequence[str] = ()) -> None:
    """What a launch would freeze and submit."""
    plan = prepared.plan
    print(f"# would be made: {plan.directory} ({len(plan.snapshot.files)} files of code)")
    if options:
        print(f"# to sbatch, for this submission alone: {shlex.join(options)}")
    print(f"# config.yaml\n{plan.yaml}")
    print(f"# submit.sbatch\n{plan.script}", end="")


def _start_line(run: RunDir, is_local: bool, options: Sequence[str]) -> str:
    return shlex.join(["stoker", "resume", str(run.path)] if is_local else ["sbatch", *options, str(run.script)])


def start_here(submission: Submission) -> None:
    process = start_detached(submission)
    tell(f"in background: process {process.pid}, output in {local_log(submission.run)}")


def submit_frozen(run: RunDir, submission: Submission) -> None:
    """Give a frozen run to Slurm and print the job.

    Raises:
        SubmissionError: it was refused, or Slurm did not answer.
    """
    from .executor import FrozenRun, StokerExecutor
    from .submit import SubmissionError

    try:
        job = StokerExecutor(run.path.parent).submit(FrozenRun(run.path, submission))
    except SubmissionError as e:
        if not e.may_be_queued:
            raise
        hint = f"{run.path} is kept: if no job of yours shows up in `squeue --me`, `stoker resume` submits it again"
        raise SubmissionError(f"{e}\n{hint}", may_be_queued=True) from e
    for finding in findings(run, effective_config(run)).values():
        until = time.strftime("%m-%d %H:%M", time.localtime(finding.until))
        tell(f"bad node:      {finding.node} until {until}: {finding.reason}")
    tell(f"job:           {job.job_id}")


def _submit_new(run: RunDir, root_is_new: bool, options: Sequence[str]) -> None:
    from .executor import intend
    from .freeze import discard
    from .submit import SubmissionError

    try:
        submit_frozen(run, intend(run, options=list(options)))
    except SubmissionError as e:
        if not e.may_be_queued:
            discard(run, with_root=root_is_new)
        raise


def wait(run: RunDir, is_following: bool) -> int:
    """Wait for the run's end; its exit code. Ctrl-C ends the waiting, not the run."""
    from .logs import follower
    from .watch import wait_for_end

    out = follower(run)
    try:
        end = wait_for_end(run, out.poll if is_following else lambda: False)
    except KeyboardInterrupt:
        print(f"\nthe run goes on; to stop it: stoker cancel {shlex.quote(str(run.path))}", file=sys.stderr)
        return 130
    if is_following:
        out.poll(with_torn=True)
    print(f"{end.state.value} {end.detail}".rstrip())
    assert end.exit_code is not None
    return end.exit_code
