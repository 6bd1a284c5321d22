"""`python -m stoker.train.plan`: a request as JSON on standard input, a plan on standard output. For `stoker plan`.

Owns: the request's form: {"config": a plain configuration, "options": see Options}.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...conf.layout import LayoutError
from ...conf.load import from_plain
from ...conf.schema import Config
from ..assemble import param_dtype
from ..flops import peak_of
from .account import DryRunError
from .estimate import Assumptions, timeline_of
from .make import layouts, plan_of, problems_of
from .report import json_of, table_of_layouts, text_of
from .schedule_draw import draw_png, draw_text


@dataclass(frozen=True)
class Options:
    """Of `stoker plan`, see launcher/plan.py."""

    device: str
    memory: float
    efficiency: float
    nvlink: float
    network: float
    rank: int | None
    layouts: int
    schedule: bool
    png: str | None
    measured: str | None  # with schedule: what a run says of its bubble
    json: bool


def main() -> int:
    request = json.load(sys.stdin)
    config, options = from_plain(request["config"]), Options(**request["options"])
    try:
        print(answer(config, options), end="")
    except (DryRunError, LayoutError, PlanError) as error:
        for line in str(error).splitlines():
            print(f"stoker plan: error: {line}", file=sys.stderr)
        return 2
    return 0


class PlanError(ValueError):
    """Something that the user can put right."""


def answer(config: Config, options: Options) -> str:
    """The text or JSON that was asked for.

    Raises:
        PlanError, DryRunError: what is wrong, one line per problem.
    """
    world = config.cluster.nodes * config.cluster.procs_per_node
    procs = config.cluster.procs_per_node
    assume = assumptions(config, options)
    problems = [] if options.layouts else problems_of(config)
    if problems:
        raise PlanError("\n".join(map(str, problems)))
    if options.rank is not None and not 0 <= options.rank < world:
        raise PlanError(f"--rank {options.rank}: there are ranks 0 to {world - 1}; see --world")
    if options.layouts:
        found = layouts(config, procs, assume, options.memory, options.layouts)
        return _json([json_of(p) for p in found]) if options.json else table_of_layouts(found, options.memory)
    plan = plan_of(config, procs, assume, options.rank)
    if options.schedule:
        if config.parallel.pipeline == 1:
            raise PlanError("--schedule: parallel.pipeline=1 has no schedule; give 2 or more")
        timeline = timeline_of(config, plan.layout, assume)
        if options.png:
            try:
                draw_png(Path(options.png), timeline)
            except ImportError:
                raise PlanError("--png: matplotlib is not installed; pip install 'stoker[plot]'") from None
        return draw_text(timeline) + (f"{options.measured}\n" if options.measured else "")
    if options.json:
        return _json(json_of(plan))
    text = text_of(plan)
    total = plan.worst.memory.total / 2**30
    if total > options.memory:
        text += f"does not fit: {total:.1f} GiB of live tensors, --memory {options.memory:g}\n"
    return text


def assumptions(config: Config, options: Options) -> Assumptions:
    """Raises PlanError: an unknown device."""
    peak = peak_of(options.device, param_dtype(config))
    if peak is None:
        raise PlanError(f"--device {options.device}: peak not known; expected a name as in train/flops.py, e.g. H100")
    return Assumptions(peak, options.efficiency, options.nvlink * 1e9, options.network * 1e9)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main())
