"""Saving and loading a checkpoint: ours against plain writing and reading of the same bytes, and beside other tools.

    python benchmarks/checkpoint.py [--gib 2] [--ranks 1 2] [--minutes 6] [--dir DIR] [--report [FILE]]

In every round everybody has a turn on the same machine: a copy in memory, raw write and fsync, raw reading, our save
and our loads; then each contender saves during training steps and loads. Ratios are of the same round. Other trainers
run in virtual environments of their own (benchmarks/peers.py), which are made if they are missing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

import torch.distributed as dist
from measuring import machine
from peers import python_of
from saving.group import Group, cold, peak, settle, warm
from saving.in_trainer import KINDS, train
from saving.node import Node
from saving.report import Measured, report
from saving.state import calibrate

OURS = ("stoker", "stoker, waves")
MODULES = {
    "stoker_ways": OURS,
    "torch_ways": ("DCP", "DCP async", "DCP async, stager", "safetensors"),
    "megatron_ways": ("Megatron-Core async",),
}


class Bench:
    def __init__(self, measured: Measured, groups: dict[str, Group], root: Path) -> None:
        self.measured, self.groups, self.root = measured, groups, root
        self.owner = {who: module for module, names in MODULES.items() for who in names}

    def round(self, number: int) -> None:
        """Round 0 is not counted: it is the first touch of all memory, and tells how much of it there is."""
        self.alone(number)
        names = [who for who in self.owner if self.owner[who] in self.groups]
        turn = number % len(names)
        for who in names[turn:] + names[:turn]:
            self.in_training(number, who)

    def start(self) -> None:
        """What a trainer does after its first step."""
        self.order(0, self.groups["stoker_ways"], "prepare", OURS[0], self.root / OURS[0])

    def alone(self, number: int) -> None:
        """Ours and raw in turn, the first of the two changing."""
        ours, raw, group = self.root / OURS[0], self.root / "raw", self.groups["stoker_ways"]
        turn = 1 if number % 2 else -1
        self.order(number, group, "copy", "raw", raw)
        for do, who, directory in [
            ("save", OURS[0], ours),
            ("save", "raw", raw),
            ("save direct", "raw", raw / "direct"),
        ][::turn]:
            self.order(number, group, do, who, directory)
        shutil.rmtree(raw / "direct")
        for what, prepare in (("cold", cold), ("warm", warm)):
            for who, directory in [(OURS[0], ours), ("raw", raw)][::turn]:
                prepare(directory)
                self.order(number, group, "load", who, directory, what)
        self.clear(ours, raw)

    def in_training(self, number: int, who: str) -> None:
        group, directory = self.groups[self.owner[who]], self.root / who
        directory.mkdir(exist_ok=True)
        self.order(number, group, "train", who, directory)
        for what, prepare in (("cold", cold), ("warm", warm)):
            prepare(directory)
            self.order(number, group, "load", who, directory, f"{what} in turn")
        self.clear(directory)

    def order(self, number: int, group: Group, do: str, who: str, directory: Path, what: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with peak() as memory:
            figures = group.order(do, who, directory)
        if number == 0:
            figures["memory"] = memory.bytes / (self.measured.bytes * self.measured.size)
        self.measured.add(number, who, what or do, figures)

    def clear(self, *directories: Path) -> None:
        for directory in directories:
            shutil.rmtree(directory)
        settle()


def measure(size: int, total: int, modules: Sequence[str], venvs: Path, root: Path, seconds: float) -> Measured:
    """Rounds until the time is over; three at least."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
    options = {"size": size, "port": store.port, "total": total, "products": calibrate(), "root": str(root)}
    ends, groups, measured = time.monotonic() + seconds, dict[str, Group](), Measured(size)
    node = Node.start(root / "stoker", size, root / "writer.log")
    fds = {"stoker_ways": node.fds, "torch_ways": [()] * size}
    try:
        for module in modules:
            python = python_of("megatron-core", venvs) if module == "megatron_ways" else sys.executable
            groups[module] = Group.start(module, python, fds.get(module), options)
        for group in groups.values():
            facts = group.wait()[0]
            measured.bytes, measured.tensors = facts["bytes"], facts["tensors"]
        bench, number, longest = Bench(measured, groups, root), 0, 0.0
        bench.start()
        while number < 4 or time.monotonic() + longest < ends:
            began = time.monotonic()
            bench.round(number)
            longest = max(longest, time.monotonic() - began)
            number += 1
    finally:
        for group in groups.values():
            group.end()
        node.end()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="for all but the trainer's runs; three rounds at least"
    )
    parser.add_argument("--without", nargs="+", default=[], choices=list(MODULES)[1:], help="leave these out")
    parser.add_argument("--no-trainer", dest="trainer", action="store_false", help="leave the real trainer out")
    parser.add_argument("--dir", type=Path, help="where the files go; default: the temporary directory")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "stoker-bench")
    default = Path(__file__).with_name(f"checkpoint-{date.today()}.md")
    parser.add_argument("--report", type=Path, nargs="?", const=default, help=f"write the result there ({default})")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="stoker-checkpoint-", dir=arguments.dir))
    modules = [module for module in MODULES if module not in arguments.without]
    seconds = 60 * arguments.minutes / len(arguments.ranks)
    try:
        total = int(arguments.gib * 2**30)
        results = [measure(n, total, modules, arguments.venvs.absolute(), root, seconds) for n in arguments.ranks]
        for measured in results if arguments.trainer else ():
            try:
                measured.trained = [train(kind, measured.size, root) for kind in KINDS]
            except RuntimeError as e:  # the other figures are not to be lost
                print(e, file=sys.stderr)
    finally:
        shutil.rmtree(root)
    names = [who for module in modules for who in MODULES[module]]
    text = report(results, names, str(date.today()), machine())
    print(text, end="")
    if arguments.report is not None:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
