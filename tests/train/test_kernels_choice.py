"""Which kernels the ranks of a run get: built by one rank per node at first use, and the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stoker.conf.schema import KernelsConfig, ParamDtype
from stoker.kernels import Device, Ops, select
from stoker.kernels.native import ready
from stoker.train import kernels
from stoker.train.grid import Grid, single
from stoker.train.kernels import agree, choose_ops, wishes


class Control:
    """The other ranks' values are given, a list where they differ from call to call; what this one says is kept."""

    def __init__(self, others: list[Any]) -> None:
        self.others, self.said = others, list[Any]()

    def all_gather_json(self, value: Any) -> list[Any]:
        found = [o[len(self.said)] if isinstance(o, list) else o for o in self.others]
        self.said.append(value)
        return [value, *(other if other != "same" else value for other in found)]


def grid(others: list[Any], device: str = "cpu") -> Grid:
    return replace(single(torch.device(device)), control=Control(others))  # type: ignore[arg-type]


def test_only_what_is_named_is_passed_on() -> None:
    assert wishes(KernelsConfig()) == {"default": "auto"}
    assert wishes(KernelsConfig(default="native", rope="reference")) == {"default": "native", "rope": "reference"}


def test_ranks_that_would_choose_differently_are_refused() -> None:
    ops = select()
    agree(ops, grid(["same", "same"]))
    theirs = {c.op: c.implementation for c in ops.choices} | {"rope": "native"}
    said = Control([["same", None], ["0123456789abcdef", theirs]])
    words = (
        r"^kernels: ranks 0 and 2 have different ones to choose from: rope=reference on rank 0, rope=native on rank 2; "
        r"expected the same on all: name the implementations \(kernels=reference, .*\), or make the nodes alike$"
    )
    with pytest.raises(ValueError, match=words):
        agree(ops, replace(single(), control=said))  # type: ignore[arg-type]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device that is none, nothing built, and what was asked of builders."""
    asked: list[Any] = []

    def build(capability: int, architectures: list[int], say: object) -> str | None:
        asked.append((capability, architectures))
        return None

    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: cls("cuda", 90, "NVIDIA H100")))
    monkeypatch.setattr(ready, "build_if_missing", build)
    monkeypatch.setattr(ready, "lacks", lambda capability: "not built: nothing anywhere")
    return asked


def test_the_first_rank_of_a_node_builds_and_the_others_wait(on_gpu: list[Any]) -> None:
    settings = KernelsConfig(strict=False, architectures=[90, 100])
    choose_ops(settings, grid(["same"], "cuda:0"))
    assert on_gpu == [(90, [90, 100])]
    other = grid(["same"], "cuda:1")
    choose_ops(settings, other)
    assert len(on_gpu) == 1
    assert other.control.said[0] is None  # type: ignore[attr-defined]


def test_nothing_is_built_where_nothing_native_is_wanted(on_gpu: list[Any]) -> None:
    assert isinstance(choose_ops(KernelsConfig(default="reference"), grid([], "cuda:0")), Ops)
    assert on_gpu == []


def test_with_float64_weights_auto_needs_no_kernels_of_ours(on_gpu: list[Any]) -> None:
    ops = choose_ops(KernelsConfig(), grid(["same"], "cuda:0"), ParamDtype.float64)
    assert {c.implementation for c in ops.choices if c.op != "attention"} == {"reference"}
    assert on_gpu == []


def test_what_cannot_be_had_on_a_gpu_ends_the_start_unless_the_reference_may_take_over(on_gpu: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"^kernels=auto: rmsnorm, .*: native: not built: nothing anywhere; "):
        choose_ops(KernelsConfig(), grid([], "cuda:0"))
    ops = choose_ops(KernelsConfig(strict=False), grid([], "cuda:0"))
    assert {c.implementation for c in ops.choices if c.op == "rmsnorm"} == {"reference"}


def test_a_build_that_fails_on_any_node_ends_the_start_on_every_rank(on_gpu: list[Any]) -> None:
    failed = "the kernels could not be built: x.cu(1): bad"
    with pytest.raises(ValueError, match=rf"^kernels.strict=true: {failed[:20]}.* \(on rank 1\); kernels=reference "):
        kernels._have_built(KernelsConfig(), Device("cuda", 90), grid([failed], "cuda:0"))
    kernels._have_built(KernelsConfig(strict=False), Device("cuda", 90), grid([failed], "cuda:0"))
