"""Checkpoints that no trainer saved: written in pieces, read in pieces, whole or not there."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stoker.launcher.run.manifest import BLOCK, InvalidCheckpointError, read_manifest
from stoker.launcher.run.verification import verify
from stoker.train.checkpoint import weights as module
from stoker.train.checkpoint.reading import open_checkpoint
from stoker.train.checkpoint.weights import Origin, Weight, write_weights
from stoker.train.state.entry import Entry
from stoker.train.state.loader import load, match

TENSORS = {
    "model/a.weight": torch.arange(6.0).view(2, 3),
    "model/b.scale": torch.tensor(2.5),
    "model/c.none": torch.empty(0, 4),
    "model/d.half": torch.randn(1000, 2049, generator=torch.Generator().manual_seed(0)).bfloat16(),  # 3.9 MiB
    "model/e.experts": torch.randn(3, 500, 701, generator=torch.Generator().manual_seed(1)),  # 4.0 MiB
}


def weight(name: str, tensor: torch.Tensor, rows: int = 7) -> Weight:
    def pieces() -> Iterator[torch.Tensor]:
        yield from tensor.split(rows) if tensor.dim() else [tensor]

    return Weight(name, tensor.dtype, tuple(tensor.shape), pieces)


def test_what_is_written_in_pieces_is_read_in_pieces(tmp_path: Path) -> None:
    seen: list[int] = []
    made = write_weights(
        tmp_path / "w", [weight(n, t) for n, t in TENSORS.items()], {"hidden_size": 3}, Origin("r", 7), seen.append
    )
    assert verify(tmp_path / "w") == made
    assert (made.run, made.step, made.state) == ("r", 7, {"weights_only": True, "model": {"hidden_size": 3}})
    assert sum(seen) == sum(f.size for f in made.files if f.blocks)
    with open_checkpoint(tmp_path / "w") as checkpoint:
        assert list(checkpoint.tensors) == sorted(TENSORS)
        assert checkpoint.model == {"hidden_size": 3}
        for name, tensor in TENSORS.items():
            assert torch.equal(checkpoint.read(name), tensor)
            pieces = list(checkpoint.chunks(name, limit=1_000_000))
            assert all(p.nbytes <= 1_500_000 for _, p in pieces)
            if tensor.numel():
                assert torch.equal(
                    torch.cat([p.reshape(-1, *tensor.shape[1:]) for _, p in pieces]).view_as(tensor), tensor
                )
    # Other readers see an ordinary file.
    found = load_file(tmp_path / "w" / "shard-00000.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_large_ones_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD", BLOCK)
    made = write_weights(tmp_path / "w", [weight(n, t) for n, t in reversed(TENSORS.items())], {})
    shards = [f.name for f in made.files if f.blocks]
    assert shards == ["shard-00000.safetensors", "shard-00001.safetensors"]
    verify(tmp_path / "w")
    with open_checkpoint(tmp_path / "w") as checkpoint:
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in TENSORS.items())


def test_a_trainer_s_loader_reads_it(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", [weight(n, t) for n, t in TENSORS.items()], {})
    entries = [Entry.whole(name, torch.zeros_like(tensor)) for name, tensor in TENSORS.items()]
    with open_checkpoint(tmp_path / "w") as checkpoint:
        found = match(checkpoint._index, entries)
        assert found.differences == ()
        load(checkpoint._reader, found.pieces)
    assert all(torch.equal(e.tensor, TENSORS[e.name]) for e in entries)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.zeros(1, 3)], r"model/x: 3 elements, expected 6 for \[2, 3\]"),
        ([torch.zeros(2, 4)], r"model/x: rows \[2, 4\] of torch.float32, expected \[n, 3\] of torch.float32"),
        ([torch.zeros(2, 3).half()], "torch.float16, expected"),
    ],
)
def test_rows_that_are_not_as_promised_leave_nothing(tmp_path: Path, rows: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_weights(tmp_path / "w", [Weight("model/x", torch.float32, (2, 3), lambda: rows)], {})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        write_weights(tmp_path / "w", [], {})


def test_a_changed_byte_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", [weight(n, t) for n, t in TENSORS.items()], {})
    shard = tmp_path / "w" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[BLOCK + 5] ^= 1
    shard.write_bytes(data)
    assert read_manifest(tmp_path / "w")
    with open_checkpoint(tmp_path / "w") as checkpoint:
        with pytest.raises(InvalidCheckpointError, match="block 1 "):
            checkpoint.read("model/d.half")
        assert torch.equal(checkpoint.read("model/a.weight"), TENSORS["model/a.weight"])


@pytest.mark.full
def test_memory_is_bounded(tmp_path: Path) -> None:
    size = 512 * 1024 * 1024
    pieces = (torch.full((1024 * 1024,), float(i)) for i in range(size // 4 // 1024 // 1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_weights(tmp_path / "w", [Weight("model/x", torch.float32, (size // 4,), lambda: pieces)], {})
    with open_checkpoint(tmp_path / "w") as checkpoint:
        for first, rows in checkpoint.chunks("model/x"):
            assert rows[0] == first // (1024 * 1024)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB
