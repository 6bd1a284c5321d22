"""Experts over the steps of a run: figures in the metrics, biases in checkpoints, and their way to other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import digest, metrics, tiny_config, train
from stoker.conf.layout import Layout
from stoker.conf.schema import Balance, Config, ParamDtype, Router, Schedule
from stoker.train.grid import Membership, form
from stoker.train.metrics import RoutingFigures


def config_of(prefix: str | Path, steps: int, expert: int = 1) -> Config:
    model = {"num_experts": 4, "expert_ffn_size": 24, "dense_layers": 1, "num_layers": 3, "balance": Balance.bias}
    return tiny_config(
        prefix,
        steps,
        model={**model, "balance_rate": 0.01, "router": Router.sigmoid, "router_z_loss": 0.001},
        optim={"schedule": Schedule.constant},
        parallel={"expert": expert},
        precision={"params": ParamDtype.float64},
    )


def test_a_resumed_run_has_the_biases_and_goes_on_as_if_undisturbed(tmp_path: Path, tiny_data: Path) -> None:
    config = config_of(tiny_data, steps=6)
    undisturbed, _ = train(tmp_path / "one", config)
    config.checkpoint.interval = 3

    class Stop(Exception):
        pass

    from stoker.train.loop import Trainer

    after_step = Trainer._after_step

    def stop(self: Any, *args: Any) -> None:
        after_step(self, *args)
        if self.progress.step == 4:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_after_step", stop)
        with pytest.raises(Stop):
            train(tmp_path / "two", config)
    resumed, _ = train(tmp_path / "two", config, attempt=2)
    names = {entry.name: entry.tensor for entry in resumed.entries()}
    assert names["model/blocks.2.ffn.router_bias"].dtype == torch.float32
    assert names["model/blocks.2.ffn.router_bias"].any()
    assert digest(resumed) == digest(undisturbed)


def test_metrics_say_how_tokens_were_shared_out(tmp_path: Path, tiny_data: Path) -> None:
    train(tmp_path, config_of(tiny_data, steps=2))
    for line in metrics(tmp_path):
        assert 0 <= line["lowest_load"] < 1 < line["highest_load"] <= 2  # four experts, two for each token
        assert line["auxiliary_loss"] > 0
    assert RoutingFigures.of([], 5) is None
    assert RoutingFigures.of([10.0, 1.5, 0.5], 5) == RoutingFigures(2.0, 1.5, 0.5)


def _first_half(member: Membership, run: str, prefix: str) -> None:
    grid = form(member, Layout(data=2, expert=2))
    try:
        train(run, config_of(prefix, steps=3, expert=2), grid)
    finally:
        grid.close()


def test_experts_of_two_ranks_go_on_in_one_process(run_ranks: Any, tmp_path: Path, tiny_data: Path) -> None:
    run_ranks(2, _first_half, run=str(tmp_path / "two"), prefix=str(tiny_data))
    train(tmp_path / "two", config_of(tiny_data, steps=6), attempt=2)
    train(tmp_path / "one", config_of(tiny_data, steps=6))
    found = [line["loss"] for line in metrics(tmp_path / "two", attempt=2)]
    assert found == pytest.approx([line["loss"] for line in metrics(tmp_path / "one")][3:], rel=1e-9)
