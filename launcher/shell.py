"""`stoker shell RUN [NODE] [-- COMMAND...]`: a shell, or a command, on a node of a running run, as its workers see it.

Owns: the verb, and which node is meant. What the environment is, shell_node.py finds out on the node. The exit code is
the command's. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .container import entry, environment_inside
from .environment import without_outer_job
from .errors import UserError, environment_error
from .find import find_run
from .running import Running, culprit_node, helper, running, srun_command
from .shell_node import enter

_MODULE = "stoker.launcher.shell_node"


def main(argv: list[str]) -> int:
    own, command = split(argv)
    parser = argparse.ArgumentParser(
        "stoker shell",
        usage="stoker shell [-h] [--container] RUN [NODE] [-- COMMAND...]",
        description="A shell on a node of a running run, in its directory, with the environment of its workers.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, or job id")
    parser.add_argument("node", metavar="NODE", nargs="?", help="default: the one that was named last, else the first")
    parser.add_argument("--container", action="store_true", help="inside the run's container, not on the host")
    arguments = parser.parse_args(own)
    r = running(find_run(arguments.run))
    if arguments.container and r.config["container"]["runtime"] == "none":
        raise UserError("--container: the run uses no container (container.runtime=none); leave it out")
    node = node_of(r, arguments.node)
    if r.job_id is None:
        enter(r.run, r.attempt.number, node, command, arguments.container)
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    _exec(srun_line(r, node, command, has_terminal, arguments.container), r, arguments.container)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and the command after the first `--`."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def node_of(r: Running, asked: str | None) -> str:
    """The node that is meant.

    Raises:
        UserError: the run has no such node, or none has joined yet.
    """
    if asked is not None:
        if r.nodes and asked not in r.nodes:
            raise UserError(f"{asked}: not a node of attempt {r.attempt.number}; there are {', '.join(r.nodes)}")
        return asked
    named = culprit_node(r.attempt)
    if named is not None:
        return named
    if not r.nodes:
        raise environment_error(f"{r.run.path}: its nodes have not joined yet; name one, or try again")
    return r.nodes[0]


def srun_line(
    r: Running, node: str, command: Sequence[str], has_terminal: bool, in_container: bool = False
) -> list[str]:
    """The whole srun call (golden test). pyxis is entered by srun's own options, other containers on the node."""
    options, python = ["--quiet", *(["--pty"] if has_terminal else [])], r.python
    if in_container and r.config["container"]["runtime"] == "pyxis":
        local = r.config["cluster"].get("local_dir") or "/tmp"
        inside = entry(r.config, str(r.run.path), r.python, local, "apptainer")
        options, python, in_container = [*options, *inside.options], inside.python, False
    words = [python, *helper(r, _MODULE, str(r.attempt.number), node)[1:]]
    return [*srun_command(r, [node], *options), *words, *(["--container"] if in_container else []), "--", *command]


def _exec(command: Sequence[str], r: Running, in_container: bool) -> NoReturn:
    """Become srun: terminal, signals and exit code are its."""
    env = without_outer_job(os.environ)
    if in_container:
        env = environment_inside(env, r.config["cluster"]["env"], ())
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), env)
    except FileNotFoundError as e:
        raise environment_error("no Slurm here (srun not found): do this where Slurm's commands are") from e
