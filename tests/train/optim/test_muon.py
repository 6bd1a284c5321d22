"""Muon: orthogonal updates as torch's, and the same result however matrices are cut over ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from harness import metrics, tiny_config, train
from stoker.conf.schema import Config, OptimConfig, OptimizerKind, ParamDtype, PrecisionConfig
from stoker.kernels import select
from stoker.train.box import Box
from stoker.train.comm import Communicator, PeerLostError
from stoker.train.grid import Grid, Membership, form, single
from stoker.train.optim import exchange
from stoker.train.optim.build import optimizer_of
from stoker.train.optim.exchange import Exchange
from stoker.train.optim.newton_schulz import orthogonalize
from stoker.train.params import ParamFacts, ParamTable, Role
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

SHAPES = {"wide": (8, 24), "tall": (21, 6), "square": (12, 12), "experts": (4, 10, 6), "norm": (12,), "head": (16, 8)}
ROLES = {"norm": Role.NORM, "head": Role.HEAD}
TABLE = ParamTable([ParamFacts(n, s, ROLES.get(n, Role.MATRIX), 0.02) for n, s in SHAPES.items()])
OPTIM = OptimConfig(kind=OptimizerKind.muon, lr=1e-2, muon_lr=2e-2, weight_decay=0.1)


def values(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + len(name) * 7 + ord(name[0]))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def cut(layout: str, name: str, rank: int, size: int) -> Box:
    """This rank's place. replicated: all of it; rows: as ZeRO; columns: as a row-parallel layer; both: tensor x ZeRO on
    2 x 2 ranks; experts: those whole, on half of the ranks each, the rest replicated."""
    whole = Box.whole(SHAPES[name])

    def part(box: Box, dim: int, index: int, of: int) -> Box:
        length, start, shape = box.shape[dim], list(box.start), list(box.shape)
        first, last = length * index // of, length * (index + 1) // of
        start[dim], shape[dim] = start[dim] + first, last - first
        return Box(tuple(start), tuple(shape))

    if layout == "rows":
        return part(whole, 0, rank, size)
    if layout == "columns" and len(whole.shape) == 2:
        return part(whole, 1, rank, size)
    if layout == "both" and len(whole.shape) == 2:
        return part(part(whole, 1 if name == "tall" else 0, rank % 2, 2), 0, rank // 2, 2)
    if layout == "experts" and name == "experts":
        return part(whole, 0, rank % 2, 2)
    return whole


def three_steps(layout: str, grid: Grid, dtype: torch.dtype = torch.float64, fail_in: int = 0) -> dict[str, Any]:
    """Parameters and momentum of this rank after three steps, or after the step that lost a peer, with their boxes."""
    boxes = {n: cut(layout, n, grid.rank, grid.world_size) for n in SHAPES}
    places = {n: box.slices_in(Box.whole(SHAPES[n])) for n, box in boxes.items()}
    shards = {n: values(n, 0)[places[n]].to(dtype).clone() for n in SHAPES}
    config = Config(optim=OPTIM, precision=PrecisionConfig(ParamDtype.float64))
    optimizer = optimizer_of(shards, boxes.__getitem__, TABLE, config, select(), grid)
    for update in (1, 2, 3):
        if update == fail_in and grid.rank == 1:
            os._exit(1)
        state = {("param", n): p.clone() for n, p in shards.items()}
        state |= {(kind, n): t.clone() for kind, ts in optimizer.state().items() for n, t in ts.items()}
        gradients = {n: values(n, update)[places[n]].to(torch.promote_types(dtype, torch.float32)) for n in SHAPES}
        try:
            optimizer.step(gradients, 1e-2 / update, update, 0.5)
        except PeerLostError:
            now = {("param", n): p for n, p in shards.items()}
            now |= {(kind, n): t for kind, ts in optimizer.state().items() for n, t in ts.items()}
            return {"update": update, "unchanged": all(torch.equal(now[key], state[key]) for key in state)}
    return {"params": shards, "momentum": optimizer.state()["momentum"], "places": places, "optimizer": optimizer}


def _difference(member: Membership, layout: str) -> float:
    grid, expected = form(member), three_steps("replicated", single())
    try:
        once = _greatest(three_steps(layout, grid), expected)
        exchange.ROUND = 1  # every matrix in a round of its own
        return max(once, _greatest(three_steps(layout, grid), expected))
    finally:
        grid.close()


def _greatest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(
        float((t - expected[kind][n][found["places"][n]]).abs().max())
        for kind in ("params", "momentum")
        for n, t in found[kind].items()
        if t.numel()
    )


@pytest.mark.parametrize(
    ("layout", "size"), [("replicated", 2), ("rows", 3), ("columns", 2), ("both", 4), ("experts", 4)]
)
def test_every_cut_gives_the_update_of_one_process(run_ranks: Any, layout: str, size: int) -> None:
    assert max(run_ranks(size, _difference, layout=layout)) < 1e-12


def _lose(member: Membership) -> dict[str, Any]:
    grid = form(member, timeout=20)
    try:
        return three_steps("rows", grid, fail_in=2)
    finally:
        grid.close()


def test_a_lost_peer_leaves_momentum_and_weights_as_they_were(run_ranks: Any) -> None:
    assert run_ranks(2, _lose, may_die=(1,)) == [{"update": 2, "unchanged": True}, None]


def test_singular_values_come_near_one_and_vectors_stay() -> None:
    for shape in ((6, 20), (20, 6), (3, 16, 16)):
        matrices = torch.randn(shape, dtype=torch.float64)
        found = orthogonalize(matrices, 5)
        u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
        turned = u.mT @ found @ vh.mT
        singular = torch.diagonal(turned, dim1=-2, dim2=-1)
        assert float(singular.min()) > 0.3
        assert float(singular.max()) < 1.3
        assert float((turned - torch.diag_embed(singular)).abs().max()) < 1e-10
    assert torch.equal(orthogonalize(torch.zeros(2, 3), 5), torch.zeros(2, 3))


def test_the_orthogonal_factor_is_that_of_torch() -> None:
    """torch.optim.Muon's, which iterates in bfloat16."""
    for name in ("wide", "tall", "square"):
        theirs = _zeropower_via_newtonschulz(values(name, 1).float(), (3.4445, -4.7750, 2.0315), 5, 1e-7).double()
        found = orthogonalize(values(name, 1), 5)
        assert float((found - theirs).norm() / theirs.norm()) < 0.02


