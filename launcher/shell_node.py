"""`python RUN_DIR/bootstrap.py stoker.launcher.shell_node RUN_DIR ATTEMPT NODE [--container] -- [COMMAND...]`.

Owns: becoming a shell or a command with the environment that a run's workers have on this node: that of the process
they are started from, as the kernel knows it. Nothing of it crosses the network. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from . import procfs
from .container import DEAF, entry
from .errors import environment_error
from .run.effective import effective_config
from .run.files import read_json
from .run.layout import RunDir
from .stacks_node import targets

# Of one process alone, or what would break the run's own parts a second time.
_NOT_FOR_OTHERS = {"STOKER_TOKEN", "STOKER_SUPERVISOR", "STOKER_ZYGOTE_FD", "STOKER_AGENT_PID", "STOKER_FAILPOINTS"}
# Of the terminal, or of the step that we are in.
_OURS = ("TERM", "COLORTERM", "COLUMNS", "LINES", "DISPLAY", "SSH_AUTH_SOCK")


def environment(theirs: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """What the workers were started with, in our terminal and our step."""
    env = {k: v for k, v in theirs.items() if k not in _NOT_FOR_OTHERS}
    return env | {k: v for k, v in ours.items() if k in _OURS or k.startswith(("SLURM_STEP", "SLURM_TASK"))}


def enter(run: RunDir, attempt: int, node: str, command: Sequence[str], in_container: bool) -> NoReturn:
    """Become `command`, or an interactive shell, in the run directory.

    Raises:
        UserError: there is no such program.
    """
    found = {t.offer.role: t.pid for t in targets(run, attempt, node)}
    pid = found.get("zygote", found.get("agent"))
    theirs = procfs.environment(pid) if pid is not None else {}
    if not theirs:
        print(f"stoker shell: no process of attempt {attempt} on {node} can be seen; this step's own environment",
              file=sys.stderr, flush=True)  # fmt: skip
    env = environment(theirs, os.environ) if theirs else dict(os.environ)
    words = list(command) or [shell(env, in_container), "-i"]
    if in_container:
        words = [*_inside(run, attempt, env), *words]
    os.chdir(run.path)
    try:
        # Found on the PATH of the run; the container's own program on ours.
        os.execvpe(words[0], words, env)
    except OSError as e:
        raise environment_error(f"{words[0]}: {e.strerror}") from e


def shell(env: Mapping[str, str], in_container: bool) -> str:
    """The user's on the host; inside, what every image has."""
    return "/bin/sh" if in_container else env.get("SHELL") or "/bin/bash"


def _inside(run: RunDir, attempt: int, env: Mapping[str, str]) -> list[str]:
    """What stands before a command in the run's container: as before the agent, but Ctrl-C works."""
    submission = int(read_json(run.attempt(attempt).start)["submission"])
    config = effective_config(run, submission)
    program = shutil.which("apptainer") or shutil.which("singularity") or "apptainer"
    local = env.get("STOKER_LOCAL_DIR") or "/tmp"
    words = list(entry(config, str(run.path), sys.executable, local, program).words)
    if tuple(words[: len(DEAF)]) == DEAF:
        words = words[len(DEAF) :]
    return [shutil.which(words[0]) or words[0], *words[1:]]


def main(argv: list[str]) -> int:
    at = argv.index("--")
    run, attempt, node, *rest = argv[:at]
    enter(RunDir(Path(run)), int(attempt), node, argv[at + 1 :], "--container" in rest)


if __name__ == "__main__":
    from .errors import UserError

    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        print(f"stoker shell: error: {e}", file=sys.stderr)
        sys.exit(127)
