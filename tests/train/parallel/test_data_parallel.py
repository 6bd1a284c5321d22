"""ZeRO-1, FSDP and HSDP: runs repeat to the bit, go on in one another's checkpoints, and notice a lost peer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import digest, make_context, tiny_config, train
from stoker.conf.layout import Layout
from stoker.train.box import Box
from stoker.train.comm import PeerLostError
from stoker.train.grid import Membership, form
from stoker.train.loop import Trainer

KINDS = {"ddp": {}, "zero1": {"data": "zero1"}, "fsdp": {"data": "fsdp"}, "hsdp": {"data": "hsdp", "data_shard": 2}}


def configured(prefix: str, kind: str, **sections: Any) -> Any:
    from stoker.conf.schema import DataParallel

    fields: dict[str, Any] = dict(KINDS[kind])
    fields["data"] = DataParallel(fields.get("data", "ddp"))
    sections = {"train": {"micro_batch": 2, "global_batch": 8}, **sections}
    return tiny_config(prefix, steps=3, parallel=fields, **sections)


def _digests(member: Membership, prefix: str, runs: list[str], kind: str) -> list[str]:
    config = configured(prefix, kind)
    grid = form(member, Layout.of(config, member.world_size))
    try:
        return [digest(train(run, config, grid)[0]) for run in runs]
    finally:
        grid.close()


@pytest.mark.parametrize("kind", ["zero1", "fsdp", pytest.param("hsdp", marks=pytest.mark.full)])
def test_two_runs_have_the_same_bits(run_ranks: Any, tmp_path: Path, tiny_data: Path, kind: str) -> None:
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    ranks = run_ranks(4, _digests, prefix=str(tiny_data), runs=runs, kind=kind)
    assert all(first == second for first, second in ranks)
    assert len({first for first, _ in ranks}) > 1  # ranks hold different shards


def _whole_state(trainer: Trainer) -> dict[str, list[float]]:
    """Every tensor of the persistent state, put together from the ranks' boxes."""
    found = {}
    names = trainer.grid.control.all_gather_json([(e.name, list(e.shape)) for e in trainer.entries()])
    own = {e.name: e for e in trainer.entries()}
    for name, shape in sorted({(n, tuple(s)) for rank in names for n, s in rank}):
        whole = torch.zeros(shape, dtype=torch.float64)
        if name in own and own[name].replica.index == 0:
            whole[own[name].box.slices_in(Box.whole(shape))] = own[name].tensor.double()
        found[name] = trainer.grid.control.all_reduce(whole).flatten().tolist()
    return found


def _state(member: Membership, prefix: str, run: str, kind: str, train_on: bool) -> dict[str, list[float]] | None:
    """Of a run after its last step, or as it is restored."""
    from stoker.conf.schema import ParamDtype

    config = configured(prefix, kind, precision={"params": ParamDtype.bfloat16}, optim={"clip_norm": 0.0})
    grid = form(member, Layout.of(config, member.world_size))
    trainer = Trainer.build(config, grid, make_context(run))
    try:
        if train_on:
            trainer.run()
        state = _whole_state(trainer)
        return state if grid.rank == 0 else None
    finally:
        trainer.close()
        grid.close()


def test_bfloat16_with_masters_has_the_same_bits_in_every_kind(run_ranks: Any, tmp_path: Path, tiny_data: Path) -> None:
    """A sum of two is the same in any order; without clipping nothing else could differ."""
    ddp, zero1, fsdp = (
        run_ranks(2, _state, kind=kind, train_on=True, prefix=str(tiny_data), run=str(tmp_path / kind))[0]
        for kind in ("ddp", "zero1", "fsdp")
    )
    assert zero1 == ddp
    assert fsdp == ddp


def test_a_checkpoint_of_one_kind_is_restored_to_the_bit_by_another(
    run_ranks: Any, tmp_path: Path, tiny_data: Path
) -> None:
    """bfloat16 weights, float32 masters and moments; 2 ranks save, 3 and 2 and 4 and 1 load."""
    values = {"prefix": str(tiny_data), "run": str(tmp_path)}
    saved = run_ranks(2, _state, kind="zero1", train_on=True, **values)[0]
    assert {name.rpartition("/")[0] for name in saved} == {
        "model",
        "optim/exp_avg",
        "optim/exp_avg_sq",
        "optim/master",
    }
    for size, kind in ((2, "fsdp"), (4, "hsdp"), (2, "ddp")):
        assert run_ranks(size, _state, kind=kind, train_on=False, **values)[0] == saved, kind


def _lose_a_peer(member: Membership, prefix: str, run: str, kind: str, moment: str) -> str:
    """Rank 1 goes in the second step, before the reductions of gradients or the exchange of weights are over."""
    config = configured(prefix, kind)
    grid = form(member, Layout.of(config, member.world_size))
    trainer = Trainer.build(config, grid, make_context(run))
    trainer.step()
    share = trainer.data_parallel
    if member.rank == 1:
        setattr(share, moment, lambda: os._exit(1))
    try:
        trainer.step()
        time.sleep(0.1)
        trainer.step()
    except PeerLostError:
        return "lost"
    finally:
        trainer.close()
        grid.close()
    return "nothing noticed"


@pytest.mark.parametrize("moment", ["finish", "publish"])
@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_a_lost_peer_is_noticed(run_ranks: Any, tmp_path: Path, tiny_data: Path, kind: str, moment: str) -> None:
    values = {"prefix": str(tiny_data), "run": str(tmp_path), "kind": kind, "moment": moment}
    assert run_ranks(2, _lose_a_peer, may_die=(1,), **values)[0] == "lost"
