"""`stoker checkpoint TOOL ...`: look at, check, compare, prune and convert a run's checkpoints.

Owns: the table of tools. What needs torch is done by `python -m stoker.train.checkpoint`, which takes this process's
place: the launcher never imports the trainer. Standard library only.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from .errors import UserError
from .find import find_run
from .run.outcome import EXIT_FINISHED

# tool -> (module below stoker.launcher; None: the trainer's, what it does)
TOOLS: dict[str, tuple[str | None, str]] = {
    "ls": ("checkpoint_ls", "a run's checkpoints: step, age, size, state, validation loss, why each is kept"),
    "show": ("checkpoint_show", "one checkpoint: layout, settings, progress, tensors"),
    "verify": ("checkpoint_verify", "read every block and check it"),
    "prune": ("checkpoint_prune", "remove what retention would, or what you say"),
    "diff": (None, "compare two checkpoints of any layouts, tensor by tensor"),
    "average": (None, "the mean of several checkpoints' weights"),
    "import": (None, "weights from Hugging Face, or a checkpoint of torch's DCP"),
    "export": (None, "weights for Hugging Face, or a checkpoint for torch's DCP"),
}
USAGE = """usage: stoker checkpoint TOOL ...     (`stoker checkpoint TOOL --help` says more)

{tools}

A checkpoint is named by its directory, by RUN (its newest valid one), RUN/step-00001000-a0001 or RUN:1000.
examples:
  stoker checkpoint ls runs/llama-261130-104733-x7q2
  stoker checkpoint verify llama-261130-104733-x7q2 --all
  stoker checkpoint diff llama-261130-104733-x7q2:1000 llama-261130-104733-x7q2:2000
  stoker checkpoint average llama-261130-104733-x7q2 --last 5 --out averaged"""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(tools="\n".join(f"  {tool:<9} {text}" for tool, (_, text) in TOOLS.items())))
        return EXIT_FINISHED
    tool, *arguments = argv
    if tool not in TOOLS:
        raise UserError(f"unknown tool {tool!r}; expected one of {', '.join(TOOLS)}")
    module = TOOLS[tool][0]
    if module is None:
        hand_over(tool, _with_runs(arguments))
    code: int = importlib.import_module(f".{module}", __package__).main(arguments)
    return code


def _with_runs(arguments: list[str]) -> list[str]:
    """Job ids as the directories of their runs: the trainer's side knows no Slurm. What follows an option is left."""
    found = []
    for before, text in zip(["", *arguments], arguments, strict=False):
        job = re.match(r"\d+(?=$|[:/])", text)
        if job is not None and not before.startswith("-") and not Path(text).exists():
            text = f"{find_run(job[0]).path}{text[job.end() :]}"
        found.append(text)
    return found


def hand_over(tool: str, arguments: list[str]) -> NoReturn:
    """To the trainer's tool of this name."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "stoker.train.checkpoint", tool, *arguments])
