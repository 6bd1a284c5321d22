"""What no file of the repository may hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# Built from parts, so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": "|".join(["/" + "work/", "/" + "tmp/" + "team", "/" + "opt/" + "wheels", "/" + "root/"]),
    "a package registry": "|".join([r"pypi\." + "org", r"pythonhosted\." + "org", r"download\.pytorch\." + "org"]),
    "a merge left half done": "^" + "<" * 7 + " |^" + ">" * 7 + " ",
}


def test_no_file_holds_what_belongs_to_one_machine(repository: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = []
    for name in filter(None, listing.split("\0")):
        path = repository / name
        if not path.is_file() or path.stat().st_size > 2_000_000:
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        for what, pattern in FORBIDDEN.items():
            found += [f"{name}: {what}: {match.group(0)}" for match in re.finditer(pattern, text, re.MULTILINE)]
    assert found == []
