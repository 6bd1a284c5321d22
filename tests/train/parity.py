"""One run on many ranks, put together again: losses, whole gradients, norms and weights, to hold against another run.

Owns: running a configuration on a layout and gathering what the ranks hold by the boxes they say it lies in. Every
element must be held by somebody, and all holders must have the same bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import make_context, metrics, tiny_config
from stoker.conf.fields import build
from stoker.conf.layout import Layout
from stoker.conf.load import to_plain
from stoker.conf.schema import Config

Arrays = dict[str, npt.NDArray[Any]]
STEPS = 3


@dataclass
class Run:
    """What came out. Gradients are those of the first step: sums times the constant scale, before clipping."""

    losses: list[float]
    norms: list[float]
    evals: list[float]
    gradients: Arrays
    weights: Arrays  # after the last step


def configured(prefix: Path, **sections: dict[str, Any]) -> Config:
    """tiny_config in float64, of sizes that divide badly, with `sections` on top."""
    base: dict[str, dict[str, Any]] = {
        "train": {"global_batch": 8, "micro_batch": 2, "eval_interval": STEPS, "eval_batches": 1},
        "model": {"vocab_size": 67, "num_layers": 4, "ffn_size": 50},
        "data": {"seq_len": 16},
        "precision": {"params": "float64"},
    }
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    plain = to_plain(tiny_config(prefix, steps=STEPS))
    for name, fields in base.items():
        plain[name] |= fields
    problems: list[Any] = []
    config = build(Config, plain, (), problems)
    assert not problems, problems
    return config


def run(run_ranks: Callable[..., Any] | None, config: Config, world: int = 1, directory: Path | None = None) -> Run:
    """Train STEPS steps on `world` ranks. directory: the run's (kept); None: a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        place = directory or Path(temporary)
        values = {"plain": to_plain(config), "run": str(place)}
        if run_ranks is None:
            _rank(None, **values)
        else:
            run_ranks(world, _rank, timeout=240, **values)
        lines = metrics(place)
        return Run(
            [line["loss"] for line in lines],
            [line["grad_norm"] for line in lines],
            [line["eval_loss"] for line in lines if "eval_loss" in line],
            _whole(place, "gradients"),
            _whole(place, "weights"),
        )


def _rank(member: Any, plain: dict[str, Any], run: str) -> None:
    from stoker.train.grid import form, single
    from stoker.train.loop import Trainer

    config = build(Config, plain, (), [])
    grid = single() if member is None else form(member, Layout.of(config, member.world_size), timeout=120)
    trainer = Trainer.build(config, grid, make_context(run))
    share, table = trainer.data_parallel, trainer.table
    commit = trainer._commit
    noted: list[bool] = []

    def note_first(*args: Any) -> None:
        if not noted:
            noted.append(True)
            held = {name: (gradient, share.box(name)) for name, gradient in share.gradients.items()}
            _write(Path(run), "gradients", grid.rank, held, {name: table[name].shape for name in held})
        commit(*args)

    trainer._commit = note_first  # type: ignore[method-assign]
    try:
        trainer.run()
        entries = [e for e in trainer.entries() if e.name.startswith("model/")]
        held = {e.name.removeprefix("model/"): (e.tensor, e.box) for e in entries}
        _write(Path(run), "weights", grid.rank, held, {e.name.removeprefix("model/"): e.shape for e in entries})
    finally:
        trainer.close()
        grid.close()


def leg(run_ranks: Callable[..., Any], config: Config, world: int, run: Path, number: int, stop: int) -> None:
    """Attempt `number` of a run: restore the newest checkpoint, go on to step `stop`, save. What the ranks hold then,
    and held before the first step, is in `state(run, "end", number)` and `state(run, "begin", number)`."""
    values = {"plain": to_plain(config), "run": str(run), "number": number, "stop": stop}
    if world == 1:
        _leg(None, **values)
    else:
        run_ranks(world, _leg, timeout=240, **values)


def state(run: Path, moment: str, number: int) -> Arrays:
    """All tensors of the persistent state at one end of a leg, whole, by name."""
    return _whole(run, f"{moment}{number}")


