"""`stoker checkpoint prune RUN [--keep N ...]`: removes what retention would, on demand.

Owns: the arguments, and what must be sure before anything goes: that what stays can be trusted, and that nobody is at
work who needs what goes. Does not own: the choice (run/retention.py). Standard library only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .checkpoint_look import Found, Health, look_around, reasons, retention_of, settings_of
from .checkpoint_ls import amount
from .checkpoint_verify import ProgressLine
from .errors import UserError, environment_error
from .find import find_run
from .run.files import give_up
from .run.layout import CheckpointName, RunDir
from .run.outcome import EXIT_FAILED, EXIT_FINISHED
from .run.retention import Retention
from .run.verification import told, verify_directory
from .run.views import events
from .state import State, look, queue_of

EPILOG = """examples:
  stoker checkpoint prune llama-261130-104733-x7q2 --keep 3 --dry-run
  stoker checkpoint prune llama-261130-104733-x7q2 --keep 1 --keep-every 10000 --keep-best 2
What is not given is as the run has it (checkpoint.keep, keep_every, keep_best). Before anything is removed, one of
those that stay has been read whole and found good: now, or before. Of a run that is not running, what killed saves
left behind goes too."""
_ALIVE = (State.RUNNING, State.SUSPENDED, State.UNKNOWN)


@dataclass(frozen=True)
class Plan:
    """What goes, and what stays and why."""

    going: tuple[Found, ...]
    staying: dict[CheckpointName, tuple[str, ...]]

    @property
    def freed(self) -> int:
        return sum(f.size or 0 for f in self.going)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "stoker checkpoint prune",
        description="Remove checkpoints that need not be kept.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="run directory, or job id")
    p.add_argument("--keep", type=int, metavar="N", help="so many of the newest valid ones, at least 1")
    p.add_argument("--keep-every", type=int, metavar="STEPS", help="those at multiples of it; 0: none because of that")
    p.add_argument("--keep-best", type=int, metavar="N", help="so many with the lowest validation loss")
    p.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    p.add_argument("--json", action="store_true", help="one JSON object, for programs")
    arguments = p.parse_args(argv)
    run = find_run(arguments.run)
    if run.checkpoints.is_symlink() and not run.checkpoints.exists():
        leads = f"{run.checkpoints} leads to {run.checkpoints.readlink()}"
        raise environment_error(f"{leads}, which is not there: nothing can be removed")
    found = look_around(run)
    own = with_history(run, retention_of(settings_of(run), found))
    plan = make_plan(run, found, own, _wanted(arguments, own, run), arguments.dry_run)
    if not arguments.dry_run:
        remove(plan.going)
    _tell(plan, arguments.dry_run, arguments.json)
    return EXIT_FINISHED


def _wanted(arguments: argparse.Namespace, own: Retention, run: RunDir) -> Retention:
    """What the arguments say, and of what they do not, what the run has."""
    numbers = {"--keep": arguments.keep, "--keep-every": arguments.keep_every, "--keep-best": arguments.keep_best}
    for name, value in numbers.items():
        least = 1 if name == "--keep" else 0
        if value is not None and value < least:
            raise UserError(f"{name} {value}: expected at least {least}")
    keep, every, best = (
        said if given is None else given
        for given, said in zip(numbers.values(), (own.keep, own.keep_every, own.keep_best), strict=True)
    )
    if keep < 1:
        raise UserError(f"{run.path}: its configuration does not say what to keep; give --keep N")
    return replace(own, keep=keep, keep_every=every, keep_best=best)


def make_plan(run: RunDir, found: Sequence[Found], own: Retention, wanted: Retention, is_dry: bool) -> Plan:
    """`own`: what the run itself keeps.

    Raises UserError: a running run needs what would go, or nothing that would stay can be trusted."""
    last_attempt = max((a.number for a in run.all_attempts()), default=0)
    is_alive = look(run, queue_of([run])).state in _ALIVE and last_attempt > 0
    why = trusted(wanted, found, is_dry)
    going = [f for f in found if f.health is not Health.UNFINISHED and not why[f.name]]
    if is_alive:
        needed = reasons(own, found)
        touched = [str(f.name) for f in going if needed[f.name]]
        if touched:
            raise environment_error(
                f"{run.path}: is running and keeps {', '.join(touched[:5])}; nothing was removed. Cancel it first, or "
                f"give at least what it keeps itself: --keep {max(own.keep, 1)} --keep-every {own.keep_every} "
                f"--keep-best {own.keep_best}"
            )
    else:  # of attempts that were known before anybody was asked whether one is alive
        going += [f for f in found if f.health is Health.UNFINISHED and f.name.attempt <= last_attempt]
    return Plan(tuple(going), {name: found_why for name, found_why in why.items() if found_why})


def with_history(run: RunDir, retention: Retention) -> Retention:
    """With what attempts told: which ones they restored from, and which they found bad."""
    proven, rejected = set(retention.proven), set(retention.rejected)
    for event in events(run):
        name = CheckpointName.parse(str(event.get("name", "")))
        if name is not None and event.get("event") in ("restored", "checkpoint_rejected"):
            (proven if event["event"] == "restored" else rejected).add(name)
            (rejected if event["event"] == "restored" else proven).discard(name)
    return replace(retention, proven=frozenset(proven), rejected=frozenset(rejected))


def trusted(retention: Retention, found: Sequence[Found], is_dry: bool) -> dict[CheckpointName, tuple[str, ...]]:
    """Why each one stays, once one of those that stay has been read whole; those that turn out bad are no longer
    counted. Nothing is read if nothing would go."""
    by_name = {f.name: f for f in found if f.health is not Health.UNFINISHED}
    while True:
        why = reasons(retention, found)
        staying = [n for n in why if why[n] and by_name[n].is_valid and n not in retention.rejected]
        if all(why.values()) or is_dry or any(n in retention.proven for n in staying):
            return why
        assert staying, "with no valid one, all stay"
        newest = by_name[staying[0]]
        if _is_good(newest):
            retention = replace(retention, proven=retention.proven | {newest.name})
        else:
            retention = replace(retention, rejected=retention.rejected | {newest.name})


def _is_good(found: Found) -> bool:
    """Read all of it, and say so."""
    if found.is_elsewhere:
        return (
            subprocess.run([*_TRAINER, "verify", str(found.directory)], stdout=sys.stderr, check=False).returncode == 0
        )
    with ProgressLine(str(found.name)) as line:
        verdict = verify_directory(found.directory, seen=line)
    print("\n".join(told(verdict)), file=sys.stderr)
    return verdict.is_good


_TRAINER = [sys.executable, "-m", "stoker.train.checkpoint"]


def remove(going: Sequence[Found]) -> None:
    """In one call each no checkpoint any more, then deleted.

    Raises:
        OSError, UserError: one could not be taken away; those before it are gone.
    """
    elsewhere = [str(f.directory) for f in going if f.is_elsewhere]
    if elsewhere and subprocess.run([*_TRAINER, "remove", *elsewhere], check=False).returncode:
        raise UserError("not all could be removed from the object store; see above", EXIT_FAILED)
    for f in going:
        if not f.is_elsewhere and (left := give_up(f.directory)) is not None:
            shutil.rmtree(left)


def _tell(plan: Plan, is_dry: bool, as_json: bool) -> None:
    if as_json:
        removed = [{"name": f.directory.name, "bytes": f.size, "state": f.health.value} for f in plan.going]
        kept = {str(name): list(why) for name, why in plan.staying.items()}
        print(json.dumps({"dry_run": is_dry, "removed": removed, "freed": plan.freed, "kept": kept}))
        return
    word = "would remove" if is_dry else "removed"
    for f in plan.going:
        size = "" if f.size is None else f", {amount(f.size)}"
        print(f"{word} {f.directory.name} ({f.health.value}{size})")
    print(f"{word} {len(plan.going)}, {amount(plan.freed)}; {len(plan.staying)} stay")
