"""Runs that begin with given weights: the same bits on every layout, and nothing begun with those of another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
from harness import events, make_context, metrics, tiny_config, train
from stoker.conf.fields import build
from stoker.conf.layout import Layout
from stoker.conf.load import to_plain
from stoker.conf.schema import Config, QkNorm
from stoker.launcher.run.layout import RunDir
from stoker.train.errors import BadInputError

EXPERTS = {"num_experts": 4, "qk_norm": QkNorm.head, "ffn_size": 24}


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> dict[str, Path]:
    """Hugging Face directories of tiny_config's model, and of one with experts, in float32."""
    from hf_models import build as make
    from hf_models import save
    from stoker.train.hf.exporting import Options, export_hf

    found = {}
    for name, fields in {"dense": {}, "experts": EXPERTS}.items():
        model = tiny_config(tiny_data, model=fields).model
        place = tmp_path_factory.mktemp(name)
        export_hf(save(make(model), model, place / "checkpoint"), place / "hf", Options())
        found[name] = place / "hf"
    return found


def configured(prefix: Path, init_from: str, **sections: dict[str, Any]) -> Config:
    sections["model"] = sections.get("model", {}) | {"init_from": init_from}
    plain = to_plain(tiny_config(prefix, steps=1))
    for name, fields in sections.items():
        plain[name] |= fields
    problems: list[Any] = []
    config = build(Config, plain, (), problems)
    assert not problems, problems
    return config


def begin(member: Any, plain: dict[str, Any], run: str) -> None:
    """One rank: what it holds before the first step goes into the run directory; then that step."""
    from stoker.train.grid import form, single
    from stoker.train.loop import Trainer

    config = build(Config, plain, (), [])
    grid = single() if member is None else form(member, Layout.of(config, member.world_size), timeout=120)
    trainer = Trainer.build(config, grid, make_context(run))
    try:
        entries = [e for e in trainer.entries() if e.name.startswith(("model/", "optim/master/"))]
        held = {e.name: (e.tensor, e.box) for e in entries}
        parity._write(Path(run), "begin", grid.rank, held, {e.name: e.shape for e in entries})
        trainer.step()
    finally:
        trainer.close()
        grid.close()


def held_at_the_begin(run: Path, config: Config, run_ranks: Callable[..., Any] | None, world: int) -> parity.Arrays:
    run.mkdir(parents=True, exist_ok=True)
    if run_ranks is None:
        begin(None, to_plain(config), str(run))
    else:
        run_ranks(world, begin, timeout=240, plain=to_plain(config), run=str(run))
    return parity._whole(run, "begin")


LAYOUTS: dict[str, tuple[str, int, dict[str, dict[str, Any]]]] = {
    "tensor and pipeline": ("dense", 4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "fsdp": ("dense", 2, {"parallel": {"data": "fsdp"}}),
    "zero1": ("dense", 2, {"parallel": {"data": "zero1"}}),
    "experts": ("experts", 2, {"parallel": {"expert": 2}, "model": {**EXPERTS, "qk_norm": "head"}}),
    "experts and tensor": (
        "experts",
        4,
        {"parallel": {"tensor": 2, "expert": 2}, "model": {**EXPERTS, "qk_norm": "head"}},
    ),
}
IN_FULL = ("zero1", "experts and tensor")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in IN_FULL else n for n in LAYOUTS])
def test_every_layout_begins_with_the_same_bits(
    name: str, tmp_path: Path, tiny_data: Path, published: dict[str, Path], run_ranks: Callable[..., Any]
) -> None:
    from hf_models import whole_weights

    kind, world, sections = LAYOUTS[name]
    config = configured(tiny_data, f"hf:{published[kind]}", precision={"params": "bfloat16"}, **sections)
    found = held_at_the_begin(tmp_path, config, run_ranks, world)
    expected = whole_weights(published[kind])
    assert {n for n in found if n.startswith("model/")} == {f"model/{n}" for n in expected}
    for weight, values in expected.items():
        np.testing.assert_array_equal(found[f"optim/master/{weight}"], values.numpy(), err_msg=weight)
        np.testing.assert_array_equal(found[f"model/{weight}"], values.bfloat16().float().numpy(), err_msg=weight)


def test_what_every_layout_computes_with_is_what_it_began_with(
    tmp_path: Path, tiny_data: Path, published: dict[str, Path], run_ranks: Callable[..., Any]
) -> None:
    losses = []
    for world, parallel in [(1, {}), (2, {"data": "zero1"})]:
        config = configured(tiny_data, f"hf:{published['dense']}", parallel=parallel)
        held_at_the_begin(tmp_path / str(world), config, run_ranks if world > 1 else None, world)
        losses.append(metrics(tmp_path / str(world))[0]["loss"])
    train(tmp_path / "fresh", tiny_config(tiny_data, steps=1))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert abs(metrics(tmp_path / "fresh")[0]["loss"] - losses[0]) > 1e-3
    (event,) = [e for e in events(tmp_path / "1") if e["event"] == "initial_weights"]
    assert event == {"event": "initial_weights", "source": f"hf:{published['dense']}", "differences": []}


