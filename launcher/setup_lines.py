"""Whether the lines of `cluster.setup` can be read by the shell that will run them.

Owns: asking bash for that. Where they stand in the batch script is slurm_templates/'s. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

_PLACE = re.compile(r"^.*?: line (\d+): ")


def problem_with(lines: Sequence[str]) -> str | None:
    """What is wrong with them taken together, to be shown; None if nothing is, or there is no bash here."""
    if not lines:
        return None
    # Input, not an argument: lines may hold what no list of processes should show.
    text = "\n".join(lines) + "\n"
    try:
        done = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, timeout=10, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return None
    said = next((line for line in done.stderr.splitlines() if line.strip()), "syntax error")
    place = _PLACE.match(said)
    position = min(int(place[1]), len(lines)) - 1 if place else len(lines) - 1
    return f"cluster.setup.{position}: the lines are no shell text: {_PLACE.sub('', said)}"
