"""Compiling csrc/ into one shared object: every .cu by itself, as many at a time as there are cores, then one link.

    path = build(Target())                                        # for the GPUs of a cluster, on any machine with nvcc
    path = build(Target(emulated=True, sanitizers=("address",)))  # for the CPU, through csrc/emulation.h: tests

Owns: the commands, and what a failure says. Finding compilers is toolchain.py's, keeping the result cache.py's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import cache as caches
from .cache import CSRC, LIBRARY, LOG, Built
from .toolchain import Toolchain, find_toolchain

ABI = "2.11"  # no symbol of torch's stable ABI that is newer
ARCHITECTURES = (80, 90, 100)  # without a GPU to look at
LEAST = 80  # our kernels need compute capability 8.0
_ABI_MACRO = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_POLL = 0.02  # seconds
# nvcc: "rmsnorm.cu(12): error: ..."; g++ and nvcc's own host pass: "rmsnorm.cu:12:3: fatal error: ..."
_ERROR = re.compile(r"^(?P<place>[^\s(:]+(?:\(\d+\)|:\d+(?::\d+)?)): (?:fatal )?error:? (?P<text>.*)$", re.MULTILINE)
_ANY_ERROR = re.compile(r"^.*\b(?:[Ee]rror|fatal)\b.*$", re.MULTILINE)


class BuildError(ValueError):
    """A compiler refused; names the file, its first error and the whole log."""


@dataclass(frozen=True)
class Target:
    """What to build.

    architectures: compute capabilities times ten; PTX of the newest comes along. emulated: for the CPU. sanitizers: of
    the host compiler (address, undefined), emulated only. sources: the directory. only: names of translation units
    (`rmsnorm.cu`); empty: all.
    """

    architectures: tuple[int, ...] = ARCHITECTURES
    emulated: bool = False
    sanitizers: tuple[str, ...] = ()
    sources: Path = CSRC
    only: tuple[str, ...] = ()


def build(target: Target, cache: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The object, from the cache if it is there, else compiled. Any number of processes may do this at once.

    cache: default: `cache.cache_to_write()`. say: gets a line before anything is compiled, and one after.
    Raises NoCompilerError, BuildError, ValueError for architectures that nvcc does not know, OSError for the cache.
    """
    tools = find_toolchain(target.emulated)
    units = _units(target)
    cache = caches.cache_to_write() if cache is None else cache
    architectures = () if target.emulated else _architectures(target, tools)
    compile_flags, link = _commands(tools, target, architectures)
    plan = Built(
        name=_name(tools, target, units, [*compile_flags, *link]),
        sources=caches.digest_of(target.sources),
        files=tuple(unit.name for unit in units),
        architectures=architectures,
        ptx=max(architectures, default=None),
        emulated=target.emulated,
        compiler=tools.version,
        abi=ABI,
        bytes=0,
        built=time.time(),
    )
    there = caches.read(cache / plan.name)
    if there is not None and there.is_intact():
        return there.library
    if (cache / plan.name).exists():
        say(f"{cache / plan.name} is damaged, and is built anew")
    for_what = "the CPU" if target.emulated else ", ".join(f"sm_{a}" for a in architectures)
    say(f"compiling {len(units)} files of kernels for {for_what} ({tools.version})")
    with caches.workshop(cache) as work:
        _compile(work, units, compile_flags, link, cache / f"failed-{plan.name}.log")
        library = work / LIBRARY
        finished = replace(plan, bytes=library.stat().st_size, sha256=caches.sha256_of(library))
        path = caches.publish(work, finished)
    say(f"{path}: {finished.bytes / 1e6:.1f} MB in {time.time() - plan.built:.0f} s")
    return path


def _units(target: Target) -> list[Path]:
    units = [target.sources / name for name in target.only or caches.unit_names(target.sources)]
    missing = [str(unit) for unit in units if not unit.is_file()]
    if missing or not units:
        raise ValueError(f"no kernels to build: {', '.join(missing) or target.sources} is not there")
    return sorted(units)


def _architectures(target: Target, tools: Toolchain) -> tuple[int, ...]:
    """Those of the default that nvcc knows; those that were asked for, or ValueError."""
    known, wanted = tools.known(), tuple(sorted(set(target.architectures)))
    if target.architectures == ARCHITECTURES:
        wanted = tuple(a for a in wanted if a in known)
    unknown = [str(a) for a in wanted if a not in known]
    if unknown or not wanted:
        has = ", ".join(str(a) for a in known if a >= LEAST) or "none from 80 on"
        text = f"architectures {', '.join(unknown) or 'none'}: {tools.nvcc} has {has}"
        raise ValueError(f"{text}; choose of these, or install a newer nvcc")
    return wanted


