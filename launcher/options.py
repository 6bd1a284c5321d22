"""The arguments that `stoker launch` and `stoker run` share. Standard library only: `--help` must answer at once."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prepare import Request

EPILOG = """examples:
  experiment=demo cluster.nodes=2
  name=small train.steps=500 data.sources='[{prefix: corpus/text}]' cluster=local
  cluster.nodes=2 cluster.procs_per_node=8 -- python train.py --lr 1e-3    (your own script: docs/own-scripts.md)
Groups and fields: docs/configuration.md; `--dry-run` shows what they come to."""


def parser(verb: str, description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        f"stoker {verb}", description=description, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="group choices and fields of the configuration"
    )
    found.add_argument("--config-dir", type=Path, metavar="DIR", help="directory of your own YAML files")
    found.add_argument("--run-dir", type=Path, metavar="DIR", help="make this run directory, not RUN_ROOT/NAME-ID")
    found.add_argument("--dry-run", action="store_true", help="show configuration and batch script; leave nothing")
    return found


def parse(p: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Read the arguments; what stands behind `--` is a command of the user's own: task.cmd, word by word."""
    words = argv[argv.index("--") + 1 :] if "--" in argv else []
    arguments = p.parse_intermixed_args(argv[: len(argv) - len(words)])
    if words:
        arguments.overrides.append(f"task.cmd=[{','.join(map(_quoted, words))}]")
    return arguments


def _quoted(word: str) -> str:
    """As Hydra's grammar and OmegaConf take it back unchanged: `${` would be an interpolation."""
    # A backslash escapes only before what has a meaning: double those, and no others.
    escaped = re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", word)
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), escaped) + "'"


def request(verb: str, argv: list[str], arguments: argparse.Namespace) -> Request:
    from .prepare import Request

    run_dir = arguments.run_dir.expanduser().absolute() if arguments.run_dir else None
    return Request(tuple(arguments.overrides), arguments.config_dir, run_dir, ("stoker", verb, *argv), Path.cwd())
