"""The .bin/.idx format: its bytes, what is refused, and offsets beyond 32 bits."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from stoker.train.data.indexed import IndexedTokens, token_dtype
from stoker.train.data.indexed_writer import IndexWriter, index_bytes, merge

# Documents [1 2 3], [4 5 | 6 7 8] (two sequences), [9] in uint16, as Megatron-LM's own builder writes them.
GOLDEN_IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX, 9 bytes
    "0100000000000000 08 0400000000000000 0400000000000000"  # version, uint16, 4 sequences, 3 + 1 documents
    "03000000 02000000 03000000 01000000"  # lengths
    "0000000000000000 0600000000000000 0a00000000000000 1000000000000000"  # byte offsets
    "0000000000000000 0100000000000000 0300000000000000 0400000000000000"  # first sequence of each document
)
GOLDEN_BIN = bytes.fromhex("0100 0200 0300 0400 0500 0600 0700 0800 0900")


def write_golden(prefix: Path) -> None:
    with IndexWriter(prefix, np.uint16) as writer:
        writer.add([1, 2, 3])
        writer.add([4, 5, 6, 7, 8], lengths=[2, 3])
        writer.add([9])


def test_written_bytes_are_megatrons(tmp_path):
    write_golden(tmp_path / "g")
    assert len(GOLDEN_IDX) == 114
    assert (tmp_path / "g.idx").read_bytes() == GOLDEN_IDX
    assert (tmp_path / "g.bin").read_bytes() == GOLDEN_BIN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.bin", "g.idx"]


def test_megatrons_bytes_are_read(tmp_path):
    (tmp_path / "g.idx").write_bytes(GOLDEN_IDX)
    (tmp_path / "g.bin").write_bytes(GOLDEN_BIN)
    with IndexedTokens(tmp_path / "g") as tokens:
        assert (tokens.tokens, tokens.documents, tokens.sequences, tokens.dtype) == (9, 3, 4, np.uint16)
        assert [tokens.document(d).tolist() for d in range(3)] == [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
        assert tokens.read(2, 5).tolist() == [3, 4, 5, 6, 7]
        assert tokens.starts_within(0, 9).tolist() == [3, 8]
        assert tokens.starts_within(3, 8).tolist() == []
        with pytest.raises(ValueError, match="tokens 7 to 10 asked for, it has 9"):
            tokens.read(7, 3)


def test_many_documents_at_once_are_the_same_bytes_as_one_by_one(tmp_path):
    with IndexWriter(tmp_path / "one", np.int32) as writer:
        writer.add([7, 70_000])
        writer.add([])
        writer.add([5])
    with IndexWriter(tmp_path / "many", np.int32) as writer:
        writer.add_documents([7, 70_000, 5], [2, 0, 1])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"many{suffix}").read_bytes()
    assert IndexedTokens(tmp_path / "one").document(0).tolist() == [7, 70_000]


def test_merged_parts_are_the_same_bytes_as_one_writer(tmp_path):
    write_golden(tmp_path / "a")
    with IndexWriter(tmp_path / "b", np.uint16) as writer:
        writer.add([10, 11])
    assert merge(tmp_path / "ab", [tmp_path / "a", tmp_path / "b"], np.uint16) == (4, 11)
    with IndexWriter(tmp_path / "whole", np.uint16) as writer:
        writer.add([1, 2, 3])
        writer.add([4, 5, 6, 7, 8], lengths=[2, 3])
        writer.add([9])
        writer.add([10, 11])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ab{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_a_failed_write_leaves_the_older_pair_and_no_rest(tmp_path):
    write_golden(tmp_path / "g")
    writer = IndexWriter(tmp_path / "g", np.uint16)
    with pytest.raises(ValueError, match="expected integers"), writer:
        writer.add([5.5])
    assert (tmp_path / "g.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "g.idx").read_bytes() == GOLDEN_IDX
    assert len(list(tmp_path.iterdir())) == 2


def test_new_tokens_never_stand_beside_an_old_index(tmp_path, monkeypatch):
    write_golden(tmp_path / "g")
    replace = os.replace

    def replace_bin_only(source, target):
        if str(target).endswith(".idx"):
            raise OSError("a crash between the two")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_bin_only)
    with pytest.raises(OSError, match="a crash"):
        write_golden(tmp_path / "g")
    assert [p.name for p in tmp_path.iterdir()] == ["g.bin"]


@pytest.mark.parametrize("ids", [[65_536], [-1]])
def test_ids_that_do_not_fit_the_dtype_are_refused_not_wrapped(tmp_path, ids):
    with pytest.raises(ValueError, match=f"{ids[0]}.*do not fit uint16"), IndexWriter(tmp_path / "g", np.uint16) as w:
        w.add(ids)


def test_dtype_follows_the_vocabulary():
    assert [str(token_dtype(n)) for n in (100, 65_499, 65_500, 200_000)] == ["uint16", "uint16", "int32", "int32"]


DAMAGE = {
    "magic": (lambda b: b"XX" + b[2:], "not a Megatron index"),
    "version": (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version 2, only 1 is known"),
    "float dtype": (lambda b: b[:17] + b"\x07" + b[18:], "dtype code 7, expected an integer type"),
    "unknown dtype": (lambda b: b[:17] + b"\x63" + b[18:], "dtype code 99"),
    "cut in the header": (lambda b: b[:20], "20 bytes, shorter than the 34-byte header"),
    "empty": (lambda b: b"", "0 bytes, shorter"),
    "cut at the end": (lambda b: b[:-1], "113 bytes, but 4 sequences and 4 document indices take 114"),
    "huge count": (lambda b: b[:18] + struct.pack("<Q", 1 << 62) + b[26:], "4611686018427387904 sequences"),
    "last document index": (lambda b: b[:-8] + struct.pack("<Q", 3), "run from 0 to 3, expected from 0 to 4"),
    "last pointer": (lambda b: b[:74] + struct.pack("<Q", 18) + b[82:], "18 bytes, but the last sequence .* byte 20"),
    "other dtype": (lambda b: b[:17] + b"\x04" + b[18:], "18 bytes, but the last sequence"),
    "middle pointer": (lambda b: b[:58] + struct.pack("<Q", 8) + b[66:], "sequence 1 starts at byte 8, expected 6"),
    "no documents": (lambda b: struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 1) + bytes(8), "no data"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_index_is_refused_with_its_name(tmp_path, kind):
    damage, message = DAMAGE[kind]
    (tmp_path / "g.bin").write_bytes(GOLDEN_BIN)
    (tmp_path / "g.idx").write_bytes(damage(GOLDEN_IDX))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=message) as caught:
        IndexedTokens(tmp_path / "g")
    assert str(tmp_path / "g") in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_damage_between_the_checked_places_is_found_when_it_is_read(tmp_path):
    with IndexWriter(tmp_path / "g", np.uint16) as writer:
        writer.add_documents(np.arange(1000), np.full(100, 10))
    raw = bytearray((tmp_path / "g.idx").read_bytes())
    struct.pack_into("<q", raw, 34 + 400 + 8 * 41, 100_000)  # sequence 41: none of the 16 places looked at
    (tmp_path / "g.idx").write_bytes(raw)
    with (
        IndexedTokens(tmp_path / "g") as tokens,
        pytest.raises(ValueError, match="ascending order within the"),
    ):
        tokens.starts_within(0, 1000)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path, suffix):
    write_golden(tmp_path / "g")
    (tmp_path / f"g{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"g\{suffix}: no such file"):
        IndexedTokens(tmp_path / "g")


@pytest.mark.parametrize("size", [16, 20])
def test_a_bin_of_another_size_is_refused(tmp_path, size):
    write_golden(tmp_path / "g")
    os.truncate(tmp_path / "g.bin", size)
    with pytest.raises(ValueError, match=rf"g\.bin: {size} bytes, but the last sequence"):
        IndexedTokens(tmp_path / "g")


def test_a_bin_cut_while_it_is_open_raises(tmp_path):
    write_golden(tmp_path / "g")
    with IndexedTokens(tmp_path / "g") as tokens:
        os.truncate(tmp_path / "g.bin", 10)
        with pytest.raises(ValueError, match="10 bytes, expected at least 18"):
            tokens.read(0, 9)


def write_sparse(prefix: Path, dtype: np.dtype, lengths: np.ndarray, marks: dict[int, int]) -> None:
    """A pair whose .bin is a hole but for a few tokens, so that gigabytes of tokens cost nothing."""
    lengths = lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    with open(f"{prefix}.idx", "wb") as idx:
        code = {"int32": 4, "uint16": 8}[str(dtype)]
        idx.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1))
        idx.write(lengths.astype("<i4").tobytes())
        idx.write(((ends - lengths) * dtype.itemsize).astype("<i8").tobytes())
        idx.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]) * dtype.itemsize)
        for at, token in marks.items():
            file.seek(at * dtype.itemsize)
            file.write(np.array([token], dtype).tobytes())


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_offsets_beyond_32_bits(tmp_path, dtype):
    lengths = np.full(5, 1_500_000_001)  # 7.5e9 tokens: boundaries past 2^31 and 2^32 tokens and bytes
    marks = {2**31 - 1: 11, 2**31: 12, 2**32 - 1: 21, 2**32: 22, 4_500_000_003: 31, 7_500_000_004: 65_535}
    write_sparse(tmp_path / "big", np.dtype(dtype), lengths, marks)
    with IndexedTokens(tmp_path / "big") as tokens:
        assert tokens.tokens == 7_500_000_005
        assert {at: int(tokens.read(at, 1)[0]) for at in marks} == marks
        assert tokens.starts_within(0, tokens.tokens).tolist() == [1_500_000_001 * d for d in range(1, 5)]
        assert tokens.last_start_up_to(2**32 + 300_000_000) == 4_500_000_003
        written = b"".join(index_bytes(tokens.dtype, 5, 5, tokens.lengths, tokens.document_ends))
        assert written == (tmp_path / "big.idx").read_bytes()


RNG = np.random.default_rng(7)
LENGTHS = {
    "short and empty": RNG.integers(0, 4, 5000),  # ten pages of the search
    "short, then long": np.concatenate([np.ones(8000, np.int64), np.full(30, 3000)]),
    "long, then short": np.concatenate([np.full(30, 3000), np.ones(8000, np.int64)]),
    "one is almost all": np.concatenate([np.full(3000, 2), [60_000], np.full(3000, 2)]),
    "empty at the end": np.concatenate([np.full(3000, 2), np.zeros(3000, np.int64)]),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_document_starts_are_found_as_by_a_full_scan(tmp_path, kind):
    rng, lengths = np.random.default_rng(7), LENGTHS[kind]
    with IndexWriter(tmp_path / "g", np.uint16) as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
    starts = np.cumsum(lengths) - lengths
    with IndexedTokens(tmp_path / "g") as tokens:
        for begin in [0, 1, *rng.integers(0, lengths.sum(), 60).tolist(), tokens.tokens - 1]:
            for width in (1, 10, 2000, tokens.tokens):
                expected = starts[(starts > begin) & (starts < begin + width)]
                assert tokens.starts_within(begin, begin + width).tolist() == expected.tolist()
            assert tokens.last_start_up_to(begin) == starts[starts <= begin].max()
