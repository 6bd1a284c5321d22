"""`stoker rehearse` (`make rehearse`): drills with verdicts, on a private cluster or here, and what each stop cost.

Owns: the verb, the pool that runs drills side by side, and the report. What a drill does is drills.py's, what must be
true afterwards verdict.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from ..errors import UserError, environment_error
from ..run.outcome import EXIT_FAILED, EXIT_FINISHED
from .drills import DRILLS, Disturbed, Drill, Needs
from .ground import Ground, choose, orderly_end, short_directory, temporary_cluster
from .lab import STEPS, Lab
from .report import Result, as_json, report, table
from .spec import ClusterSpec
from .trial import Trial, wait_for
from .verdict import Calm, find, judge

T = TypeVar("T")
PATIENCE = 300.0  # seconds for one drill's run to end; a bound against waiting for ever


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker rehearse", description="Break a small run in every way; report the cost.")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these drills")
    parser.add_argument("--list", action="store_true", help="name the drills and end")
    here = "the drills that need no cluster of their own: in this allocation, or on this machine without Slurm"
    parser.add_argument("--here", action="store_true", help=here)
    parser.add_argument("--parallel", type=int, metavar="N", help="drills side by side (3; 1 in an allocation)")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="for the runs; on storage that all nodes see")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a report in Markdown there")
    options = parser.parse_args(argv)
    chosen = select(options.only)
    if options.list:
        print("\n".join(f"{d.name:<14} {d.what}{_where(d)}" for d in chosen))
        return EXIT_FINISHED
    in_allocation = options.here and "SLURM_JOB_ID" in os.environ
    parallel = options.parallel or (1 if in_allocation else 3)
    if parallel < 1:
        raise UserError(f"--parallel {parallel}: expected 1 or more")
    for path in filter(None, (options.json, options.report)):
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path}: there is no directory {path.parent} to write it to")
    with orderly_end():
        return rehearse(chosen, options, in_allocation, parallel)


def select(names: Sequence[str]) -> list[Drill]:
    """The drills of these names in the table's order; all of them for no name."""
    known = [d.name for d in DRILLS]
    if unknown := [n for n in names if n not in known]:
        raise UserError(f"no drill {', '.join(unknown)}; there are {', '.join(known)}")
    return [d for d in DRILLS if not names or d.name in names]


def _where(drill: Drill) -> str:
    return "" if drill.needs in (Needs.NOTHING, Needs.REQUEUE) else " [not with --here]"


def rehearse(chosen: list[Drill], options: argparse.Namespace, in_allocation: bool, parallel: int) -> int:
    began = time.time()
    with _place(chosen, options, in_allocation, parallel) as (lab, offer):
        print(f"runs in {lab.root}", flush=True)
        try:
            results = Pool(lab, offer, parallel).run(chosen)
        except KeyboardInterrupt:
            print(f"stoker rehearse: stopped; what was done so far is kept in {lab.root}", file=sys.stderr)
            raise
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(as_json(results, began), indent=2) + "\n", encoding="utf-8")
    if options.report:
        options.report.write_text(report(results, began, parallel, lab), encoding="utf-8")
    is_good = all(r.verdict != "FAIL" for r in results)
    if is_good:
        _remove(lab.root, options.dir)
    return EXIT_FINISHED if is_good else EXIT_FAILED


@contextmanager
def _place(
    chosen: list[Drill], options: argparse.Namespace, in_allocation: bool, parallel: int
) -> Iterator[tuple[Lab, Needs]]:
    """The lab, and the most that it offers to drills."""
    if options.here:
        offer = Needs.NOTHING if in_allocation else Needs.REQUEUE
        _refuse_if_none(chosen, offer)
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if in_allocation else 2
        lab = Lab(_root(options.dir, in_allocation), None, in_allocation, nodes)
        try:
            yield lab, offer
        finally:
            lab.close()
        return
    ground, lacking = choose()
    if ground is Ground.LOCAL:
        raise environment_error(f"{lacking}; or use --here, which needs no Slurm")
    if lacking:
        print(f"({lacking}: drills that need isolated nodes are left out)")
    is_isolated = ground is Ground.ISOLATED
    offer = Needs.CABLES if is_isolated else Needs.SLURM
    _refuse_if_none(chosen, offer)
    root = _root(options.dir, in_allocation)
    # Each drill has two nodes of its own, and a third one where it breaks some.
    broken = sum(sorted((d.nodes_broken for d in chosen), reverse=True)[:parallel])
    share = (str(root),) if is_isolated and Path("/tmp") in root.parents else ()
    spec = ClusterSpec(nodes=2 * parallel + broken + 1, isolate=is_isolated, share=share)
    with temporary_cluster(spec) as cluster:
        print(f"a private Slurm of {spec.nodes} {ground.value} nodes is up", flush=True)
        lab = Lab(root, cluster)
        try:
            yield lab, offer
        finally:
            lab.close()


