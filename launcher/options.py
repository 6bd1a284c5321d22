"""The arguments that `stoker launch` and `stoker run` share. Standard library only: `--help` must answer at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prepare import Request

EPILOG = """examples:
  experiment=demo cluster.nodes=2
  name=small train.steps=500 data.sources='[{prefix: corpus/text}]' cluster=local
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


def request(verb: str, argv: list[str], arguments: argparse.Namespace) -> Request:
    from .prepare import Request

    run_dir = arguments.run_dir.expanduser().absolute() if arguments.run_dir else None
    return Request(tuple(arguments.overrides), arguments.config_dir, run_dir, ("stoker", verb, *argv), Path.cwd())
