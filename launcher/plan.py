"""`stoker plan KEY=VALUE ...`: memory, communication and time of a layout, before any GPU is taken.

Owns: the verb's arguments and the number of processes that is planned for. The plan is made by
`python -m stoker.train.plan`, which takes this process's place: the launcher never imports the trainer. Slurm is not
asked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from .errors import UserError
from .find import find_run
from .run.views import metrics

EPILOG = """examples:
  model=llama-3.1-8b precision=bf16 data.seq_len=8192 train.global_batch=64 train.micro_batch=1 --world 64 --layouts 10
  model=llama-3.1-8b train.global_batch=1024 --world 64 parallel.tensor=4 parallel.data=zero1
  model=llama-3.1-8b train.global_batch=1024 --world 1024 --rank 17 parallel.tensor=8 parallel.pipeline=8
      (build and run that rank dry)
  --world 8 parallel.pipeline=4 train.global_batch=64 --schedule
What the lines mean: docs/plan.md."""


def main(argv: list[str]) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    from ..conf.compose import compose

    plain = compose(arguments.overrides, arguments.config_dir).plain
    _set_processes(plain["cluster"], arguments.world, arguments.gpus_per_node)
    options = {
        name: getattr(arguments, name)
        for name in ("device", "memory", "efficiency", "nvlink", "network", "rank", "layouts", "schedule", "json")
    }
    options["png"] = None if arguments.png is None else str(arguments.png.absolute())
    options["schedule"] = arguments.schedule or arguments.png is not None or arguments.run is not None
    options["measured"] = None if arguments.run is None else _bubble_of(arguments.run)
    request = json.dumps({"config": plain, "options": options})
    with tempfile.TemporaryFile() as file:
        file.write(request.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "stoker.train.plan"])


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "stoker plan",
        description="What a layout takes, before any GPU is taken. Needs no GPU and no Slurm.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `stoker launch`; no data is needed")
    p.add_argument("--config-dir", type=Path, metavar="DIR", help="directory of your own YAML files")
    p.add_argument("--world", type=int, metavar="N", help="GPUs in all; default: cluster.nodes x procs_per_node")
    p.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="with --world (default: 8)")
    p.add_argument("--rank", type=int, metavar="R", help="build and run this rank alone")
    p.add_argument("--layouts", type=int, default=0, metavar="N", help="the N quickest layouts that fit --memory")
    p.add_argument("--schedule", action="store_true", help="draw the pipeline schedule")
    p.add_argument("--png", type=Path, metavar="FILE", help="with --schedule: as a picture too (needs matplotlib)")
    p.add_argument("--run", metavar="RUN", help="with --schedule: beside the bubble that this run measured")
    p.add_argument("--json", action="store_true", help="numbers in bytes and seconds")
    p.add_argument("--memory", type=float, default=72.0, metavar="GiB", help="for tensors, per GPU (default: 72)")
    p.add_argument("--device", default="H100", metavar="NAME", help="whose peak FLOP/s count (default: H100)")
    p.add_argument("--efficiency", type=float, default=0.5, help="part of the peak that is reached (default: 0.5)")
    p.add_argument(
        "--nvlink", type=float, default=300.0, metavar="GB/S", help="per GPU within a node, one way (default: 300)"
    )
    p.add_argument(
        "--network", type=float, default=40.0, metavar="GB/S", help="per GPU between nodes, one way (default: 40)"
    )
    return p


def _bubble_of(name: str) -> str:
    """What a run's metrics say of the bubble, in words.

    Raises:
        UserError: no such run, or it measured none.
    """
    run = find_run(name)
    bubbles = [line["bubble"] for line in metrics(run) if isinstance(line.get("bubble"), float)]
    if not bubbles:
        raise UserError(f"--run {name}: no step of it measured a bubble; that takes a pipeline, and CPUs so far")
    return f"measured in {run.path.name}: {100 * statistics.median(bubbles):.1f} %, median of {len(bubbles)} steps"


def _set_processes(cluster: dict[str, object], world: int | None, gpus_per_node: int) -> None:
    """Raises UserError: they do not divide."""
    if world is None:
        return
    if world < 1 or gpus_per_node < 1:
        raise UserError(f"--world {world} --gpus-per-node {gpus_per_node}: expected positive numbers")
    each = min(world, gpus_per_node)
    if world % each:
        raise UserError(f"--world {world}: no multiple of --gpus-per-node {each}; change one of them")
    cluster["nodes"], cluster["procs_per_node"] = world // each, each
