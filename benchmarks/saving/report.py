"""What benchmarks/checkpoint.py measured, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .in_trainer import INTERVAL, SKIPPED, STEPS, Trained

Figures = dict[str, list[float]]


@dataclass
class Measured:
    """With one number of ranks: figures by "who: what key", a value per round."""

    size: int
    bytes: int = 0  # of one rank's state
    tensors: int = 0  # likewise
    figures: Figures = field(default_factory=dict)
    first: Figures = field(default_factory=dict)  # of the round before the first, when nothing was warm
    trained: list[Trained] = field(default_factory=list)

    def add(self, number: int, who: str, what: str, values: dict[str, float]) -> None:
        into = self.figures if number else self.first
        for key, value in values.items():
            into.setdefault(f"{who}: {what} {key}", []).append(value)

    def ratios(self, of: str, over: str) -> list[float]:
        return [a / b for a, b in zip(self.figures[of], self.figures[over], strict=True)]

    @property
    def rounds(self) -> int:
        return len(self.figures["raw: save seconds"])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (least to most)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# ---- ours and raw


def paired(m: Measured) -> list[str]:
    def pair(title: str, raw: str, own_title: str, own: str, limit: float | None) -> list[str]:
        ratios = m.ratios(own, raw)
        verdict = ""
        if limit is not None:
            verdict = f"{limit:g}: {'met' if statistics.median(ratios) <= limit else 'MISSED'}"
        return [
            row(title, spread(m.figures[raw]), "1", ""),
            row(own_title, spread(m.figures[own]), spread(ratios), verdict),
        ]

    first = m.first["stoker: save call"][0]
    memory = m.first["stoker: prepare memory"][0] + max(0.0, m.first["stoker: save memory"][0])
    return [
        row("", "seconds", "ratio", "at most"),
        "|---|---|---|---|",
        *pair("copy of the state in memory", "raw: copy seconds", "stall of a save", "stoker: save call", 1.3),
        row("stall of the first save, memory fetched ahead", f"{first:.2f}", "", ""),
        *pair("write and fsync", "raw: save seconds", "save, until it is durable", "stoker: save seconds", 1.15),
        row(
            "write past the page cache, and fsync",
            spread(m.figures["raw: save direct seconds"]),
            spread(m.ratios("raw: save direct seconds", "raw: save seconds")),
            "",
        ),
        *pair("read, cold", "raw: cold seconds", "load, cold", "stoker: cold seconds", 1.15),
        *pair(
            "read, from the page cache", "raw: warm seconds", "load, from the page cache", "stoker: warm seconds", None
        ),
        row(
            "host memory for saves, times the state",
            "",
            f"{memory:.2f}",
            f"2: {'met' if memory <= 2.05 else 'MISSED'}",
        ),
    ]


# ---- all, while training


def beside_others(m: Measured, names: Sequence[str]) -> list[str]:
    lines = [
        row(
            "",
            "training time lost, s",
            "call blocks, s",
            "update waits, s",
            "durable after, s",
            "over raw write",
            "longest step, ms",
            "cold load, s",
            "over raw read",
            "warm load, s",
            "memory, times the state",
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for who in names:
        memory = m.first[f"{who}: train memory"][0]
        if who == "stoker":
            memory = m.first["stoker: prepare memory"][0] + max(0.0, m.first["stoker: save memory"][0])
        is_shared = who == "stoker, waves"  # it uses segments that are there
        lines.append(
            row(
                who,
                spread(m.figures[f"{who}: train lost"]),
                spread(m.figures[f"{who}: train call"]),
                f"{statistics.median(m.figures[f'{who}: train waited']):.2f}",
                spread(m.figures[f"{who}: train seconds"]),
                f"{statistics.median(m.ratios(f'{who}: train seconds', 'raw: save seconds')):.2f}",
                f"{statistics.median(m.figures[f'{who}: train longest']) * 1e3:.0f}",
                f"{statistics.median(m.figures[f'{who}: cold in turn seconds']):.2f}",
                f"{statistics.median(m.ratios(f'{who}: cold in turn seconds', 'raw: cold seconds')):.2f}",
                f"{statistics.median(m.figures[f'{who}: warm in turn seconds']):.2f}",
                "" if is_shared else f"{memory:.1f}",
            )
        )
    base = m.figures["stoker: train base"]
    lines += ["", f"A step without a save took {spread([b * 1e3 for b in base], 1)} ms."]
    return lines


# ---- in the trainer


def in_trainer(m: Measured) -> list[str]:
    plain = m.trained[0].mean
    lines = [
        row("", "s per step", "time for checkpoints", "median step, ms", "stall, s", "waited, s", "durable after, s"),
        "|---|---|---|---|---|---|---|",
    ]
    for t in m.trained:
        share = f"{(t.mean / plain - 1) * 100:+.1f} %" if t is not m.trained[0] else ""
        events = [
            f"{statistics.median(e[key] for e in t.saved):.2f}" if t.saved else ""
            for key in ("stall_seconds", "wait_seconds", "seconds")
        ]
        lines.append(row(t.kind, f"{t.mean:.3f}", share, f"{statistics.median(t.intervals) * 1e3:.0f}", *events))
    return lines


def section(m: Measured, names: Sequence[str]) -> list[str]:
    ranks = "1 rank" if m.size == 1 else f"{m.size} ranks"
    lines = [
        f"## {ranks}",
        "",
        f"{m.bytes / 2**30:.2f} GiB and {m.tensors} tensors per rank; {m.rounds} rounds.",
        "",
        *paired(m),
        "",
        "While it trains:",
        "",
        *beside_others(m, names),
        "",
    ]
    if m.trained:
        lines += [
            f"In the trainer (`stoker run`, 35.6 million parameters in float32: 0.40 GiB of state; {STEPS} steps, the "
            f"first {SKIPPED} left out; every {INTERVAL} steps a checkpoint):",
            "",
            *in_trainer(m),
            "",
        ]
    return lines


def report(results: Sequence[Measured], names: Sequence[str], date: str, machine: str) -> str:
    lines = [line for m in results for line in section(m, names)]
    return TEXT.format(date=date, tables="\n".join(lines), machine=machine)


TEXT = """# Checkpoints: what a save costs, and a load