def test_a_literal_step() -> None:
    """Nesterov's gradient of the first step, 0.5 g (0.05 + 0.95 x 0.05), the factor 0.2 sqrt(24), and decay."""
    shard = values("wide", 0)
    weights = {"wide": shard.clone()}
    table, config = ParamTable([TABLE["wide"]]), Config(optim=OPTIM, precision=PrecisionConfig(ParamDtype.float64))
    optimizer = optimizer_of(weights, lambda _: Box.whole(SHAPES["wide"]), table, config, select(), single())
    optimizer.step({"wide": values("wide", 1)}, 1e-3, 1, 0.5)
    expected = shard * (1 - 2e-3 * 0.1) - 2e-3 * 0.2 * 24**0.5 * orthogonalize(values("wide", 1), 5)
    torch.testing.assert_close(weights["wide"], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(optimizer.state()["momentum"]["wide"], 0.025 * values("wide", 1))


def test_what_is_no_hidden_matrix_is_updated_by_adamw() -> None:
    state = three_steps("replicated", single())["optimizer"].state()
    assert set(state["momentum"]) == {"wide", "tall", "square", "experts"}
    assert set(state["exp_avg"]) == set(state["exp_avg_sq"]) == {"norm", "head"}
    assert "master" not in state


def test_half_precision_has_masters_for_both() -> None:
    found = three_steps("replicated", single(), torch.bfloat16)
    masters = found["optimizer"].state()["master"]
    assert set(masters) == set(SHAPES)
    assert all(torch.equal(found["params"][n], masters[n].bfloat16()) for n in SHAPES)


class Listed(Communicator):
    """One of `size` ranks that all hold the same."""

    def __init__(self, size: int) -> None:
        super().__init__(None, 0, size, torch.device("cpu"))

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value] * self.size


def test_matrices_are_dealt_out_evenly() -> None:
    facts = [
        ParamFacts(f"{i}.{n}", s, Role.MATRIX, 0.0) for i in range(6) for n, s in (("w", (64, 64)), ("u", (256, 64)))
    ]
    dealt = Exchange(facts, {f.name: Box.whole(f.shape) for f in facts}, Listed(4), torch.float32)
    owned = [[m.name for m in dealt.matrices if m.owner == rank] for rank in range(4)]
    assert [sum(n.endswith("u") for n in names) for names in owned] == [2, 2, 1, 1]
    assert [len(names) for names in owned] == [2, 2, 4, 4]


def _train(member: Membership, prefix: str, run: str) -> None:
    grid = form(member)
    try:
        train(run, tiny_config(prefix, **MUON), grid)
    finally:
        grid.close()


MUON: dict[str, Any] = {"steps": 6, "optim": {"kind": OptimizerKind.muon}, "train": {"micro_batch": 2}}


def test_a_run_over_ranks_is_that_of_one(run_ranks: Any, tmp_path: Any, tiny_data: Any) -> None:
    trainer, _ = train(tmp_path / "one", tiny_config(tiny_data, **MUON))
    run_ranks(2, _train, prefix=str(tiny_data), run=str(tmp_path / "two"))
    one, two = ([line["loss"] for line in metrics(tmp_path / run)] for run in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-5)
    assert one[-1] < one[0] - 0.3
    names = {e.name for e in trainer.entries()}
    assert "optim/momentum/blocks.0.ffn.up" in names
    assert "optim/exp_avg/blocks.0.ffn.up" not in names
    resumed, _ = train(tmp_path / "one", tiny_config(tiny_data, **{**MUON, "steps": 8}), attempt=2)
    assert resumed.progress.step == 8
