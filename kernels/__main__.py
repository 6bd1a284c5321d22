"""`python -m stoker.kernels build|list|show|report|bench`: native kernels are built, looked at and timed.

Owns: the arguments and what is printed. `stoker kernels` becomes this, inside the container if there is one.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from . import measured, overview
from .arguments import output_file
from .device import Device
from .native import cache, ready, report
from .native.build import ARCHITECTURES, LEAST, Target, build


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:
        from .bench.__main__ import main as bench  # has arguments of its own

        return _run("stoker bench kernels", lambda: bench(argv[1:]))
    arguments = _parser().parse_args(argv)
    return _run("stoker kernels", lambda: _verb(arguments))


def _verb(arguments: argparse.Namespace) -> int:
    if arguments.verb == "build":
        return _build(arguments.arch)
    if arguments.verb == "report":
        return _report(arguments.arch or ARCHITECTURES, arguments.write)
    return _list() if arguments.verb == "list" else _show(arguments.json)


def _run(command: str, verb: Callable[[], int]) -> int:
    """The exit code; a mistake or the machine's refusal in one line each."""
    # As ^C: what is under way ends, and leaves nothing.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return verb()
    except KeyboardInterrupt:
        return 130
    except OSError as e:
        print(f"{command}: error: {_told(e)}", file=sys.stderr)
        return 1
    except ValueError as e:
        for line in str(e).splitlines():
            print(f"{command}: error: {line}", file=sys.stderr)
        return 1


def _told(e: OSError) -> str:
    place = cache.cache_to_write()
    path = Path(e.filename) if isinstance(e.filename, str) else place
    text = f"{path}: {e.strerror or e}"
    if not (path.is_relative_to(place) or place.is_relative_to(path)):
        return text  # of a file that the command line names
    return f"{text}; the kernels' cache is {place}; {cache.CACHE}=DIRECTORY names another that can be written"


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "stoker kernels",
        description="The native CUDA kernels of this machine: docs/kernels.md.",
        epilog="`stoker kernels` also takes KEY=VALUE and --config-dir as `stoker launch`; container.*: done in there.",
    )
    verbs = p.add_subparsers(dest="verb", required=True)
    b = verbs.add_parser("build", help="compile them into the cache; needs nvcc and a C++ compiler, no GPU")
    r = verbs.add_parser("report", help="registers, spills, shared memory and 16-byte accesses of each kernel")
    r.add_argument("--arch", type=_architectures, metavar="80,90,100", help="default: 80,90,100")
    r.add_argument(
        "--write", type=output_file, metavar="FILE", help="a dated report in Markdown instead of the table alone"
    )
    b.add_argument(
        "--arch",
        type=_architectures,
        metavar="80,90,100",
        help="compute capabilities times ten; default: this machine's GPU, without one 80,90,100",
    )
    verbs.add_parser("list", help="what is built")
    s = verbs.add_parser("show", help="what each op would run with on this machine, and why not with the others")
    s.add_argument("--json", action="store_true", help="the same for programs")
    verbs.add_parser("bench", help="time them on this machine: `stoker bench kernels`")
    return p


def _architectures(text: str) -> tuple[int, ...]:
    words = [word.strip().removeprefix("sm_") for word in text.split(",")]
    if not all(word.isdigit() and int(word) >= LEAST for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}; expected compute capabilities from 8.0 on, times ten, as 80,90")
    return tuple(int(word) for word in words)


def _build(architectures: tuple[int, ...] | None) -> int:
    if architectures is None:
        device = _device()
        architectures = ARCHITECTURES if device.capability is None else (device.capability,)
    print(build(Target(architectures), say=lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def _report(architectures: tuple[int, ...], file: Path | None) -> int:
    """1 if a kernel is not what its source claims."""
    found = report.examine(build(Target(architectures), say=lambda line: print(line, file=sys.stderr, flush=True)))
    if file is None:
        print(found.table(), end="")
    else:
        file.write_text(found.page(time.strftime("%Y-%m-%d")), encoding="utf-8")
    for line in found.violations:
        print(f"stoker kernels: {line}", file=sys.stderr)
    return 1 if found.violations else 0


def _device() -> Device:
    return Device.of(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def _list() -> int:
    wanted, places = cache.digest_of(), cache.places()
    damaged = [entry for place in places for entry in cache.damaged_in(place)]
    if not damaged and not any(cache.built_in(place) for place in places):
        print(f"nothing is built: no kernels in {', '.join(map(str, places))}; `stoker kernels build` makes them")
        return 0
    print(f"{'built':<17} {'for':<24} {'MB':>5}  {'of these sources':<17} where")
    for place in places:
        for b in (b for b in cache.built_in(place) if Path(b.place) / b.name not in damaged):
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(b.built))
            device = "CPU, for tests" if b.emulated else ", ".join(f"sm_{a}" for a in b.architectures) + " + PTX"
            has = "yes" if (b.sources, b.files) == (wanted, cache.unit_names()) else "no"
            print(f"{day:<17} {device:<24} {b.bytes / 1e6:>5.1f}  {has:<17} {Path(b.place) / b.name}")
    for entry in damaged:
        print(f"{'damaged':<17} {'nothing takes it; `stoker kernels build` replaces it':<48} {entry}")
    return 0


def _show(is_json: bool) -> int:
    device = _device()
    library = ready.name(device.capability)
    times = measured.read(device.name, library) if device.type == "cuda" else None
    rows = overview.overview(device, times)
    if is_json:
        plain = {"device": asdict(device), "torch": torch.__version__, "library": library or None}
        print(json.dumps({**plain, "ops": overview.as_json(rows)}, indent=1))
        return 0
    print(f"on {device}, torch {torch.__version__}; native kernels: {library or 'not built'}\n")
    print(overview.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
