"""What a batch holds, document boundaries, the validation split, and which data is refused."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from stoker.train.data.build import DataSpec, build_data
from stoker.train.data.meta import DataMeta, check_tokenizer, file_sha256, read_meta, write_meta

PLAIN = {"sequence_length": 8, "global_batch": 4, "micro_batch": 4, "seed": 1}


def open_one(prefix, **settings):
    return build_data([DataSpec(str(prefix))], **{**PLAIN, **settings})


def test_targets_are_the_next_tokens(make_data):
    with open_one(make_data()) as data:
        batch = next(data.train)
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == (4, 8)
    for t in (batch.tokens, batch.targets, batch.positions, batch.samples):
        assert t.dtype == torch.int64
        assert t.is_contiguous()
    # Token i of the stream is i, and windows begin at multiples of 8.
    assert (batch.tokens[:, 0] % 8 == 0).all()
    assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(8))
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert torch.equal(batch.positions, torch.arange(8).repeat(4, 1))
    assert batch.doc_ids is None
    assert batch.samples.tolist() == [0, 1, 2, 3]


def test_an_epoch_is_every_window_once_and_the_next_differs(make_data):
    with open_one(make_data(lengths=[401]), global_batch=50, micro_batch=50) as data:
        assert data.windows == 50
        first, second = (next(data.train).tokens[:, 0].tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(0, 400, 8))
    assert first != second


def test_token_ids_above_16_bits(make_data):
    with open_one(make_data(dtype="int32", offset=100_000), vocab_size=150_000) as data:
        batch = next(data.train)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.tokens.min() >= 100_000


def expected_documents(first: int, length: int, starts: list[int]) -> tuple[list[int], list[int]]:
    """Document number and position within it, token by token, the slow way."""
    ids, positions, document, position = [], [], 0, 0
    for i in range(length):
        if i and first + i in starts:
            document, position = document + 1, 0
        ids.append(document)
        positions.append(position)
        position += 1
    return ids, positions


def test_document_boundaries_are_honoured(make_data):
    lengths = [7, 30, 3, 60, 100, 1, 49, 150, 2, 2, 1, 1, 300]
    starts = np.cumsum([0, *lengths]).tolist()
    prefix = make_data(lengths=lengths)
    with open_one(prefix, global_batch=88, micro_batch=88, mask_documents=True, reset_positions=True) as data:
        batch = next(data.train)
        assert data.windows == 88
    assert batch.doc_ids is not None
    for row in range(88):
        ids, positions = expected_documents(int(batch.tokens[row, 0]), 8, starts)
        assert batch.doc_ids[row].tolist() == ids
        assert batch.positions[row].tolist() == positions
    assert batch.doc_ids.max() >= 3


def test_only_what_is_asked_for_depends_on_documents(make_data):
    prefix = make_data(lengths=[3] * 100)
    with open_one(prefix, mask_documents=True) as masked, open_one(prefix, reset_positions=True) as reset:
        masked_batch, reset_batch = next(masked.train), next(reset.train)
    assert masked_batch.doc_ids is not None
    assert masked_batch.doc_ids.max() > 0
    assert torch.equal(masked_batch.positions, torch.arange(8).repeat(4, 1))
    assert reset_batch.doc_ids is None
    assert reset_batch.positions.max() == 2


def test_neighbouring_windows_read_at_once_are_the_same_rows(make_data):
    prefix = make_data()
    with open_one(prefix) as single, open_one(prefix, shuffle_block=5) as blocks:
        windows = np.array([3, 4, 5, 9, 1, 2, 0])
        rows = single.train.dataset.sources[0].tokens.read(windows)
        assert rows.tolist() == [list(range(8 * w, 8 * w + 9)) for w in windows]
        starts = torch.cat([next(blocks.train).tokens[:, 0] for _ in range(10)]) // 8
    assert (starts.reshape(8, 5) - starts.reshape(8, 5)[:, :1] == torch.arange(5)).all()


def test_validation_is_the_tail_from_a_document_boundary(make_data):
    prefix = make_data(lengths=[100, 100, 100, 45, 55])
    with open_one(prefix, validation_tokens=60, micro_batch=4) as data:
        assert data.validation is not None
        batches = list(data.validation)
        again = list(data.validation)
        trained = torch.cat([next(data.train).tokens.reshape(-1) for _ in range(10)])
    # 60 tokens would begin in the 4th document, at 340; its start is 300. 100 tokens are 12 windows of 8 + 1.
    tokens = torch.cat([batch.tokens for batch in batches])
    assert tokens[:, 0].tolist() == list(range(300, 396, 8))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))
    assert trained.max() < 300


def test_the_last_validation_batch_is_filled_with_ignored_rows(make_data):
    prefix = make_data(lengths=[100, 100])
    seen = []
    for rank in range(2):
        with open_one(prefix, validation_tokens=100, micro_batch=5, dp_rank=rank, dp_size=2) as data:
            assert data.validation is not None
            assert len(data.validation) == 2
            seen += list(data.validation)
    assert sum(int((batch.targets != -100).sum()) for batch in seen) == 12 * 8
    assert sorted(int(s) for batch in seen for s in batch.samples if s >= 0) == list(range(12))
    last = seen[3]
    assert last.samples.tolist() == [-1] * 5
    assert (last.targets == -100).all()
    assert (last.tokens == 0).all()


def test_validation_samples_limits_it(make_data):
    with open_one(make_data(lengths=[100, 100]), validation_tokens=100, validation_samples=6) as data:
        assert data.validation is not None
        assert [b.samples.tolist() for b in data.validation] == [[0, 1, 2, 3], [4, 5, -1, -1]]


def test_sources_are_mixed_in_proportion_and_keep_their_own_tokens(make_data):
    specs = [
        DataSpec(str(make_data("a", [4001])), 3.0),
        DataSpec(str(make_data("b", [4001], "int32", 100_000)), 1.0),
    ]
    with build_data(specs, **{**PLAIN, "global_batch": 1024, "micro_batch": 1024}) as data:
        batch = next(data.train)
    from_b = batch.tokens[:, 0] >= 100_000
    assert int(from_b.sum()) == 256
    assert torch.equal(batch.targets, batch.tokens + 1)
    firsts = batch.tokens[from_b, 0] - 100_000
    assert (firsts % 8 == 0).all()
    assert len(firsts.unique()) == 256


def test_validation_of_a_mixture_is_each_tail_in_turn(make_data):
    specs = [DataSpec(str(make_data("a", [50, 20]))), DataSpec(str(make_data("b", [50, 20], "int32", 1000)))]
    with build_data(specs, **PLAIN, validation_tokens=20) as data:
        assert data.validation is not None
        assert [b.tokens[:, 0].tolist() for b in data.validation] == [[50, 58, 1050, 1058]]


def test_a_token_outside_the_vocabulary_is_named(make_data):
    with (
        open_one(make_data(), vocab_size=392) as data,
        pytest.raises(ValueError, match=r"set\.bin: token 392 is 392, outside model\.vocab_size = 392"),
    ):
        list(itertools.islice(data.train, 20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 400}, r"400 tokens in 8 documents leave 400 for training, a sample takes 401"),
        ({"validation_tokens": 1000}, "leave 0 for training"),
        ({"validation_tokens": 149}, None),
        ({"validation_tokens": 5, "sequence_length": 200}, "leave 150 for validation, a sample takes 201"),
        ({"validation_tokens": -1}, r"data\.validation_tokens = -1"),
        ({"sequence_length": 0}, r"data\.seq_len = 0"),
        ({"shuffle_block": 0}, r"data\.shuffle_block = 0"),
        ({"prefetch": 0}, r"data\.prefetch = 0"),
        ({"consumed_samples": -1}, "consumed samples -1"),
        ({"micro_batch": 0}, "micro-batch 0"),
        ({"dp_rank": 2, "dp_size": 2}, "rank 2 of 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(make_data, settings, message):
    prefix = make_data()
    if message is None:
        open_one(prefix, **settings).close()
        return
    with pytest.raises(ValueError, match=message):
        open_one(prefix, **settings)


def test_sources_need_prefixes_and_different_names(make_data, tmp_path):
    prefix = str(make_data())
    with pytest.raises(ValueError, match=r"data\.sources: no data set"):
        build_data([], **PLAIN)
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.name = 'set' is taken"):
        build_data([DataSpec(prefix), DataSpec(prefix)], **PLAIN)
    with pytest.raises(FileNotFoundError, match=r"nothing\.idx: no such file"):
        build_data([DataSpec(str(tmp_path / "nothing"))], **PLAIN)


META = DataMeta(400, 0, "ab" * 32, "uint16", 8, 400, "0.1.0", "job")


def test_meta_is_read_as_written(tmp_path):
    write_meta(tmp_path / "set", META)
    assert read_meta(tmp_path / "set") == META
    assert read_meta(tmp_path / "other") is None
    assert json.loads((tmp_path / "set.meta.json").read_text())["vocab_size"] == 400


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": "400"}', "null"])
def test_a_damaged_meta_is_refused(tmp_path, text):
    (tmp_path / "set.meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"set\.meta\.json: "):
        read_meta(tmp_path / "set")


@pytest.mark.parametrize(("size", "fits"), [(399, False), (400, True), (512, True), (1424, True), (1425, False)])
def test_model_and_data_vocabularies_must_match_up_to_padding(tmp_path, size, fits):
    if fits:
        check_tokenizer(tmp_path / "set", META, size)
        return
    with pytest.raises(ValueError, match=rf"model\.vocab_size = {size}, but .*set\.meta\.json says vocab_size 400"):
        check_tokenizer(tmp_path / "set", META, size)


def test_another_tokenizer_than_the_datas_is_refused(make_data, tmp_path):
    prefix, tokenizer = make_data(), tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    with pytest.raises(ValueError, match="does not exist: nothing says which tokenizer"):
        open_one(prefix, vocab_size=400, tokenizer=tokenizer)
    write_meta(prefix, META)
    with pytest.raises(ValueError, match=r"data\.tokenizer = .* did not make the data"):
        open_one(prefix, vocab_size=400, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"data\.tokenizer = .*absent\.json: no such file"):
        open_one(prefix, vocab_size=400, tokenizer=tmp_path / "absent.json")
    write_meta(prefix, DataMeta(400, 0, file_sha256(tokenizer), "uint16", 8, 400, "0.1.0", "job"))
    open_one(prefix, vocab_size=400, tokenizer=tokenizer).close()
    with pytest.raises(ValueError, match=r"model\.vocab_size = 100"):
        open_one(prefix, vocab_size=100, tokenizer=tokenizer)


def test_sources_of_different_tokenizers_are_refused(make_data):
    a, b = make_data("a"), make_data("b")
    write_meta(a, META)
    write_meta(b, DataMeta(400, 0, "cd" * 32, "uint16", 8, 400, "0.1.0", "job"))
    with pytest.raises(ValueError, match="made by different tokenizers"):
        build_data([DataSpec(str(a)), DataSpec(str(b))], **PLAIN)


def prints_of(prefix: Path, **settings) -> list[dict]:
    with open_one(prefix, **settings) as data:
        return json.loads(json.dumps(data.fingerprints))


def test_the_fingerprint_does_not_depend_on_where_the_data_lies(make_data, tmp_path):
    prefix = make_data()
    stored = prints_of(prefix)
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefix}{suffix}", tmp_path / "moved")
    open_one(tmp_path / "moved" / "set", stored_fingerprints=stored, dp_size=2, micro_batch=1).close()


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_changed_data_is_refused_with_what_differs(make_data):
    prefix = make_data()
    stored = prints_of(prefix)
    flip(Path(f"{prefix}.bin"), 401)
    with pytest.raises(ValueError, match="bin_blocks was") as caught:
        open_one(prefix, stored_fingerprints=stored)
    assert "idx" not in str(caught.value)
    make_data(lengths=[390, 10])
    with pytest.raises(ValueError, match="data set 'set': idx_bytes was 202, is 82"):
        open_one(prefix, stored_fingerprints=stored)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 2}, "seed was 1, is 2"),
        ({"sequence_length": 16}, "sequence_length was 8, is 16"),
        ({"validation_tokens": 100}, "training_tokens was 400, is 250"),
        ({"shuffle_block": 2}, "shuffle_block was 1, is 2"),
    ],
)
def test_settings_that_change_the_sample_order_are_refused_on_resume(make_data, settings, message):
    prefix = make_data()
    with pytest.raises(ValueError, match=message):
        open_one(prefix, stored_fingerprints=prints_of(prefix), **settings)


def test_a_changed_mixture_is_refused_on_resume(make_data):
    a, b = str(make_data("a")), str(make_data("b"))
    with build_data([DataSpec(a), DataSpec(b)], **PLAIN) as data:
        stored = data.fingerprints
    build_data([DataSpec(a, 2.0), DataSpec(b, 2.0)], **PLAIN, stored_fingerprints=stored).close()
    with pytest.raises(ValueError, match=r"share was 0\.5, is 0\.75"):
        build_data([DataSpec(a, 3.0), DataSpec(b)], **PLAIN, stored_fingerprints=stored)
    with pytest.raises(ValueError, match=r"data\.sources were \['a', 'b'\], are \['a'\]"):
        build_data([DataSpec(a)], **PLAIN, stored_fingerprints=stored)


def test_runs_of_neighbours_stay_together_in_a_mixture(make_data):
    specs = [DataSpec(str(make_data(name, [8001]))) for name in ("a", "b")]
    with build_data(specs, **{**PLAIN, "global_batch": 128, "micro_batch": 128}, shuffle_block=16) as data:
        batch = next(data.train)
    windows = batch.tokens[:, 0] // 8
    assert len(windows.unique()) >= 100
    assert len((windows // 16).unique()) <= 12  # 64 samples of each, in runs of 16
