"""What the compiler made of each kernel: registers, spills and shared memory from ptxas' log, 16-byte accesses from the
machine code, and whether that is what the sources claim.

A source claims by a line of its own, a regular expression over whole short names such as `copy<bf16, 8>`:

    // claim: copy<\\w+, [48]>: 16-byte loads and stores
    // claim: sort<.*>: may spill: 64 candidates do not fit into registers

Owns reading and judging. Compiling is build.py's, printing `python -m stoker.kernels report`'s.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cache import CSRC, LOG, Built, read

_UNIT = re.compile(r"^== (?P<unit>\S+)$")
_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for 'sm_(?P<architecture>\d+)a?'")
_STACK = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill")
_USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?, (?P<shared>\d+) bytes smem)?")
_CLAIM = re.compile(r"^\s*// claim: (?P<names>.+?): (?P<what>16-byte loads and stores|16-byte loads|may spill: .+)$")
_ARCHITECTURE = re.compile(r"^\s*code for sm_(\d+)a?$")
_FUNCTION = re.compile(r"^\s*Function : (\w+)$")
# LDG is a load from global memory, LD one from where the compiler could not tell; 256 bits exist from sm_100 on.
_WIDE = re.compile(r"\b(?P<what>LDG?|STG?)\.(?:\w+\.)*(?:128|256)\b")
_SHORTER = (("(anonymous namespace)::", ""), ("stoker::", ""), ("__nv_bfloat16", "bf16"), ("__half", "half"))


@dataclass(frozen=True)
class Usage:
    """One kernel for one architecture (compute capability times ten). stack, spills and shared memory: bytes."""

    unit: str
    kernel: str
    architecture: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def key(self) -> tuple[str, int]:
        return (self.kernel, self.architecture)


@dataclass(frozen=True)
class Wide:
    """Instructions that move 16 bytes per thread or more from and to global memory."""

    loads: int = 0
    stores: int = 0


@dataclass(frozen=True)
class Claim:
    """What a line of a source says about the kernels whose whole short name matches."""

    unit: str
    names: str
    what: Literal["loads", "loads and stores", "may spill"]

    def covers(self, kernel: str) -> bool:
        return re.fullmatch(self.names, kernel) is not None


def usages(log: str) -> list[Usage]:
    """From the build log, which has a line `== UNIT` before what nvcc -Xptxas=-v said of that unit."""
    found = []
    unit, entry, stack = "", None, None
    for line in log.splitlines():
        if m := _UNIT.match(line):
            unit, entry = m["unit"], None
        elif m := _ENTRY.search(line):
            entry, stack = m, None
        elif entry and (m := _STACK.search(line)):
            stack = stack or m  # the entry's own comes first, then those of functions it calls
        elif entry and stack and (m := _USED.search(line)):
            registers, frame, stores, loads = map(
                int, (m["registers"], stack["stack"], stack["stores"], stack["loads"])
            )
            kernel, architecture, shared = (
                short_name(entry["symbol"]),
                int(entry["architecture"]),
                int(m["shared"] or 0),
            )
            found.append(Usage(unit, kernel, architecture, registers, frame, stores, loads, shared))
            entry = None
    return sorted(set(found), key=lambda u: (u.unit, u.kernel, u.architecture))


@functools.cache
def short_name(symbol: str) -> str:
    """`copy<bf16, 8>` for a mangled symbol: no namespaces of ours, no parameters."""
    name = _demangled(symbol).removeprefix("void ")
    for long, short in _SHORTER:
        name = name.replace(long, short)
    name = re.sub(r"\((?:int|unsigned int|long|bool)\)", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:i]
    return name


def _demangled(symbol: str) -> str:
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    demangle.restype = ctypes.c_void_p  # not c_char_p, which would lose the address to free
    address = demangle(symbol.encode(), None, None, None)
    if not address:
        return symbol
    text = ctypes.string_at(address).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(address)
    return text


def claims(folder: Path = CSRC) -> list[Claim]:
    """Of all sources in a folder. Raises ValueError for a line that begins as a claim and is none."""
    found = []
    for path in sorted(folder.glob("*.cu*")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if "// claim:" not in line:
                continue
            m = _CLAIM.match(line)
            if m is None:
                known = "'16-byte loads', '16-byte loads and stores' or 'may spill: WHY'"
                raise ValueError(f"{path}:{number}: {line.strip()!r}: expected '// claim: NAMES: ' and {known}")
            what = m["what"].removeprefix("16-byte ").partition(":")[0]
            found.append(Claim(path.name, m["names"], what))  # type: ignore[arg-type]
    return found


def find_disassembler(environ: Mapping[str, str] = os.environ) -> tuple[Path, Path] | None:
    """(cuobjdump, nvdisasm): from the toolkit or from PyPI's wheels of these names; None if either is missing."""
    folders = [Path(environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    folders += [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    folders.append(Path("/usr/local/cuda/bin"))
    for place in sys.path:
        folders += sorted(Path(place or ".", "nvidia").glob("cu*/bin"), reverse=True)
    search = os.pathsep.join(map(str, folders))
    found = [shutil.which(name, path=search) for name in ("cuobjdump", "nvdisasm")]
    return (Path(found[0]), Path(found[1])) if found[0] and found[1] else None


def disassemble(library: Path, architecture: int, tools: tuple[Path, Path]) -> dict[tuple[str, int], Wide]:
    """The wide accesses of every kernel of an object for one architecture. Raises OSError if cuobjdump fails."""
    cuobjdump, nvdisasm = tools
    # cuobjdump starts nvdisasm from the PATH.
    environ = os.environ | {"PATH": f"{nvdisasm.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(cuobjdump), "-sass", "-arch", f"sm_{architecture}", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        assert process.stdout is not None
        wide = wide_accesses(process.stdout)
    if process.returncode != 0 or not wide:
        raise OSError(f"{' '.join(command)} gave no machine code (exit status {process.returncode})")
    return wide


def wide_accesses(lines: Iterable[str]) -> dict[tuple[str, int], Wide]:
    """Of each function of `cuobjdump -sass`, by short name and architecture."""
    return {
        (kernel, architecture): Wide(sum(w.startswith("LD") for w in words), sum(w.startswith("ST") for w in words))
        for kernel, architecture, words in _functions(lines)
    }


def _functions(lines: Iterable[str]) -> Iterator[tuple[str, int, list[str]]]:
    architecture, kernel, words = 0, "", list[str]()
    for line in lines:
        starts = _FUNCTION.match(line)
        target = _ARCHITECTURE.match(line)
        if (starts or target) and kernel:
            yield kernel, architecture, words
            kernel = ""
        if target:
            architecture = int(target[1])
        elif starts:
            kernel, words = short_name(starts[1]), []
        elif m := _WIDE.search(line):
            words.append(m["what"])
    if kernel:
        yield kernel, architecture, words


def violations(used: Sequence[Usage], wide: Mapping[tuple[str, int], Wide], claimed: Sequence[Claim]) -> list[str]:
    """One line for each kernel that spills or keeps arrays in memory without a claim that it may, for each that lacks
    the wide accesses that are claimed of it (where `wide` knows it), and for each claim that is of no kernel."""
    lines = []
    for u in used:
        own = [c for c in claimed if c.covers(u.kernel)]
        place = f"{u.unit}: {u.kernel} for sm_{u.architecture}"
        if (u.spill_stores or u.spill_loads or u.stack) and not any(c.what == "may spill" for c in own):
            lines.append(f"{place}: spills {u.spill_stores} + {u.spill_loads} bytes, stack {u.stack} bytes")
        has = wide.get(u.key)
        for c in own:
            if has is not None and c.what != "may spill" and (not has.loads or (not has.stores and "stores" in c.what)):
                lines.append(f"{place}: {has.loads} loads and {has.stores} stores of 16 bytes; claimed: {c.what}")
    unused = [c for c in claimed if not any(c.covers(u.kernel) for u in used)]
    return lines + [f"{c.unit}: no kernel is called {c.names}, of which it claims: {c.what}" for c in unused]


@dataclass(frozen=True)
class Report:
    """An object and what there is to say about it. disassembled: whether `wide` could be looked at."""

    built: Built
    used: tuple[Usage, ...]
    wide: Mapping[tuple[str, int], Wide]
    disassembled: bool
    violations: tuple[str, ...]

    def table(self) -> str:
        return table(self.used, self.wide)

    def page(self, date: str) -> str:
        """The dated report as Markdown."""
        spilling = sorted({u.kernel for u in self.used if u.spill_stores or u.spill_loads})
        code = "cuobjdump -sass" if self.disassembled else "not looked at: no cuobjdump and nvdisasm"
        broken = [f"- {line}" for line in self.violations] or ["Every kernel is what its source claims of it."]
        lines = [
            f"# What ptxas made of the kernels, {date}",
            "",
            f"Compiler: {self.built.compiler}. Object: {self.built.bytes / 1e6:.1f} MB. Sources: "
            f"{self.built.sources[:16]}. Machine code: {code}. Nothing ran for this.",
            "",
            f"{len({u.kernel for u in self.used})} kernels, template instances counted; those that spill: "
            f"{', '.join(f'`{name}`' for name in spilling) or 'none'}.",
            *broken,
            "",
            "Again: `python -m stoker.kernels report --write FILE`. Figures that differ between architectures stand in",
            "the heading's order. Loads and stores are instructions that move 16 bytes or more per thread from or to",
            "global memory; a kernel for rows that are not a multiple of 16 bytes has none.",
            "",
            self.table(),
        ]
        return "\n".join(lines)


def examine(library: Path, folder: Path = CSRC) -> Report:
    """Of an object in a cache. Raises OSError, ValueError for a claim that is none."""
    built = read(library.parent)
    if built is None:
        raise OSError(f"{library}: no whole object is there; build it again")
    used = usages((library.parent / LOG).read_text(encoding="utf-8"))
    tools, wide = find_disassembler(), dict[tuple[str, int], Wide]()
    for architecture in built.architectures if tools else ():
        assert tools is not None
        wide |= disassemble(library, architecture, tools)
    return Report(built, tuple(used), wide, tools is not None, tuple(violations(used, wide, claims(folder))))


def table(used: Sequence[Usage], wide: Mapping[tuple[str, int], Wide]) -> str:
    """Markdown, a row per kernel; figures of several architectures with slashes between them where they differ."""
    architectures = sorted({u.architecture for u in used})
    names = "/".join(f"sm_{a}" for a in architectures)
    rows = [
        f"| file | kernel | registers, {names} | spills, B | stack, B | shared, B | 16-byte loads, stores |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    kernels = dict.fromkeys((u.unit, u.kernel) for u in used)
    for unit, kernel in kernels:
        own = [u for u in used if (u.unit, u.kernel) == (unit, kernel)]
        moves = [wide[u.key] for u in own if u.key in wide]
        cells = [
            unit,
            f"`{kernel}`",
            _merged(u.registers for u in own),
            _merged(u.spill_stores + u.spill_loads for u in own),
            _merged(u.stack for u in own),
            _merged(u.shared for u in own),
            f"{_merged(w.loads for w in moves)}, {_merged(w.stores for w in moves)}" if moves else "-",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _merged(values: Iterable[int]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(set(words)) == 1 else "/".join(words)
