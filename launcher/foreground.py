"""`stoker run KEY=VALUE ...`: freeze a run and work on it here, in the foreground.

Owns: the verb. On a workstation with cluster=local; inside an allocation (salloc) on its nodes. The loop is local.py's.
"""

from __future__ import annotations

import os
import sys
import threading

from . import local
from .launch import print_warnings, show, tell
from .options import parse, parser, request
from .run.layout import RunDir
from .run.outcome import EXIT_FINISHED
from .run.submissions import new_submission


def main(argv: list[str]) -> int:
    p = parser("run", "Freeze a run and work on it here: cluster=local, or inside salloc on its nodes.")
    arguments = parse(p, argv)
    from ..conf.schema import ClusterKind
    from .errors import environment_error
    from .freeze import freeze
    from .prepare import prepare

    prepared = prepare(request("run", argv, arguments), needs_slurm=False)
    print_warnings(prepared.warnings)
    if arguments.dry_run:
        show(prepared)
        return EXIT_FINISHED
    job_id = None if prepared.config.cluster.kind is ClusterKind.local else os.environ.get("SLURM_JOB_ID")
    if job_id is None and prepared.config.cluster.kind is not ClusterKind.local:
        raise environment_error(
            "cluster.kind=slurm, and this is not inside an allocation (SLURM_JOB_ID is not set): "
            "use salloc first, `stoker launch`, or cluster=local"
        )
    run = freeze(prepared.plan, os.environ)
    tell(f"run directory: {run.path}")
    return work(run, job_id)


def work(run: RunDir, job_id: str | None) -> int:
    """Work on a frozen run until it ends, showing its logs; the run's exit code."""
    submission = new_submission(run, "local" if job_id is None else "salloc")
    if job_id is not None:
        submission.set_job(job_id)
    with _shown(run):
        return local.Loop(submission, inside_slurm=job_id is not None).run()


class _shown:
    """Prints the run's logs from a thread while the body works."""

    def __init__(self, run: RunDir) -> None:
        from .logs import follower

        self._out = follower(run)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=10.0)
        self._poll(with_torn=True)

    def _follow(self) -> None:
        while not self._is_over.wait(0.3) and self._poll():
            pass

    def _poll(self, with_torn: bool = False) -> bool:
        """False once nobody reads any more (`| head`), or there is no room: the run goes on, its logs are files."""
        try:
            self._out.poll(with_torn)
            sys.stdout.flush()
        except (OSError, ValueError):  # ValueError: closed meanwhile
            tell("")  # gives a broken output up
            return False
        return True
