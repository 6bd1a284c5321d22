"""`stoker bench kernels` on a CPU: what counts as right, what is kept, and that every native op is measured."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from stoker.kernels import measured, reference
from stoker.kernels.bench.__main__ import Roof, _keep, as_json, main, run, table, to_keep
from stoker.kernels.bench.case import Maker, backward_bytes, forward_bytes
from stoker.kernels.bench.cases import SMALL, cases
from stoker.kernels.bench.check import Verdict, check
from stoker.kernels.bench.measure import Plan, Result, measure
from stoker.kernels.device import Device
from stoker.kernels.ops import OP_NAMES

CPU = torch.device("cpu")
CASES = {f"{case.op}, {case.title}": case for case in cases(SMALL)}
SWIGLU = next(case for case in CASES.values() if case.op == "swiglu")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_right(name, dtype):
    case = CASES[name]
    assert check(case, getattr(reference, case.op), Maker(CPU, dtype, 7)).is_right


def test_every_op_is_measured():
    assert {case.op for case in CASES.values()} == set(OP_NAMES)


def test_attention_within_documents_is_held_against_attention_within_documents():
    case = next(case for name, case in CASES.items() if name.startswith("attention") and "documents" in name)
    assert not check(case, lambda q, k, v, _: reference.attention(q, k, v), Maker(CPU, torch.float32, 7)).is_right


def off_by(factor):
    return lambda gate, up: reference.swiglu(gate, up) * factor


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        return reference.swiglu(gate, up)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


@pytest.mark.parametrize("wrong", [off_by(1.02), off_by(float("nan")), _WrongGradient.apply])
def test_what_is_wrong_is_told_apart(wrong):
    assert not check(SWIGLU, wrong, Maker(CPU, torch.bfloat16, 7)).is_right


def test_least_traffic():
    swiglu = SWIGLU.make(Maker(CPU, torch.bfloat16, 0))
    one = 24 * 96 * 2
    outputs = (torch.empty(24, 96, dtype=torch.bfloat16),)
    # Forwards two are read and one written, backwards three are read and two written.
    assert (forward_bytes(SWIGLU, swiglu, outputs), backward_bytes(SWIGLU, swiglu, outputs)) == (3 * one, 5 * one)
    adamw = next(case for case in CASES.values() if case.op == "adamw")
    state = adamw.make(Maker(CPU, torch.bfloat16, 0))
    # Gradient 2; weights 2 + 2 though they are only written, moments and master 3 x 8.
    assert forward_bytes(adamw, state, ()) == 9998 * 30


def test_a_contender_that_fails_leaves_the_others_their_figures():
    def broken(gate, up):
        raise RuntimeError("no such thing\nat all")

    plan = Plan(CPU, torch.float32, rounds=2)
    first = measure(SWIGLU, "broken", broken, plan)
    second = measure(SWIGLU, "reference", reference.swiglu, plan)
    assert first.error == "RuntimeError: no such thing"
    assert second.verdict.is_right
    assert 0 < second.forward[1] <= second.forward[0] <= second.forward[2]


def test_only_what_is_right_and_measured_in_all_cases_is_kept():
    def result(contender, title, us, **more):
        return Result("rope", title, "bfloat16", contender, forward=(us / 1e6,) * 3, **more)

    results = [
        result("reference", "a", 10.0),
        result("reference", "b", 20.0),
        result("native", "a", 1.0, verdict=Verdict((1e-3,), 1e-2)),
        result("native", "b", 2.0, verdict=Verdict((1e-1,), 1e-2)),
        result("apex", "a", 3.0),
        result("torch eager", "a", 1.0),
        result("torch eager", "b", 1.0),
    ]
    kept = to_keep(results, Device("cuda", 90, "NVIDIA H100"))
    assert (kept.device, kept.results) == ("NVIDIA H100", {"rope": {"reference": 30.0}})


def test_the_command_prints_a_table_writes_json_and_keeps_nothing_of_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["swiglu", "--rounds", "1", "--no-compile", "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "swiglu                24 x 96" in printed
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["contender"] for row in rows] == ["reference", "torch eager"]
    assert not list(tmp_path.rglob("measured-*"))
    assert measured.read("cpu", "") is None


def test_times_of_another_dtype_than_a_run_multiplies_in_are_not_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _keep(measured.Measured("NVIDIA H100", torch.__version__, "", {"rope": {"native": 1.0}}), torch.float32)
    assert list(tmp_path.iterdir()) == []
    assert "not kept" in capsys.readouterr().out


def test_an_unknown_op_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["atention"])
    assert "atention: no such op, did you mean attention?" in capsys.readouterr().err


def test_the_compiler_waits_until_all_else_is_measured_and_what_there_was_no_time_for_is_listed(monkeypatch):
    said, clock = [], itertools.chain([0.0] * 4, [9.0, 0.0], itertools.repeat(9.0))
    monkeypatch.setattr("stoker.kernels.bench.__main__.time", SimpleNamespace(monotonic=lambda: next(clock)))
    chosen = [case for case in CASES.values() if case.op in ("swiglu", "geglu", "cross_entropy")]
    plan = Plan(CPU, torch.float32, rounds=1, say=said.append)
    found = run(chosen, Device("cpu"), plan, deadline=1.0)
    # The time is over for the fifth and the seventh: each op has two before the compiler's.
    assert [(r.op, r.contender) for r in found.results] == [
        *(("swiglu", name) for name in ("reference", "torch eager")),
        *(("geglu", name) for name in ("reference", "torch eager")),
        ("cross_entropy", "torch eager"),
    ]
    assert found.left_out[0] == "cross_entropy, 24 x 500: reference"
    assert [what.rpartition(": ")[2] for what in found.left_out] == ["reference", "inductor", "inductor", "inductor"]
    shown = table(found, Device("cpu"), Roof(1e9, 1e9), torch.float32).splitlines()
    assert shown[-4:] == [f"left out, the time was over: {what}" for what in found.left_out]
    assert as_json(found, Device("cpu"), Roof(1e9, 1e9))["left_out"] == found.left_out


def test_results_that_cannot_be_kept_are_an_error_with_what_to_do(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _keep(measured.Measured("NVIDIA H100", "2.13", "", {}), torch.bfloat16) is False
    assert capsys.readouterr().err == (
        f"stoker bench kernels: error: not kept for kernels=auto: {tmp_path}/file/stoker/kernels: Not a directory; "
        "XDG_CACHE_HOME=DIRECTORY names another place\n"
    )