def _commands(tools: Toolchain, target: Target, architectures: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """(compiler with its flags, to which `-o OBJECT SOURCE` is added; linker with its flags, to which objects are)."""
    torch = tools.torch
    common = ["-std=c++20", _ABI_MACRO, "-DUSE_CUDA", f"-I{torch / 'include'}"]
    common.append(f"-I{torch / 'include/torch/csrc/api/include'}")
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    if target.emulated:
        checks = [f"-fsanitize={','.join(target.sanitizers)}"] if target.sanitizers else []
        checks += ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer"] if target.sanitizers else []
        # Tests compile for longer than they run.
        flags = ["-O0" if target.sanitizers else "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-DSTOKER_EMULATION"]
        flags += [f"-isystem{tools.include}", *checks]
        # Sums and products round one by one on every CPU; a variable that nothing was written to shows.
        flags += ["-ffp-contract=off", "-ftrivial-auto-var-init=pattern"]
        return [str(tools.host), "-c", *common, *flags, "-x", "c++"], [str(tools.host), "-shared", *checks, *libraries]
    nvcc = [str(tools.nvcc), f"-ccbin={tools.host}"]
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    gencode.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    # -v: what each kernel takes of registers and shared memory goes into the log, where report.py finds it.
    flags = ["-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v", "-DNDEBUG"]
    flags += ["--compress-mode=size"] if tools.compresses() else []
    return [*nvcc, "-c", *common, *flags, *gencode], [*nvcc, "-shared", "-cudart=static", *gencode, *libraries]


def _name(tools: Toolchain, target: Target, units: Sequence[Path], commands: Sequence[str]) -> str:
    """The hash: sources, compilers, architectures, ABI. Not torch's place or version: the ABI is what counts."""
    words = [word.replace(str(tools.torch), "torch") for word in commands]
    facts = [caches.digest_of(target.sources), [unit.name for unit in units], tools.version, words]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _compile(work: Path, units: Sequence[Path], flags: list[str], link: list[str], kept: Path) -> None:
    """Leaves LIBRARY and LOG in `work`, or raises BuildError and leaves the log at `kept`."""
    jobs = {unit.name: [*flags, "-o", str(work / f"{unit.stem}.o"), str(unit)] for unit in units}
    logs = {name: work / f"{name}.log" for name in [*jobs, LIBRARY]}
    failed = _run_all(jobs, logs)
    if not failed:
        objects = [str(work / f"{unit.stem}.o") for unit in units]
        # Libraries after the objects that need them.
        command = [*link[: _first_library(link)], *objects, *link[_first_library(link) :], "-o", str(work / LIBRARY)]
        jobs |= {LIBRARY: command}
        failed = _run_all({LIBRARY: command}, logs)
    log = _joined(jobs, logs)
    if failed:
        told: dict[str, list[str]] = {}  # what all files have in common stands once
        for name, code in failed.items():
            told.setdefault(_first_error(logs[name], code), []).append(name)
        raise BuildError("\n".join([*(f"{', '.join(of)}: {text}" for text, of in told.items()), _keep(log, kept)]))
    (work / LOG).write_text(log, encoding="utf-8")
    for path in [*logs.values(), *work.glob("*.o")]:
        path.unlink(missing_ok=True)
    kept.unlink(missing_ok=True)


def _keep(log: str, kept: Path) -> str:
    """Where the log is, or why it is not: the compiler's error is told all the same."""
    try:
        kept.write_text(log, encoding="utf-8")
    except OSError as e:
        with contextlib.suppress(OSError):
            kept.unlink()
        return f"the whole log cannot be kept: {kept}: {e.strerror}; {caches.CACHE}=DIRECTORY names another place"
    return f"the whole log: {kept}"


def _first_library(link: list[str]) -> int:
    return next(k for k, word in enumerate(link) if word.startswith("-L"))


def _run_all(jobs: Mapping[str, list[str]], logs: Mapping[str, Path]) -> dict[str, int]:
    """Exit codes of those that failed, after all have ended. However this is left, none runs on."""
    waiting, failed = list(jobs), dict[str, int]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    cores = len(os.sched_getaffinity(0))
    try:
        while waiting or running:
            while waiting and len(running) < cores and not failed:
                name = waiting.pop(0)
                running[name] = _start(jobs[name], logs[name])
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                if code:
                    failed[name] = code
            if failed:
                waiting.clear()
            time.sleep(_POLL)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return dict(sorted(failed.items()))


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own: nvcc has children of its own, and all are to end together."""
    with open(log, "wb") as out:
        # C locale: the words of an error are looked for.
        environ = os.environ | {"LC_ALL": "C"}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, start_new_session=True
        )


def _joined(jobs: Mapping[str, list[str]], logs: Mapping[str, Path]) -> str:
    texts = []
    for name, command in jobs.items():
        said = logs[name].read_text(encoding="utf-8", errors="replace") if logs[name].exists() else "(not started)\n"
        texts.append(f"== {name}\n{' '.join(command)}\n{said}")
    return "\n".join(texts)


def _first_error(log: Path, code: int) -> str:
    said = log.read_text(encoding="utf-8", errors="replace")
    found = _ERROR.search(said)
    if found:
        return f"{found['place']}: {found['text']}"
    other = _ANY_ERROR.search(said)
    if other:
        return other[0].strip()
    how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
    last = (said.strip().splitlines() or ["without a word"])[-1]
    return f"the compiler {how}: {last}"