def _leg(member: Any, plain: dict[str, Any], run: str, number: int, stop: int) -> None:
    from stoker.launcher.run.heartbeat import Control, Save, Segment
    from stoker.train.grid import form, single
    from stoker.train.loop import Trainer
    from stoker.train.pulse import Pulse

    segment = Segment.create("test")
    segment.write_control(Control(1, stop, True, Save.BOTH))
    config = build(Config, plain, (), [])
    grid = single() if member is None else form(member, Layout.of(config, member.world_size), timeout=120)
    trainer = Trainer.build(config, grid, make_context(run, number, 1, Pulse(segment, 1)))
    try:
        for moment in ("begin", "end"):
            entries = trainer.entries()
            held = {e.name: (e.tensor, e.box) for e in entries}
            _write(Path(run), f"{moment}{number}", grid.rank, held, {e.name: e.shape for e in entries})
            if moment == "begin":
                trainer.run()
    finally:
        trainer.close()
        grid.close()


def _write(run: Path, kind: str, rank: int, held: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    import torch

    arrays: Arrays = {}
    for name, (tensor, box) in held.items():
        held_tensor = tensor.detach()
        # numpy knows no bfloat16; float32 holds all its values.
        arrays[f"{name}|tensor"] = (held_tensor.float() if held_tensor.dtype == torch.bfloat16 else held_tensor).numpy()
        arrays[f"{name}|box"] = np.array([box.start, box.shape], dtype=np.int64)
        arrays[f"{name}|shape"] = np.array(shapes[name], dtype=np.int64)
    np.savez(run / f"{kind}-{rank}.npz", **arrays)


def _whole(run: Path, kind: str) -> Arrays:
    wholes: Arrays = {}
    for file in sorted(run.glob(f"{kind}-*.npz")):
        arrays = np.load(file)
        for name in {key.split("|")[0] for key in arrays.files}:
            start, shape = arrays[f"{name}|box"].tolist()
            whole = wholes.setdefault(name, np.full(arrays[f"{name}|shape"], np.nan))
            region = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
            part, known = arrays[f"{name}|tensor"], whole[region]
            same = np.isnan(known) | (known == part)
            assert same.all(), f"{kind} {name}: two ranks hold different values of the same elements"
            whole[region] = part
    missing = [name for name, whole in wholes.items() if np.isnan(whole).any()]
    assert not missing, f"{kind}: nobody holds all of {missing}"
    return wholes


def assert_same(found: Run, expected: Run, gradient: float = 1e-10, weight: float = 1e-8) -> None:
    """Elementwise, relative to each tensor's largest element.

    But not to rounding errors: the bias of keys has no influence without rotation, and so no gradient.
    """
    assert set(found.gradients) == set(expected.gradients)
    assert set(found.weights) == set(expected.weights)
    noise = 1e-6 * max(float(np.abs(values).max()) for values in expected.gradients.values())
    for name, values in expected.gradients.items():
        assert largest(found.gradients[name], values, noise) < gradient, f"gradient of {name}"
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-8)
    np.testing.assert_allclose(found.evals, expected.evals, rtol=1e-8)
    for name, values in expected.weights.items():
        assert largest(found.weights[name], values, 1e-4) < weight, f"weights of {name}"


def assert_close(found: Run, expected: Run, lr: float) -> None:
    """In float32: gradients to 1e-5 of each tensor's norm, weights to 0.05 of a step's size for each step."""
    assert set(found.gradients) == set(expected.gradients)
    whole = float(np.sqrt(sum(np.square(values).sum() for values in expected.gradients.values())))
    for name, values in expected.gradients.items():
        error = float(np.linalg.norm(found.gradients[name] - values))
        assert error < 1e-5 * max(float(np.linalg.norm(values)), 1e-4 * whole), f"gradient of {name}: {error}"
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    for name, values in expected.weights.items():
        error = float(np.abs(found.weights[name] - values).max())
        assert error < 0.05 * lr * STEPS, f"weights of {name}: {error}"


def largest(found: npt.NDArray[Any], expected: npt.NDArray[Any], least: float) -> float:
    """The largest difference, relative to the largest expected element if that is not below `least`."""
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), least))
