"""Everything needed to look into a run elsewhere, in one archive: bounded in size, and without secrets.

Owns: what goes in, how much of it, and that the archive appears whole. Every text passes redact.py; weights, token
files and traces never go in, the code only when asked. What cannot be read costs that piece, and is told.
Standard library only.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import __version__
from .redact import Redactor
from .run.files import create_exclusive
from .run.layout import RunDir

TEXT = 256 << 10  # bytes of one text, from its end
TOTAL = 12 << 20  # bytes of all texts together
LISTED = 20_000  # files in the listing of the run directory
_ARCHIVE_MODE = 0o600


@dataclass
class Bundle:
    """Collects texts, then writes them. `notes`: what was cut or left out, for the table of contents."""

    run: RunDir
    redactor: Redactor
    is_anonymous: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _used: int = 0

    def add(self, name: str, text: str) -> None:
        """A text under a name; bounded, and not yet cleaned."""
        size = len(text.encode(errors="replace"))
        if self._used + size > TOTAL:
            self.notes.append(f"{name}: left out, the bundle is full")
            return
        self._used += size
        self.texts[name] = text

    def try_add(self, name: str, make: Callable[[], str]) -> None:
        """The same for a text that may fail to be made."""
        try:
            self.add(name, make())
        except Exception as e:  # a damaged run is what a bundle is for
            self.notes.append(f"{name}: {type(e).__name__}: {' '.join(str(e).split())}")

    def add_file(self, path: Path, limit: int = TEXT) -> None:
        """A text file of the run directory, under its own name in there."""
        name = f"run/{path.relative_to(self.run.path)}"
        try:
            text, note = tail(path, limit)
        except OSError as e:
            self.notes.append(f"{name}: {e.strerror or e}")
            return
        if note:
            self.notes.append(f"{name}: {note}")
        self.add(name, text)

    def cleaned(self) -> dict[str, str]:
        """All texts without secrets; two passes, so that what one of them gives away is masked in all."""
        for text in self.texts.values():
            self.redactor.learn(text)
        found = {name: self.redactor.clean(_json_cleaned(text, self.redactor)) for name, text in self.texts.items()}
        return {n: without_person(t) for n, t in found.items()} if self.is_anonymous else found


def _json_cleaned(text: str, redactor: Redactor) -> str:
    """By structure where the text is JSON: what a secret name holds may be a list or an object."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.dumps(redactor.clean_json(json.loads(text)), indent=2) + "\n"
    except (ValueError, RecursionError):  # lines of JSON, or damaged: the text's own rules hold
        return text