def _refuse_if_none(chosen: Sequence[Drill], offer: Needs) -> None:
    if not any(d.needs.value <= offer.value for d in chosen):
        reasons = dict.fromkeys(f"{d.name}: {_lack(d.needs, offer)}" for d in chosen)
        raise environment_error("none of these drills can be held here\n" + "\n".join(reasons))


def _root(given: Path | None, in_allocation: bool) -> Path:
    if given is not None:
        root = given.expanduser().resolve()
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise UserError(f"--dir {given}: is not empty; name a new directory")
        return root
    if in_allocation:
        root = Path.cwd() / f"rehearse-{os.environ['SLURM_JOB_ID']}-{os.getpid()}"
        root.mkdir()
        return root
    return short_directory("stoker-rehearse")


def _remove(root: Path, given: Path | None) -> None:
    if given is None:
        shutil.rmtree(root, ignore_errors=True)


class Pool:
    """Runs drills side by side; `offer`: what the place has."""

    def __init__(self, lab: Lab, offer: Needs, parallel: int) -> None:
        self.lab, self.offer, self.parallel = lab, offer, parallel

    def run(self, chosen: Sequence[Drill]) -> list[Result]:
        """Results in the order of `chosen`. Raises UserError when the undisturbed run does not finish."""
        able = [d for d in chosen if d.needs.value <= self.offer.value]
        self.lab.prepare()
        calm: Future[Calm] = Future()
        futures: dict[str, Future[Result]] = {d.name: Future() for d in able}
        waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
        waiting.put(lambda: _fulfil(calm, self._calm))
        for d in sorted(able, key=lambda d: -d.seconds):
            waiting.put(partial(_fulfil, futures[d.name], partial(self._drill, d, calm)))
        for _ in range(self.parallel):
            # Daemons: an interrupted rehearsal must not wait for drills whose cluster is gone.
            Thread(target=_work_off, args=(waiting,), daemon=True).start()
        calm.result()
        found = {name: future.result() for name, future in futures.items()}
        return [found.get(d.name) or Result(d.name, d.what, skipped=_lack(d.needs, self.offer)) for d in chosen]

    def _calm(self) -> Calm:
        trial = self.lab.launch("calm")
        outcome = _wait_end(trial)
        losses, weights = trial.losses(), trial.weights(STEPS)
        if sorted(losses) != list(range(1, STEPS + 1)) or not weights:
            raise environment_error(f"the undisturbed run did not finish: {outcome}\n{trial.story()}")
        _say("the undisturbed run has finished")
        return Calm(losses, weights)

    def _drill(self, drill: Drill, calm: Future[Calm]) -> Result:
        began = time.monotonic()
        disturbed: Disturbed | None = None
        try:
            disturbed = drill.act(self.lab, drill.name)
            _wait_end(disturbed.trial)
            facts = find(disturbed.trial, STEPS, disturbed.at)
            wrong = [*judge(facts, drill.expected, calm.result()), *disturbed.also()]
            result = Result(
                drill.name,
                drill.what,
                tuple(wrong),
                steps_lost=facts.cost.steps_lost,
                seconds=facts.cost.seconds,
                attempts=len(facts.causes),
                total_seconds=time.monotonic() - began,
                run=str(disturbed.trial.dir.path),
            )
        except Exception as e:  # a drill that cannot be held has failed; the others go on
            result = Result(drill.name, drill.what, (self._told(drill, e),), run=str(self.lab.root))
        finally:
            self._tidy(drill, disturbed)
        _say(f"{result.verdict} {drill.name} ({time.monotonic() - began:.0f} s)")
        return result

    def _told(self, drill: Drill, error: Exception) -> str:
        """The first line is for the table, all of it goes to a file beside the run."""
        path = self.lab.root / f"{drill.name}.failure.txt"
        path.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        first = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {first} (all of it: {path})"

    def _tidy(self, drill: Drill, disturbed: Disturbed | None) -> None:
        try:
            if disturbed is not None:
                disturbed.mend()
            self.lab.stop(drill.name)
        except Exception as e:
            _say(f"{drill.name}: could not tidy up: {type(e).__name__}: {e}")


def _work_off(waiting: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        try:
            work = waiting.get_nowait()
        except Empty:
            return
        work()


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as e:
        future.set_exception(e)


def _wait_end(trial: Trial) -> str:
    wait_for(trial.is_over, lambda: f"the end of {trial.story()}", PATIENCE)
    last = trial.outcomes()[-1]
    return "no word" if last is None else f"{last.cause.value}: {last.reason}"


def _lack(needs: Needs, offer: Needs) -> str:
    if needs is Needs.REQUEUE:
        return "an interactive allocation is not requeued"
    return "needs isolated nodes" if offer is Needs.SLURM else "needs a private cluster (without --here)"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    from ..cli import main as stoker

    sys.exit(stoker(["rehearse", *sys.argv[1:]]))
