"""`stoker bench kernels [OP ...]`: times the ops here, in the container if any, and keeps what `auto` then chooses by.

Owns: the verb. The way into the container is kernels.py's, measuring stoker.kernels.bench's.
"""

from __future__ import annotations

import sys

from . import kernels


def main(argv: list[str]) -> int:
    if argv[:1] != ["kernels"]:
        found = f"{argv[0]!r}: nothing to measure of that name" if argv and argv[0][:1] != "-" else "what to measure?"
        print(f"stoker bench: {found}; there is: stoker bench kernels [OP ...]", file=sys.stderr)
        return 0 if argv in (["-h"], ["--help"]) else 2
    return kernels.main(["bench", *argv[1:]])
