"""Weights go to torch.distributed.checkpoint and come from it; its pickle runs nothing."""

from __future__ import annotations

import json
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from stoker.conf.schema import ModelConfig
from stoker.launcher.run.verification import verify
from stoker.train.checkpoint import dcp as ours
from stoker.train.checkpoint.__main__ import main
from stoker.train.checkpoint.dcp_metadata import read
from stoker.train.checkpoint.reading import open_checkpoint
from stoker.train.checkpoint.weights import Weight, write_weights
from stoker.train.params import decoder_table
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

SETTINGS: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 30,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    table = decoder_table(ModelConfig(**SETTINGS))
    return {f.name: torch.randn(f.shape, generator=g).to(dtype) for f in table.owned()}


def own_checkpoint(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    made = [Weight(f"model/{n}", t.dtype, tuple(t.shape), lambda t=t: [t]) for n, t in tensors.items()]
    write_weights(directory, made, SETTINGS)
    return directory


def read_back(directory: Path) -> dict[str, torch.Tensor]:
    verify(directory)
    with open_checkpoint(directory) as c:
        return {name.removeprefix("model/"): c.read(name) for name in c.tensors}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_torch_loads_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.train.hf.importing.CHUNK", 500)  # several chunks of a tensor
    monkeypatch.setattr(ours, "_FILE", 3000)  # several files
    expected = weights(torch.bfloat16)
    checkpoint = own_checkpoint(tmp_path / "own", expected)
    assert main(["export", str(checkpoint), "--dcp", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 2
    found = {name: torch.zeros_like(t) for name, t in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "out")
    assert_same(found, expected)
    # And as a state dict that nobody describes beforehand.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    assert_same(torch.load(tmp_path / "all.pt", weights_only=True), expected)


def test_an_export_is_imported_bit_by_bit_without_being_told_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(torch.bfloat16)
    own_checkpoint(tmp_path / "own", expected)
    monkeypatch.chdir(tmp_path)  # as people name them; the program that reads the pickle runs elsewhere
    main(["export", "own", "--dcp", "out"])
    assert main(["import", "--dcp", "out", "--trust-pickle", "--out", "back"]) == 0
    assert_same(read_back(tmp_path / "back"), expected)
    settings = yaml.safe_load((tmp_path / "back/config/model/imported.yaml").read_text())
    assert settings["hidden_size"] == 16


def save_sharded(member: Any, directory: str) -> None:
    """As FSDP and tensor parallelism save: shards of rows and of columns, and replicas."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{directory}.store", rank=member.rank, world_size=2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    state: dict[str, DTensor | int] = {"step": 7}
    for number, (name, tensor) in enumerate(weights().items()):
        kinds = [Shard(0), Replicate(), Shard(tensor.ndim - 1)]
        state[f"model.{name}"] = distribute_tensor(tensor, mesh, [kinds[number % 3]])
        state[f"optim.{name}.exp_avg"] = distribute_tensor(tensor, mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


def test_what_two_ranks_of_torch_saved_is_imported(
    run_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, save_sharded, timeout=100, directory=str(tmp_path / "theirs"))
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump(SETTINGS))
    arguments = ["import", "--dcp", str(tmp_path / "theirs"), "--trust-pickle", "--model", str(model)]
    assert main([*arguments, "--out", str(tmp_path / "a")]) != 0
    assert "with --strip model. it would be" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "a"), "--strip", "model.", "--json"]) == 0
    assert_same(read_back(tmp_path / "a"), weights())
    told = json.loads(capsys.readouterr().out)
    assert len(told["unread"]) == 1 + len(weights())
    assert main([*arguments, "--out", str(tmp_path / "b"), "--strip", "model.", "--dtype", "bf16"]) == 0
    assert_same(read_back(tmp_path / "b"), {n: t.bfloat16() for n, t in weights().items()})


def test_names_are_mapped_by_a_table(tmp_path: Path) -> None:
    tensors = weights()
    first, *rest = tensors
    dcp.save({"x": tensors[first], **{n: tensors[n] for n in rest}}, checkpoint_id=tmp_path / "theirs")
    (tmp_path / "map.json").write_text(json.dumps({"x": first}))
    own = own_checkpoint(tmp_path / "own", tensors)
    arguments = ["--dcp", str(tmp_path / "theirs"), "--map", str(tmp_path / "map.json"), "--model", str(own)]
    assert main(["import", "--trust-pickle", *arguments, "--out", str(tmp_path / "a")]) == 0
    assert_same(read_back(tmp_path / "a"), tensors)


def theirs(directory: Path, **changes: torch.Tensor) -> Path:
    dcp.save(weights() | changes, checkpoint_id=directory)
    (directory / "stoker-model.json").write_text(json.dumps(SETTINGS))
    return directory


def refused(directory: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What is said; nothing is left."""
    out = directory.parent / "out"
    assert main(["import", "--dcp", str(directory), "--out", str(out), *more]) != 0
    assert not list(directory.parent.glob("*out*"))
    return capsys.readouterr().err


def test_a_pickle_is_not_read_unless_it_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(theirs(tmp_path / "dcp"), capsys)
    assert ".metadata is a pickle, which can run any program" in said
    assert "--trust-pickle" in said


class Evil:
    """What runs when it is unpickled."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return (Path.touch, (self.touched,))


@pytest.mark.parametrize("where", ["metadata", "tensors"])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, touched = theirs(tmp_path / "dcp"), tmp_path / "touched"
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    if where == "metadata":
        metadata.planner_data = Evil(touched)
    else:
        # A tensor's bytes are a pickle too, which torch reads with its own restricted reader.
        evil = directory / "__0_0.distcp"
        torch.save(Evil(touched), evil)
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, evil.stat().st_size
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    said = refused(directory, capsys, "--trust-pickle")
    assert {"metadata": "none of DCP's metadata classes", "tensors": "is no tensor"}[where] in said
    assert not touched.exists()


@pytest.mark.parametrize("name", [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load")])
def test_no_name_but_those_of_metadata_is_known(tmp_path: Path, name: tuple[str, str]) -> None:
    path = tmp_path / "p"
    path.write_bytes(f"c{name[0]}\n{name[1]}\n(S'true'\ntR.".encode())
    with pytest.raises(pickle.UnpicklingError, match="none of DCP's metadata classes"):
        read(str(path))


def test_files_outside_the_directory_are_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = theirs(tmp_path / "dcp")
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../dcp/__0_0.distcp"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "bad file name '../dcp/__0_0.distcp'" in refused(directory, capsys, "--trust-pickle")


def test_what_does_not_fit_is_refused_with_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(weights()))
    wrong = theirs(tmp_path / "a", **{name: torch.zeros(3, 3)})
    assert f"{name}: [3, 3], expected [50, 16]" in refused(wrong, capsys, "--trust-pickle")
    cut = theirs(tmp_path / "b")
    with open(cut / "__0_0.distcp", "r+b") as f:
        f.truncate(1000)
    assert "is no tensor: the file is damaged" in refused(cut, capsys, "--trust-pickle")
    (cut / ".metadata").unlink()
    assert "not a checkpoint of torch.distributed.checkpoint" in refused(cut, capsys, "--trust-pickle")
    assert "--tokenizer is for --hf" in _said(capsys, "export", "--dcp", "x", "--tokenizer", "y", "z")
    assert "--strip is for --dcp" in _said(capsys, "import", "--hf", "x", "--strip", "y", "--out", "z")


def test_a_full_disk_is_said_with_the_file_s_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = own_checkpoint(tmp_path / "own", weights())
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        assert main(["export", str(checkpoint), "--dcp", str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
        signal.signal(signal.SIGXFSZ, before)
    assert "__0_0.distcp" in (said := capsys.readouterr().err)
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.glob("*out*"))


SLOW = """
import runpy, time
from stoker.train.checkpoint import weights
def pieces(weight):
    print("half way", flush=True)
    time.sleep(600)
weights._pieces = pieces
runpy.run_module("stoker.train.checkpoint", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_tool_that_is_told_to_end_takes_away_what_is_half_made(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["import", "--dcp", str(theirs(tmp_path / "dcp")), "--trust-pickle", "--out", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "half way\n"
        assert len(list(tmp_path.glob(".tmp-*"))) == 1
        tool.send_signal(number)
        assert tool.wait(60) == 128 + number
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]


def changed(directory: Path, change: Callable[[Metadata], object]) -> Path:
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return directory


def test_a_relative_path_is_one_from_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs(tmp_path / "dcp")
    monkeypatch.chdir(tmp_path)
    assert main(["import", "--dcp", "dcp", "--trust-pickle", "--out", "back"]) == 0
    assert_same(read_back(tmp_path / "back"), weights())


def test_shards_that_overlap_and_leave_gaps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(weights()))  # [50, 16]

    def twice_the_same(metadata: Metadata) -> None:
        half = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([25, 16]))
        metadata.state_dict_metadata[name].chunks = [half, half]
        place = next(p for index, p in metadata.storage_data.items() if index.fqn == name)
        torch.save(torch.zeros(25, 16), directory / "__9_0.distcp")
        place.relative_path, place.offset = "__9_0.distcp", 0
        place.length = (directory / "__9_0.distcp").stat().st_size

    directory = theirs(tmp_path / "dcp")
    changed(directory, twice_the_same)
    assert f"{name}: its shards overlap and leave gaps" in refused(directory, capsys, "--trust-pickle")


def test_two_names_that_become_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, tensor = next(iter(weights().items()))
    directory = theirs(tmp_path / "dcp", **{f"x.{name}": tensor})
    said = refused(directory, capsys, "--trust-pickle", "--strip", "x.")
    assert f"x.{name} both become {name}" in said or f"{name} and x.{name}" in said


@pytest.mark.parametrize(
    ("field", "value"), [("offset", -1), ("length", 1 << 70), ("offset", float("inf")), ("length", 0)]
)
def test_places_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    directory = changed(theirs(tmp_path / "dcp"), lambda m: setattr(next(iter(m.storage_data.values())), field, value))
    said = refused(directory, capsys, "--trust-pickle")
    assert str(directory) in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("what", ["--map", "--model"])
@pytest.mark.parametrize("text", ["[" * 5000, "a: [", "\\xff", "!!python/object/apply:os.getcwd []"])
def test_a_table_or_settings_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, text: str
) -> None:
    (tmp_path / "file").write_text(text)
    said = refused(theirs(tmp_path / "dcp"), capsys, "--trust-pickle", what, str(tmp_path / "file"))
    assert f"{tmp_path / 'file'}: " in said
    assert len(said.splitlines()) == 1


def test_settings_that_no_model_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = theirs(tmp_path / "dcp")
    (directory / "stoker-model.json").write_text(json.dumps(SETTINGS | {"num_layers": 0}))
    assert f"{directory}: model.num_layers=0: expected a positive number" in refused(
        directory, capsys, "--trust-pickle"
    )
    (directory / "stoker-model.json").write_text(json.dumps(SETTINGS | {"num_layers": 10**12}))
    assert "too few for model.num_layers=1000000000000" in refused(directory, capsys, "--trust-pickle")


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) != 0
    return capsys.readouterr().err
