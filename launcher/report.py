"""`stoker report RUN [--bundle [FILE]]`: a run's story as Markdown, or everything for a bug report in one archive.

Owns: the verb, and what is asked of Slurm for it. The story is report_text.py's, the archive bundle.py's. Works on
damaged runs, and where there is no Slurm. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from . import bundle as b
from . import slurm
from .errors import UserError, environment_error
from .find import find_run
from .redact import Redactor
from .report_text import summary
from .run.files import read_json
from .run.layout import RunDir
from .run.outcome import EXIT_FINISHED
from .run.submissions import submissions
from .running import running
from .site_ask import ask
from .stacks import is_wanted, stacks, text_of
from .state import RunState, State, cluster_of, look, queue_of

_QUESTION = 15.0  # seconds that one question to Slurm may take


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker report", description="Tell a run's story, or pack it for a bug report.")
    parser.add_argument("run", metavar="RUN", help="run directory, or job id")
    parser.add_argument("--bundle", nargs="?", const="", metavar="FILE.tar.gz", help="pack an archive without secrets")
    parser.add_argument("--with-code", action="store_true", help="with the frozen code, as it is")
    parser.add_argument("--anonymous", action="store_true", help="mask user name, home directory and mail addresses")
    arguments = parser.parse_args(argv)
    run = find_run(arguments.run)
    if arguments.bundle is None:
        if arguments.with_code or arguments.anonymous:
            raise UserError("--with-code and --anonymous go with --bundle")
        print(summary(run, state_of(run)), end="")
        return EXIT_FINISHED
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = Path(arguments.bundle or f"{run.path.name}-report-{stamp}.tar.gz")
    if os.path.lexists(target):
        raise UserError(f"--bundle {target}: exists already; name another file, or none")
    pack(run, target, arguments.with_code, arguments.anonymous)
    return EXIT_FINISHED


def state_of(run: RunDir) -> RunState:
    """Its state; UNKNOWN for a run whose files do not say."""
    try:
        return look(run, queue_of([run]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        return RunState(State.UNKNOWN, f"its files cannot be read: {e}")


def pack(run: RunDir, target: Path, with_code: bool, is_anonymous: bool) -> None:
    """Make the archive and say what is in it."""
    made = b.Bundle(run, Redactor(os.environ, _commits(run)), is_anonymous)
    state = state_of(run)
    made.try_add("summary.md", lambda: summary(run, state))
    made.try_add("versions.txt", lambda: b.versions([("slurm", _ask(["sinfo", "--version"]))]))
    _add_slurm(made)
    if state.state in (State.RUNNING, State.SUSPENDED):
        made.try_add("stacks.txt", lambda: _stacks(run))
    b.collect_files(made)
    made.try_add("files.txt", lambda: b.listing(run, made.notes))
    if with_code:
        try:
            made.blobs["code.tar.gz"] = run.code.read_bytes()
        except OSError as e:
            made.notes.append(f"code.tar.gz: {e.strerror or e}")
    cleaned = made.cleaned()
    table = made.redactor.clean(b.contents(made, cleaned))
    cleaned["CONTENTS.txt"] = b.without_person(table) if is_anonymous else table
    try:
        size = b.write(made, target, cleaned)
    except OSError as e:
        raise environment_error(f"--bundle {target}: {e.strerror or e}") from e
    print(table)
    print(f"{target}: {size / 2**20:.1f} MiB")


def _commits(run: RunDir) -> list[str]:
    """Commits of the run's code, which look like W&B keys."""
    try:
        git = read_json(run.run).get("git")
    except (OSError, ValueError):
        return []
    return [v for v in git.values() if isinstance(v, str)] if isinstance(git, dict) else []


def _add_slurm(made: b.Bundle) -> None:
    """What Slurm still knows of the run's jobs, and of the site."""
    jobs: dict[str, str | None] = {}
    try:
        jobs = {s.job_id: cluster_of(s) for s in submissions(made.run) if s.job_id}
    except (OSError, ValueError, KeyError) as e:
        made.notes.append(f"slurm/: {e}")
    for job_id, cluster in list(jobs.items())[-5:]:
        where = [f"--clusters={cluster}"] if cluster else []
        asked = [
            ("scontrol-show-job", ["scontrol", *where, "show", "job", job_id]),
            ("squeue", ["squeue", *where, "--states=all", f"--jobs={job_id}", "--long"]),
            ("sacct", ["sacct", *where, f"--jobs={job_id}", "--duplicates", "--long", "--parsable2"]),
        ]
        for name, command in asked:
            made.add(f"slurm/{job_id}-{name}.txt", _ask(command))
    if jobs:
        made.try_add("slurm/site.json", _site)
        made.add("slurm/config.txt", _ask(["scontrol", "show", "config"]))
        made.add("slurm/partitions.txt", _ask(["scontrol", "show", "partition"]))
        made.add("slurm/nodes.txt", _ask(["sinfo", "-N", "-o", "%N %T %E"]))


def _site() -> str:
    """What `stoker site` knows; empty where Slurm does not answer."""
    found = ask()
    return "" if found is None else json.dumps(asdict(found), indent=2, default=str) + "\n"


def _ask(command: list[str]) -> str:
    try:
        reply = slurm.call(command, _QUESTION)
    except UserError as e:
        return f"{e}\n"
    said = reply.out + reply.err
    return said if reply.code == 0 else f"{said}(exit code {reply.code})\n"


def _stacks(run: RunDir) -> str:
    r = running(run)
    found = stacks(r)
    return text_of(r, [a for a in found.answers if is_wanted(a, (), True)], found.problems)
