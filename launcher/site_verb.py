"""`stoker site`: look at the Slurm here, say what follows, and write a cluster profile.

Owns: the verb. What is asked, said and written is site_ask.py's, site_report.py's and site_write.py's.
"""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import asdict
from pathlib import Path

from . import site_ask, site_cache, site_probe, site_report, site_write, slurm
from .environment import without_outer_job
from .errors import UserError, environment_error
from .run.files import create_exclusive, to_json
from .run.outcome import EXIT_FINISHED
from .site import Probe, Site
from .site_probe import Machine

OURS = Path(__file__).resolve().parent.parent / "conf" / "cluster"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("stoker site", description="What the Slurm here is, and what follows for a run.")
    p.add_argument("--write", type=Path, metavar="FILE", help="write a cluster profile, e.g. DIR/cluster/mine.yaml")
    p.add_argument("--partition", metavar="NAME", help="the partition that the profile is for")
    p.add_argument("--refresh", action="store_true", help="ask for nodes and accounts again, which are kept for hours")
    p.add_argument("--probe", nargs="?", const="", metavar="PARTITION", help="run a short job that looks on a node")
    p.add_argument("--srun", default="", metavar="OPTIONS", help="more options for the srun of --probe")
    p.add_argument("--json", action="store_true", help="everything as one line of JSON")
    arguments = p.parse_args(argv)
    try:
        options = shlex.split(arguments.srun)
    except ValueError as e:
        raise UserError(f"--srun {arguments.srun}: cannot be split into words ({e})") from e
    if arguments.write is not None:
        _refuse(arguments.write)
    if not slurm.is_available():
        raise environment_error("no Slurm here (sbatch not found): run this where Slurm's commands are")
    site = site_ask.ask(arguments.refresh)
    if site is None:
        raise environment_error("Slurm does not say which partitions it has; try `scontrol show partition`")
    here = site_probe.here()
    node = None
    if arguments.probe is not None:
        node = site_probe.on_a_node(arguments.probe or None, options)
        _keep(site, arguments.probe, node)
    if arguments.json:
        print(to_json(_plain(site, here, node)))
    elif arguments.write is None:
        print(site_report.report(site, here, node))
    if arguments.write is not None:
        _write(arguments.write, site, arguments.partition, node or here, is_quiet=arguments.json)
    return EXIT_FINISHED


def _keep(site: Site, asked: str, node: Machine) -> None:
    """For the launches to come."""
    names = [asked] if asked else [p.name for p in site.partitions if p.is_default]
    for name in names[:1]:
        seen = Probe(node.host, tuple(node.commands))
        site_cache.save_probe(name, seen, site.settings, without_outer_job(os.environ))


def _plain(site: Site, here: Machine, node: Machine | None) -> dict[str, object]:
    return {
        "site": asdict(site),
        "here": asdict(here),
        "node": None if node is None else asdict(node),
        "consequences": site_report.consequences(site, here, node),
    }


def _refuse(path: Path) -> None:
    """Raises UserError for a file that is there, or that would never be read."""
    if path.suffix != ".yaml" or path.absolute().parent.name != "cluster":
        raise UserError(f"--write {path}: expected DIR/cluster/NAME.yaml, where `stoker launch --config-dir DIR` looks")
    if (OURS / path.name).exists():
        raise UserError(f"--write {path}: stoker has a profile {path.stem} of its own; take another name")
    if path.exists():
        raise UserError(f"--write {path}: exists already; take another name, or move it away")


def _write(path: Path, site: Site, partition: str | None, machine: Machine, is_quiet: bool) -> None:
    text = site_write.profile(site, site_write.choose(site, partition), machine, path.stem)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = create_exclusive(path, text)
    except OSError as e:
        raise environment_error(f"--write {path}: cannot be written ({e.strerror or e}); take another directory") from e
    if not is_new:
        raise UserError(f"--write {path}: exists already; take another name, or move it away")
    if not is_quiet:
        folder = shlex.quote(str(path.parent.parent))
        print(f"written: {path}\nnext:    stoker launch --dry-run --config-dir {folder} cluster={path.stem} ...")
