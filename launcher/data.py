"""`stoker data TOOL ...`: hands over to the trainer's data tools.

Owns: the table of tools. The launcher never imports the trainer, so the tool takes this process's place.
"""

from __future__ import annotations

import os
import sys

from .errors import UserError

TOOLS = {"tokenize": "stoker.train.data.tokenize"}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: stoker data TOOL ...     tools: {', '.join(TOOLS)} (`stoker data TOOL --help` says more)")
        return 0
    tool, *arguments = argv
    if tool not in TOOLS:
        raise UserError(f"unknown data tool {tool!r}; expected one of {', '.join(TOOLS)}")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", TOOLS[tool], *arguments])
