"""Where built kernels lie, which of them fits these sources and a device, and how a new one gets there: all or nothing.

Standard library only and nothing of ours: `python cache.py` tells the launcher, which imports no kernels, what to
freeze with a run. Compiling is build.py's, loading library.py's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
CSRC = PACKAGE / "csrc"
FROZEN = PACKAGE / "built"  # of a run's code: what was in the cache when it was frozen
LIBRARY, MANIFEST, LOG = "libstoker.so", "build.json", "build.log"
CACHE = "STOKER_KERNELS_CACHE"  # a directory instead of the user's; in a job one of the node's own
_NAME = re.compile(r"[0-9a-f]{32}")
_SUFFIXES = (".cu", ".cuh", ".h")
_STALE = 24 * 3600  # seconds after which a half-made directory is nobody's any more


@dataclass(frozen=True)
class Built:
    """One object, as its manifest has it. `name`: the hash of all that it was made of; its directory is called so."""

    name: str
    sources: str  # digest of csrc/, see `digest_of`
    files: tuple[str, ...]  # the translation units in it
    architectures: tuple[int, ...]  # compute capabilities times ten; empty for the CPU
    ptx: int | None  # whose PTX is in it, for devices that are newer
    emulated: bool
    compiler: str
    abi: str  # torch's stable ABI that it needs, as 2.11
    bytes: int
    built: float  # seconds since 1970
    sha256: str = ""  # of LIBRARY, hexadecimal; empty: made before this was kept
    place: str = ""  # the directory it was found in

    @property
    def library(self) -> Path:
        return Path(self.place) / self.name / LIBRARY

    def is_intact(self) -> bool:
        """Whether the file still has the bytes that were built; reads all of them."""
        try:
            return not self.sha256 or sha256_of(self.library) == self.sha256
        except OSError:
            return False

    def runs_on(self, capability: int) -> bool:
        """capability: as 90 for 9.0. Machine code serves later minor versions of its major one, PTX all later ones."""
        has_code = any(a // 10 == capability // 10 and a <= capability for a in self.architectures)
        return has_code or (self.ptx is not None and self.ptx <= capability)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of(folder: Path = CSRC) -> str:
    """SHA-256 over names and contents of the sources and headers in a folder, hexadecimal."""
    h = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in _SUFFIXES):
        data = path.read_bytes()
        h.update(f"{path.name} {len(data)}\n".encode() + data)
    return h.hexdigest()


def user_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME/stoker/kernels."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "stoker" / "kernels"


def cache_to_write(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a build goes; absolute, so that what is printed of it holds elsewhere too."""
    return Path(environ[CACHE]).expanduser().absolute() if environ.get(CACHE) else user_cache(environ)


def places(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where objects are looked for, first come first served: frozen with a run, then this node's, then the user's."""
    return list(dict.fromkeys([FROZEN, cache_to_write(environ), user_cache(environ)]))


def built_in(place: Path) -> list[Built]:
    """The whole objects in a directory, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in place.iterdir():
            built = read(entry)
            if built is not None:
                found.append(built)
    return sorted(found, key=lambda b: (-b.built, b.name))


def damaged_in(place: Path) -> list[Path]:
    """What has an object's name in a directory and is none; nothing takes it, and a build replaces it."""
    with contextlib.suppress(OSError):
        return sorted(entry for entry in place.iterdir() if _NAME.fullmatch(entry.name) and _is_damaged(entry))
    return []


def _is_damaged(entry: Path) -> bool:
    built = read(entry)
    return built is None or not built.is_intact()


def read(entry: Path) -> Built | None:
    """What lies in one directory; None if there is no whole object."""
    try:
        plain = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        plain |= {"place": str(entry.parent), "name": entry.name}
        plain |= {key: tuple(plain[key]) for key in ("files", "architectures")}
        built = Built(**plain)
        return built if (entry / LIBRARY).stat().st_size == built.bytes else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def find(capability: int | None = None, sources: Path = CSRC, where: Iterable[Path] | None = None) -> list[Built]:
    """Objects of exactly these sources with every translation unit in it, for GPUs; best first.

    capability: of the device that it must run on, as 90; None: any.
    """
    wanted, units = digest_of(sources), unit_names(sources)
    fits = []
    for place in places() if where is None else where:
        for b in built_in(place):
            is_ours = not b.emulated and b.sources == wanted and b.files == units
            if is_ours and (capability is None or b.runs_on(capability)):
                fits.append(b)
    return fits


def unit_names(folder: Path = CSRC) -> tuple[str, ...]:
    """Names of the translation units, sorted."""
    return tuple(sorted(p.name for p in folder.glob("*.cu")))


@contextlib.contextmanager
def workshop(cache: Path) -> Iterator[Path]:
    """A directory of one's own inside the cache, gone afterwards; `publish` moves it to its place."""
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(cache)
    tmp = Path(tempfile.mkdtemp(prefix=".tmp-", dir=cache))
    try:
        yield tmp
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def publish(work: Path, built: Built) -> Path:
    """Give a workshop with LIBRARY in it its name in the cache; what is whole there already stays. Returns its path.

    `built`: of LIBRARY as it is in the workshop.
    """
    plain = {key: value for key, value in asdict(built).items() if key not in ("place", "name")}
    (work / MANIFEST).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    target = work.parent / built.name
    for _ in range(3):
        if not _is_damaged(target):  # somebody was quicker
            break
        try:
            os.rename(work, target)
            break
        except OSError:
            # Renaming onto a directory that is not empty: whole by now, or damaged and in the way.
            if _is_damaged(target):
                with contextlib.suppress(OSError):
                    aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=work.parent))
                    os.rename(target, aside)
                    shutil.rmtree(aside, ignore_errors=True)
    if _is_damaged(target):
        raise OSError(f"{target}: cannot be written; remove it")
    return target / LIBRARY


def _sweep(cache: Path) -> None:
    """What killed builds left."""
    for entry in cache.glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - entry.lstat().st_mtime > _STALE:
                shutil.rmtree(entry, ignore_errors=True)


def to_freeze() -> dict[str, str]:
    """What a run's code takes along: name below FROZEN -> file. The newest object of these sources for each set of
    architectures, and what was measured."""
    found: dict[str, str] = {}
    taken: set[tuple[int, ...]] = set()
    for built in find(where=[place for place in places() if place != FROZEN]):
        if built.architectures not in taken and built.is_intact():
            taken.add(built.architectures)
            found |= {f"{built.name}/{file}": str(built.library.with_name(file)) for file in (LIBRARY, MANIFEST)}
    for place in reversed(places()):
        found |= {file.name: str(file) for file in place.glob("measured-*.json") if place != FROZEN}
    return found


if __name__ == "__main__":
    print(json.dumps(to_freeze()))
