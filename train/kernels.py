"""Which implementations of the ops a rank works with: the configuration's wish, the device, and what is built.

Owns: having the native kernels built by one rank per node at their first use, and the agreement of all ranks on one
choice. Does not own: choosing (kernels/dispatch.py) or building (kernels/native/).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ..conf.schema import KernelsConfig, ParamDtype
from ..kernels import OP_NAMES, Device, Ops, select
from ..kernels.measured import read
from .grid import Grid


def choose_ops(settings: KernelsConfig, grid: Grid, params: ParamDtype = ParamDtype.float32) -> Ops:
    """The ops of this run with weights of dtype `params`, the same implementations on every rank. Collective.

    Raises:
        ValueError: what was asked for is not there, with what to do; or ranks would choose differently.
        PeerLostError: another rank is gone.
    """
    wanted, device = wishes(settings), Device.of(grid.device)
    measured, is_float64 = None, params is ParamDtype.float64
    if device.type == "cuda" and not is_float64 and not {"auto", "native"}.isdisjoint(wanted.values()):
        from ..kernels.native import ready

        _have_built(settings, device, grid)
        measured = read(device.name, ready.name(device.capability))
    ops = select(
        wanted,
        device,
        strict=settings.strict,
        is_compiled=settings.compile,
        measured=measured,
        is_float64=is_float64,
    )
    agree(ops, grid)
    return ops


def wishes(settings: KernelsConfig) -> Mapping[str, str]:
    """As `select` takes them."""
    named = {op: getattr(settings, op) for op in OP_NAMES}
    return {"default": settings.default} | {op: name for op, name in named.items() if name is not None}


def _have_built(settings: KernelsConfig, device: Device, grid: Grid) -> None:
    """One rank per node builds what is missing, into a cache of the node's own; the others wait for it."""
    from ..kernels.native.ready import build_if_missing

    problem = None
    if grid.device.index in (None, 0) and device.capability is not None:
        problem = build_if_missing(device.capability, settings.architectures, say=print)
    if problem is not None and not settings.strict:
        print(problem)
    for rank, text in enumerate(grid.control.all_gather_json(problem)):
        if text is not None and settings.strict:
            raise ValueError(
                f"kernels.strict=true: {text} (on rank {rank}); kernels=reference does without them, and with "
                "kernels.strict=false the reference takes over"
            )


def agree(ops: Ops, grid: Grid) -> None:
    """Nodes may differ in what is installed; ranks of one run may not. Collective.

    Raises:
        ValueError: on another rank other implementations were chosen.
    """
    mine = {c.op: c.implementation for c in ops.choices}
    digest = hashlib.sha256(" ".join(f"{op}={name}" for op, name in mine.items()).encode()).hexdigest()[:16]
    digests = grid.control.all_gather_json(digest)
    other = next((rank for rank, d in enumerate(digests) if d != digests[0]), None)
    if other is None:
        return
    # Of these two alone, so that every rank says the same and a node's log has it once.
    theirs = grid.control.all_gather_json(mine if grid.rank in (0, other) else None)
    differing = [op for op in mine if theirs[0][op] != theirs[other][op]]
    raise ValueError(
        f"kernels: ranks 0 and {other} have different ones to choose from: {_named(theirs[0], differing)} on rank 0, "
        f"{_named(theirs[other], differing)} on rank {other}; expected the same on all: name the implementations "
        "(kernels=reference, kernels.rmsnorm=...), or make the nodes alike"
    )


def _named(choices: Mapping[str, str], ops: Sequence[str]) -> str:
    return ", ".join(f"{op}={choices[op]}" for op in ops)