`python benchmarks/checkpoint.py --report`, {date}. The state is that of a model trained in bfloat16: weights, and in
float32 two moments and a master copy; each rank holds its rows of every tensor. In every round everybody has a turn,
and ratios are those of one round; figures are medians (least to most). One round before the first is not counted.

- Copy: `memmove` of all tensors into memory that is there already. Right before a copy, a save
  or a load all memory is written to that it reads and writes: a virtual machine may take back what was idle for a
  minute, and whoever comes first pays for that, up to several times the copy. "Call blocks" of the second table is a
  save after such a pause.
- Write: one file per rank, 16 MiB per call, fsync of file and directory, through the page cache. Read: the same files
  into one piece of memory. As many streams as ranks.
- Ours: the call copies into the agent's segments; the node's writer process writes shard, checksums, index, manifest,
  syncs them and their directory, and renames. Memory was fetched ahead as the trainer does it after its first step.
  A load verifies every block. "waves": half a copy at a time in 2 x 128 MB, beside the next steps.
- Cold: the files were taken out of the page cache before (the host below this machine may have its own). Warm: they
  were read into it.
- Training: steps of matrix products on one thread per rank, each as long as the slowest rank's. Time lost is the call
  and all that the steps until the end of the save took longer than such steps before it. The steps leave the state
  alone, so that copies on write cost a forked writer nothing.
- DCP: torch's distributed checkpoint, `save`; `async_save` in a thread; the same with `DefaultStager` and what needs no
  CUDA of its options (the update waits for the staging). safetensors: `save_file` per rank, and fsync. Megatron-Core:
  `async_strategy="mcore"`, which forks a writer from each rank, with its structure cached from save to save.
- Our writer writes past the page cache on a local disk, the others through it. How much of the difference that makes
  is seen in "write past the page cache", in pieces of 16 MiB.
- Memory: anonymous and shared memory of the machine at its highest in the first save, beyond what was held before.

{tables}{machine}.
"""