def test_the_masters_of_a_trained_checkpoint_are_what_another_run_begins_with(
    tmp_path: Path, tiny_data: Path, run_ranks: Callable[..., Any]
) -> None:
    trained, _ = train(tmp_path / "first", tiny_config(tiny_data, steps=3, precision={"params": "bfloat16"}))
    (name,) = RunDir(tmp_path / "first").all_checkpoints()
    init = str(RunDir(tmp_path / "first").checkpoint(name))
    config = configured(tiny_data, init, parallel={"tensor": 2}, precision={"params": "bfloat16"})
    found = held_at_the_begin(tmp_path / "second", config, run_ranks, 2)
    kept = {e.name: e.tensor.float().numpy() for e in trained.entries() if e.name in found}
    assert found.keys() == kept.keys()
    for entry, values in kept.items():
        np.testing.assert_array_equal(found[entry], values, err_msg=entry)
    assert metrics(tmp_path / "second")[0]["step"] == 1


def test_a_bias_in_the_choice_of_experts_begins_at_zero_where_there_is_none(
    tmp_path: Path, tiny_data: Path, published: dict[str, Path]
) -> None:
    experts = {**EXPERTS, "qk_norm": "head", "balance": "bias"}
    found = held_at_the_begin(tmp_path, configured(tiny_data, f"hf:{published['experts']}", model=experts), None, 1)
    np.testing.assert_array_equal(found["model/blocks.1.ffn.router_bias"], np.zeros(4))


def test_a_run_with_checkpoints_of_its_own_does_not_look_at_them_again(
    tmp_path: Path, tiny_data: Path, published: dict[str, Path]
) -> None:
    config = configured(tiny_data, f"hf:{published['dense']}")
    train(tmp_path, config)
    config.model = replace(config.model, init_from="hf:/nowhere")
    config.train = replace(config.train, steps=2)
    _, ended = train(tmp_path, config, attempt=2)
    assert ended.step == 2
    assert not [e for e in events(tmp_path, attempt=2) if e["event"] == "initial_weights"]


def test_a_longer_context_is_reported_and_any_other_difference_refused(
    tmp_path: Path, tiny_data: Path, published: dict[str, Path]
) -> None:
    config = configured(tiny_data, f"hf:{published['dense']}", model={"rope_theta": 5e5})
    train(tmp_path / "a", config)
    (event,) = [e for e in events(tmp_path / "a") if e["event"] == "initial_weights"]
    assert event["differences"] == [f"model.rope_theta = 500000.0, but hf:{published['dense']} says 10000.0"]
    config = configured(tiny_data, f"hf:{published['dense']}", model={"vocab_size": 128, "norm_eps": 1e-6})
    with pytest.raises(BadInputError) as e:
        train(tmp_path / "b", config)
    assert str(e.value) == (
        f"model.init_from: model.norm_eps = 1e-06, but hf:{published['dense']} says 1e-05; "
        f"model.vocab_size = 128, but hf:{published['dense']} says 64"
    )
    assert not RunDir(tmp_path / "b").all_checkpoints()


def test_the_error_of_one_rank_ends_all_with_the_same_words(
    tmp_path: Path, tiny_data: Path, run_ranks: Callable[..., Any]
) -> None:
    config = configured(tiny_data, f"hf:{tmp_path / 'nowhere'}", parallel={"tensor": 2})
    said = run_ranks(2, refused, plain=to_plain(config), run=str(tmp_path / "run"))
    assert said == [
        f"model.init_from: {tmp_path / 'nowhere'}: no config.json in it; expected a model's directory as transformers "
        "writes"
    ] * 2  # fmt: skip


def refused(member: Any, plain: dict[str, Any], run: str) -> str:
    try:
        begin(member, plain, run)
    except BadInputError as e:
        return str(e)
    return "not refused"


def test_a_damaged_checkpoint_is_not_begun_with(tmp_path: Path, tiny_data: Path) -> None:
    train(tmp_path / "first", tiny_config(tiny_data, steps=1))
    (name,) = RunDir(tmp_path / "first").all_checkpoints()
    place = RunDir(tmp_path / "first").checkpoint(name)
    shard = place / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BadInputError, match=r"shard-00000.safetensors: block 0 .* does not match its checksum"):
        train(tmp_path / "second", configured(tiny_data, str(place)))
    torch.set_deterministic_debug_mode("default")