def without_person(text: str) -> str:
    """Home directory, user name and mail addresses masked."""
    home, user = os.path.expanduser("~"), getpass.getuser()
    if len(home) > 1:
        text = text.replace(home, "~")
    text = re.sub(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+", "<mail>", text)
    return re.sub(rf"(?<![A-Za-z0-9]){re.escape(user)}(?![A-Za-z0-9])", "<user>", text)


def tail(path: Path, limit: int) -> tuple[str, str]:
    """(the last `limit` bytes in whole lines, what was cut). Only plain files: a pipe would wait for ever.

    A line that was cut off is dropped: half a secret has no name before it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as f:
        found = os.fstat(f.fileno())
        if not stat.S_ISREG(found.st_mode):
            return "", "not a plain file"
        cut = max(0, found.st_size - limit)
        f.seek(cut)
        data = f.read(limit)
    if cut:
        _, newline, data = data.partition(b"\n")
        if not newline:
            return "", f"left out: one line of over {limit} bytes"
    text = data.decode("utf-8", "replace").replace("\0", "\ufffd")
    return text, f"the last {len(data)} of {found.st_size} bytes" if cut else ""


def collect_files(bundle: Bundle) -> None:
    """The run directory's own texts, the newest attempt first: should the bundle get full, the old ones are missing."""
    run = bundle.run
    names = ("run.json", "config.yaml", "config.json", "overrides.txt", "env.json", "submit.sbatch")
    paths = [run.path / name for name in names]
    paths += _sorted(run.submissions, "*")
    attempts = [a.path for a in reversed(run.all_attempts())]
    paths += [a / name for a in attempts for name in ("start.json", "outcome.json", "health.json")]
    for attempt in attempts:
        paths += _sorted(attempt / "events", "*.jsonl")
    paths += _sorted(run.job_logs, "*.log")
    paths += [run.checkpoint(c) / "manifest.json" for c in run.all_checkpoints()]
    for attempt in attempts:
        paths += [*_sorted(attempt / "logs", "*.log"), *_sorted(attempt, "metrics-*.jsonl")]
    for path in paths:
        if os.path.lexists(path):
            bundle.add_file(path)
        elif path.parent == run.path or path.name == "start.json":
            bundle.notes.append(f"run/{path.relative_to(run.path)}: not there")


def _sorted(directory: Path, pattern: str) -> list[Path]:
    return sorted(p for p in directory.glob(pattern) if not p.name.startswith("."))


def listing(run: RunDir, notes: list[str]) -> str:
    """Every file of the run directory: bytes, time of the last change, name. Directories that cannot be read are added
    to the notes."""
    lines: list[str] = []

    def unread(e: OSError) -> None:
        notes.append(f"run/{os.path.relpath(e.filename, run.path)}/: {e.strerror or e}")

    for size, changed, name in _walk(run.path, unread):
        if len(lines) >= LISTED:
            lines.append("...")
            break
        lines.append(f"{size:>14} {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(changed))} {name}")
    return "\n".join(lines) + "\n"


def _walk(top: Path, unread: Callable[[OSError], None]) -> Iterator[tuple[int, float, str]]:
    links = [path for path in (RunDir(top).checkpoints,) if path.is_symlink()]  # with checkpoint.storage
    for place in (top, *links):
        for directory, folders, files in os.walk(place, onerror=unread):
            folders.sort()
            for name in sorted(files):
                path = Path(directory, name)
                try:
                    found = path.lstat()
                except OSError:
                    continue
                yield found.st_size, found.st_mtime, str(path.relative_to(top))


def versions(commands: Iterable[tuple[str, str]]) -> str:
    """Of this machine. `commands`: (program, what it says of its version)."""
    lines = [f"stoker {__version__}", f"python {sys.version.split()[0]}", platform.platform()]
    return "\n".join([*lines, *(f"{name}: {said.strip()}" for name, said in commands)]) + "\n"


def write(bundle: Bundle, target: Path, cleaned: dict[str, str]) -> int:
    """Write the archive; its bytes.

    Raises:
        FileExistsError: there is such a file already.
    """
    stem, now = target.name.removesuffix(".tar.gz"), int(time.time())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        members = {name: text.encode(errors="replace") for name, text in cleaned.items()} | bundle.blobs
        for name, data in sorted(members.items()):
            info = tarfile.TarInfo(f"{stem}/{name}")
            info.size, info.mtime, info.mode = len(data), now, 0o644
            tar.addfile(info, io.BytesIO(data))
    if not create_exclusive(target, buffer.getvalue(), _ARCHIVE_MODE):
        raise FileExistsError(17, "there is such a file already; name another", str(target))
    return len(buffer.getvalue())


def contents(bundle: Bundle, cleaned: dict[str, str]) -> str:
    """The archive's table of contents, for who opens it."""
    person = "masked" if bundle.is_anonymous else "kept (--anonymous masks them)"
    lines = [
        f"Report on {bundle.run.path.name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}, stoker {__version__}",
        "",
        f"Secrets masked: {bundle.redactor.count} different ones, as <secret-N>; equal N, equal secret.",
        f"Paths, host names, user name: {person}. Look through it before you send it.",
        "",
        *(f"{len(text.encode(errors='replace')):>10}  {name}" for name, text in sorted(cleaned.items())),
        *(
            f"{len(data):>10}  {name}  (as it is, not looked through for secrets)"
            for name, data in bundle.blobs.items()
        ),
    ]
    if bundle.notes:
        lines += ["", "Cut, left out or unreadable:", *(f"  {note}" for note in bundle.notes)]
    return "\n".join(lines) + "\n"
