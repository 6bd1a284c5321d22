"""`stoker stacks RUN`: where every rank of a running run stands, in Python and in the kernel, all at once.

Owns: the verb, and running the helper (stacks_node.py) on every node beside the workers. The run goes on meanwhile.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from .environment import without_outer_job
from .errors import UserError, environment_error
from .find import find_run
from .run.outcome import EXIT_FAILED, EXIT_FINISHED
from .running import Running, helper, running, srun_command
from .stacks_node import LIMIT, Answer, collect, decode, targets
from .stacks_text import render

WAIT = 30.0  # seconds for srun to reach the nodes, and for their answers to come back


@dataclass(frozen=True)
class Found:
    answers: tuple[Answer, ...]
    problems: tuple[str, ...]  # nodes without an answer, and what srun said


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker stacks", description="Show where every rank of a running run stands.")
    parser.add_argument("run", metavar="RUN", help="run directory, or job id")
    parser.add_argument("--rank", type=int, action="append", default=[], metavar="N", help="only this rank; may repeat")
    parser.add_argument("--all", action="store_true", help="supervisor, agents, zygotes and writers too")
    parser.add_argument("--timeout", type=float, default=WAIT, metavar="SECONDS", help="how long to wait for nodes")
    arguments = parser.parse_args(argv)
    r = running(find_run(arguments.run))
    world = int(r.config["cluster"]["procs_per_node"]) * r.node_count
    for rank in arguments.rank:
        if not 0 <= rank < world:
            raise UserError(f"--rank {rank}: the run has ranks 0 to {world - 1}")
    found = stacks(r, arguments.rank, arguments.timeout)
    shown = [a for a in found.answers if is_wanted(a, arguments.rank, arguments.all)]
    print(text_of(r, shown, found.problems, is_all=not arguments.rank))
    return EXIT_FINISHED if shown and not found.problems else EXIT_FAILED


def is_wanted(a: Answer, ranks: Sequence[int], with_all: bool) -> bool:
    return with_all if a.rank is None else not ranks or a.rank in ranks


def text_of(r: Running, shown: Sequence[Answer], problems: Sequence[str], is_all: bool = True) -> str:
    """What `stoker stacks` prints."""
    told = {a.rank for a in shown if a.rank is not None}
    world = int(r.config["cluster"]["procs_per_node"]) * r.node_count
    lines = [f"{r.run.path.name}, attempt {r.attempt.number}: {len(told)} of {world} ranks; most recent call first"]
    if shown:
        lines += ["", render(shown)]
    if is_all and len(told) < world and not problems:
        lines += ["", f"{world - len(told)} ranks have no process (they start, or have ended)"]
    return "\n".join([*lines, *(("", *problems) if problems else ())])


def stacks(r: Running, ranks: Sequence[int] = (), timeout: float = WAIT) -> Found:
    """Ask every node of the attempt, or those of `ranks`.

    Raises:
        UserError: srun is not here.
    """
    if r.job_id is None:
        return Found(tuple(collect(targets(r.run, r.attempt.number, None))), ())
    of_ranks = [r.node_of(rank) for rank in ranks]
    nodes = list(dict.fromkeys(n for n in of_ranks if n is not None)) if None not in of_ranks else []
    words = helper(r, "stoker.launcher.stacks_node", str(r.attempt.number), f"--limit={LIMIT}")
    out, err, is_late = _run([*srun_command(r, nodes, "--input=none"), *words], timeout)
    by_node = decode(out)
    missing = [n for n in nodes or r.nodes if n not in by_node]
    problems = []
    if missing or (not r.nodes and len(by_node) < r.node_count):
        how = f"within {timeout:g} s" if is_late else "(srun ended)"
        problems.append(f"no answer {how} from {', '.join(missing) or 'some nodes'}")
        problems += [f"  {line}" for line in err.strip().splitlines()[-10:]]
    return Found(tuple(a for answers in by_node.values() for a in answers), tuple(problems))


def _run(command: Sequence[str], timeout: float) -> tuple[str, str, bool]:
    """(output, error output, whether it was ended for taking too long). srun gets a moment to end its step."""
    try:
        process = subprocess.Popen(
            command,
            env=without_outer_job(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as e:
        raise environment_error("no Slurm here (srun not found): do this where Slurm's commands are") from e
    is_late = False
    for patience in (timeout, 5.0):
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=patience)
            return out, err, is_late
        is_late = True
        process.terminate()
    process.kill()
    out, err = process.communicate()
    return out, err, True
