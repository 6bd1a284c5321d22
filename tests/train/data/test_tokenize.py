"""`stoker data tokenize`: what it writes, that it writes the same bytes always, resuming, and what it refuses."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stoker.train.data import encode, text, tokenize
from stoker.train.data.indexed import IndexedTokens
from stoker.train.data.meta import DataMeta, file_sha256, read_meta
from stoker.train.data.text import Tally, cut, documents, find_files
from stoker.train.data.tokenize import TokenizeOptions, main

tokenizers = pytest.importorskip("tokenizers")

OUTPUTS = (".bin", ".idx", ".meta.json", ".tokenizer.json")
WORDS = ["the", "quick", "brown", "fox", "dog.", "", "<|endoftext|>", "caf\u00e9", "\u4e2d\u6587", "\U0001f600", "01"]


def some_text(seed: int, words: int = 60) -> str:
    return " ".join(WORDS[(seed * 7 + i * i) % len(WORDS)] for i in range(words)) + "\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Ten text files and one JSONL file of 40 lines; about 20 kB."""
    directory = tmp_path / "corpus"
    (directory / "sub").mkdir(parents=True)
    for i in range(10):
        name = f"{i}.txt" if i % 2 else f"sub/{i}.txt"
        (directory / name).write_text(some_text(i))
    lines = [json.dumps({"id": i, "text": some_text(100 + i)}) for i in range(40)]
    (directory / "lines.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PART_BYTES", 3000)


def run(corpus: Path, out: Path, *more: str) -> int:
    return main([str(corpus), "--out", str(out), "--workers", "1", "--train-vocab", "400", *more])


def outputs(prefix: Path) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in OUTPUTS}


def decoded(prefix: Path) -> list[str]:
    tokenizer = tokenizers.Tokenizer.from_file(f"{prefix}.tokenizer.json")
    meta = read_meta(prefix)
    assert meta is not None
    out = []
    with IndexedTokens(prefix) as tokens:
        for d in range(tokens.documents):
            ids = tokens.document(d).tolist()
            assert ids[-1] == meta.eod
            assert meta.eod not in ids[:-1]
            out.append(tokenizer.decode(ids[:-1], skip_special_tokens=False))
    return out


def test_every_document_is_there_once_in_order_with_its_end(corpus, tmp_path, capsys):
    assert run(corpus, tmp_path / "out", "--train-vocab", "280") == 0
    # Sorted paths: the files of corpus/, then of corpus/sub/, as whole path names sort.
    expected = [some_text(i) for i in (1, 3, 5, 7, 9)]
    expected += [some_text(100 + i) for i in range(40)]
    expected += [some_text(i) for i in (0, 2, 4, 6, 8)]
    assert decoded(tmp_path / "out") == expected
    with IndexedTokens(tmp_path / "out") as tokens:
        assert read_meta(tmp_path / "out") == DataMeta(
            vocab_size=280,
            eod=0,
            tokenizer_sha256=file_sha256(tmp_path / "out.tokenizer.json"),
            dtype="uint16",
            documents=50,
            tokens=tokens.tokens,
            stoker_version="0.1.0",
            job=read_meta(tmp_path / "out").job,
        )
    assert "50 documents" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", *sorted(f"out{s}" for s in OUTPUTS)]


def test_the_bytes_do_not_depend_on_workers_or_threads(corpus, tmp_path, small_parts, monkeypatch):
    assert run(corpus, tmp_path / "one") == 0
    assert run(corpus, tmp_path / "two", "--workers", "2") == 0
    assert outputs(tmp_path / "one") == outputs(tmp_path / "two")
    script = "import sys; from stoker.train.data import text, tokenize; text.PART_BYTES = 3000; "
    script += "sys.exit(tokenize.main(sys.argv[1:]))"
    subprocess.run(
        [sys.executable, "-c", script, str(corpus), "--out", f"{tmp_path}/three", "--train-vocab=400", "--workers=1"],
        env={**os.environ, "RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": "5"},
        check=True,
        timeout=60,
    )
    assert outputs(tmp_path / "one") == outputs(tmp_path / "three")


# Where a process is killed -9: a patch that kills it there, n being the number of times that it passes before.
KILLS = {
    "before the tokenizer": "tokenize.train_tokenizer = die",
    "first part": "encode.write_text = dying(encode.write_text, 0)",
    "fourth part": "encode.write_text = dying(encode.write_text, 3)",
    "within a part": "indexed_writer.IndexWriter.add_documents = dying(indexed_writer.IndexWriter.add_documents, 4)",
    "before joining": "tokenize.merge = die",
    "between .bin and .idx": "os.replace = dying(os.replace, lambda a, b: str(b).endswith('out.idx'))",
    "before .meta.json": "tokenize.write_meta = die",
}
SCRIPT = """
import os, signal, sys
from stoker.train.data import encode, indexed_writer, text, tokenize
text.PART_BYTES = 3000
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
def dying(function, when):
    passes = []
    def wrapped(*args, **kwargs):
        passes.append(1)
        if when(*args) if callable(when) else len(passes) > when:
            die()
        return function(*args, **kwargs)
    return wrapped
{patch}
sys.exit(tokenize.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("place", KILLS)
def test_a_killed_run_goes_on_to_the_same_bytes(corpus, tmp_path, small_parts, place, capsys):
    script = SCRIPT.format(patch=KILLS[place])
    arguments = [str(corpus), "--out", str(tmp_path / "out"), "--train-vocab", "400", "--workers", "1"]
    killed = subprocess.run([sys.executable, "-c", script, *arguments], timeout=60, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out.meta.json").exists()
    assert main(arguments) == 0
    if place == "fourth part":
        assert "resuming: 3 of 7 parts are done" in capsys.readouterr().err
    assert run(corpus, tmp_path / "whole") == 0
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
    assert not (tmp_path / "out.parts").exists()


@pytest.fixture
def half_done(corpus, tmp_path, small_parts, monkeypatch):
    """A run that stopped behind three parts; gives the list of parts encoded after that."""
    encoded: list[int] = []
    original = encode.encode_part

    def stopping(part, encoding, tokenizer):
        if len(encoded) == 3:
            raise KeyboardInterrupt
        encoded.append(1)
        return original(part, encoding, tokenizer)

    monkeypatch.setattr(encode, "encode_part", stopping)
    assert run(corpus, tmp_path / "out") == 130
    assert len(list((tmp_path / "out.parts").glob("*.json"))) == 3
    encoded.clear()
    monkeypatch.setattr(encode, "encode_part", lambda *args: encoded.append(1) or original(*args))
    return encoded


def test_finished_parts_are_not_done_again(corpus, tmp_path, half_done):
    assert run(corpus, tmp_path / "out") == 0
    assert len(half_done) == 4
    assert len(decoded(tmp_path / "out")) == 50


def test_changed_inputs_never_meet_old_parts(corpus, tmp_path, half_done):
    (corpus / "1.txt").write_text("something else")
    assert run(corpus, tmp_path / "out") == 0
    assert len(half_done) == 7  # another text, another trained tokenizer: all parts anew
    assert decoded(tmp_path / "out")[0] == "something else"
    assert run(corpus, tmp_path / "whole") == 0
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


def test_with_a_given_tokenizer_only_changed_parts_are_done_again(corpus, tmp_path, small_parts, monkeypatch):
    assert run(corpus, tmp_path / "first") == 0
    given = ["--tokenizer", str(tmp_path / "first.tokenizer.json"), "--workers", "1"]
    done: list[int] = []
    original = encode.encode_part
    monkeypatch.setattr(encode, "encode_part", lambda *args: done.append(1) or original(*args))
    monkeypatch.setattr(tokenize, "merge", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main([str(corpus), "--out", str(tmp_path / "out"), *given]) == 1
    monkeypatch.undo()
    monkeypatch.setattr(text, "PART_BYTES", 3000)
    monkeypatch.setattr(encode, "encode_part", lambda *args: done.append(1) or original(*args))
    (corpus / "sub" / "8.txt").write_text("the last file, changed")
    done.clear()
    assert main([str(corpus), "--out", str(tmp_path / "out"), *given]) == 0
    assert len(done) == 1
    assert decoded(tmp_path / "out")[-1] == "the last file, changed"
    assert file_sha256(tmp_path / "out.tokenizer.json") == file_sha256(tmp_path / "first.tokenizer.json")


def test_what_is_done_is_not_done_again_nor_overwritten(corpus, tmp_path, capsys):
    assert run(corpus, tmp_path / "out") == 0
    before = outputs(tmp_path / "out")
    stamp = (tmp_path / "out.bin").stat().st_mtime_ns
    assert run(corpus, tmp_path / "out", "--workers", "2") == 0
    assert (tmp_path / "out.bin").stat().st_mtime_ns == stamp
    assert "nothing to do" in capsys.readouterr().err
    assert run(corpus, tmp_path / "out", "--ext", ".txt") == 1
    assert "exists, made from other inputs or options" in capsys.readouterr().err
    assert outputs(tmp_path / "out") == before
    assert run(corpus, tmp_path / "out", "--ext", ".txt", "--overwrite") == 0
    assert read_meta(tmp_path / "out").documents == 10


def test_two_at_once_on_one_prefix_are_refused(corpus, tmp_path, capsys):
    (tmp_path / "out.parts").mkdir()
    with tokenize._alone_in(tmp_path / "out.parts"):
        assert run(corpus, tmp_path / "out") == 1
    assert "another `stoker data tokenize` is writing there" in capsys.readouterr().err


def test_gzip_holds_the_same_documents(corpus, tmp_path):
    assert run(corpus, tmp_path / "plain") == 0
    for path in [p for p in corpus.rglob("*") if p.is_file()]:
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    given = ("--tokenizer", str(tmp_path / "plain.tokenizer.json"))
    assert main([str(corpus), "--out", str(tmp_path / "gz"), "--workers", "1", *given]) == 0
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/gz{suffix}").read_bytes() == Path(f"{tmp_path}/plain{suffix}").read_bytes()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 64, 10_000])
@pytest.mark.parametrize("end", ["", "\n"])
def test_cutting_jsonl_anywhere_gives_each_line_once(tmp_path, monkeypatch, size, end):
    monkeypatch.setattr(text, "PART_BYTES", size)
    texts = ["a", "bc", "", "d" * 30, "\u00e9\u4e2d", "f"]
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    lines.insert(2, "")  # a blank line is no document
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + end)
    parts = cut([str(tmp_path / "x.jsonl")])
    tally = Tally()
    got = [t for part in parts for t in documents(part, "text", tally)]
    assert got == [t for t in texts if t]
    assert tally.empty == 1


def test_parts_do_not_become_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PART_BYTES", 1)
    monkeypatch.setattr(text, "PART_LIMIT", 10)
    for i in range(300):
        (tmp_path / f"{i:03}.txt").write_text("x" * 10)
    parts = cut(find_files([str(tmp_path)], (".txt",)))
    assert len(parts) == 10
    assert [Path(p.path).name for part in parts for p in part] == [f"{i:03}.txt" for i in range(300)]


def test_inputs_are_found_in_order_and_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "a.py", "c.txt.gz", "d/e.txt", "d/.f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)

    def names(*inputs: str) -> list[str]:
        return [os.path.relpath(f, tmp_path) for f in find_files(inputs, (".txt",))]

    assert names(".") == ["a.txt", "b.txt", "c.txt.gz", "d/.f.txt", "d/e.txt"]
    assert names("b.txt", "*.txt", "a.py", str(tmp_path / "b.txt")) == ["b.txt", "a.txt", "a.py"]
    assert names("**/*.txt") == ["a.txt", "b.txt", "d/e.txt"]


def test_text_that_is_not_utf8_is_replaced_and_counted(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "in" / "b.txt").write_bytes("caf\u00e9".encode())
    (tmp_path / "in" / "c.jsonl").write_bytes(b'{"text": "\\ud800 alone"}\n{"text": "bad \xff"}\n{"text": ""}\n')
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert decoded(tmp_path / "out") == ["caf\ufffd au lait", "caf\u00e9", "\ufffd\ufffd\ufffd alone", "bad \ufffd"]
    assert "3 documents were not UTF-8, bad bytes replaced" in capsys.readouterr().out


def test_long_documents_are_encoded_in_slices_to_the_same_tokens(corpus, tmp_path, monkeypatch):
    long = "".join(some_text(i, 1 + i % 9) + "\n" * (i % 5 == 0) + " " * (i % 4 == 1) for i in range(300))
    (corpus / "long.txt").write_text(long)
    assert run(corpus, tmp_path / "whole") == 0
    monkeypatch.setattr(encode, "_SLICE_CHARACTERS", 600)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 1500)
    slices = [piece for piece, _ in encode._slices(long)]
    assert len(slices) > 10
    assert max(map(len, slices)) <= 600
    assert "".join(slices) == long
    assert max(len(piece) for piece, _ in encode._slices("z" * 1500)) == 600
    assert run(corpus, tmp_path / "sliced") == 0
    assert outputs(tmp_path / "sliced") == outputs(tmp_path / "whole")


def test_a_large_vocabulary_is_stored_as_int32(tmp_path):
    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("w69999 w65536 w3")
    arguments = [str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    with IndexedTokens(tmp_path / "out") as tokens:
        assert tokens.dtype == "int32"
        assert tokens.document(0).tolist() == [69_999, 65_536, 3, 70_000]
    meta = read_meta(tmp_path / "out")
    assert (meta.vocab_size, meta.eod, meta.dtype) == (70_001, 70_000, "int32")


BAD_INPUTS = {
    "no file": (["nothing.txt"], "input 'nothing.txt': no such file, no match, or no file with .txt, .jsonl"),
    "no match": (["*.nothing"], "input '*.nothing': no such file"),
    "empty directory": (["empty"], "input 'empty': no such file, no match"),
    "no text": (["blank.txt"], "the inputs hold no text"),
    "bad JSON": (["bad.jsonl"], "bad.jsonl:3: not JSON (Expecting"),
    "missing key": (["key.jsonl"], "key.jsonl:2: an object with 'txt', expected an object with 'text'"),
    "not an object": (["list.jsonl"], "list.jsonl:1: list, expected an object with 'text'"),
    "not a string": (["number.jsonl"], "number.jsonl:1: 'text' is int, expected a string"),
    "cut gzip": (["cut.txt.gz"], "cut.txt.gz: cannot be unpacked as gzip"),
    "no gzip": (["fake.jsonl.gz"], "fake.jsonl.gz: cannot be unpacked as gzip"),
    "no tokenizer": (["good.txt", "--tokenizer", "no.json"], "--tokenizer no.json: no such file"),
    "bad tokenizer": (["good.txt", "--tokenizer", "good.txt"], "--tokenizer good.txt: not a tokenizer.json"),
    "no eod": (["good.txt", "--tokenizer", "plain.json"], "no end-of-document token among <|endoftext|>"),
    "unknown eod": (["good.txt", "--tokenizer", "plain.json", "--eod-token", "<x>"], "no end-of-document token <x>"),
    "small vocabulary": (["good.txt", "--train-vocab", "256"], "--train-vocab 256: expected at least 257"),
    "prefix": (["good.txt", "--out", "here/x.bin"], "--out here/x.bin: expected a prefix"),
}


@pytest.mark.parametrize("kind", BAD_INPUTS)
def test_bad_input_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    good = '{"text": "good"}\n'
    files = {
        "good.txt": "good",
        "blank.txt": "",
        "bad.jsonl": f'{good}\n{{"text": \n{good}',
        "key.jsonl": good + '{"txt": "x"}\n',
        "list.jsonl": "[1]\n",
        "number.jsonl": '{"text": 1}\n',
        "fake.jsonl.gz": good,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(2000))[:-400])
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save("plain.json")
    before = sorted(tmp_path.rglob("*"))
    arguments, message = BAD_INPUTS[kind]
    if not {"--tokenizer", "--train-vocab"} & set(arguments):
        arguments = [*arguments, "--train-vocab", "300"]
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "here/out"]
    assert main([*arguments, "--workers", "1"]) == 1
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in captured.err
    assert [p for p in sorted(tmp_path.rglob("*")) if p.name != "here"] == before


def test_the_line_number_is_right_in_a_later_part(tmp_path, capsys):
    lines = [json.dumps({"text": "x" * 40}) for _ in range(100)]
    lines[77] = "{"
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PART_BYTES", 500)
        assert run(tmp_path / "x.jsonl", tmp_path / "out") == 1
    assert "x.jsonl:78: not JSON" in capsys.readouterr().err


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path, corpus):
    parts = cut(find_files([str(corpus / "1.txt")], (".txt",)))
    os.utime(corpus / "1.txt", ns=(1, 1))
    with pytest.raises(ValueError, match=r"1\.txt: changed while it was being read"):
        list(documents(parts[0], "text", Tally()))


def test_progress_is_one_rewritten_line_on_a_terminal_only(corpus, tmp_path, small_parts, monkeypatch, capsys):
    assert run(corpus, tmp_path / "log") == 0
    assert "\r" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(corpus, tmp_path / "tty") == 0
    shown = capsys.readouterr().err
    assert "\rtokenise: 100 %" in shown
    assert shown.count("\n") == 3  # two lines on training, and the end of the progress line


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def busy(tmp_path):
    """A tokenisation that has two workers at work for some seconds; and its pids of workers."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(some_text(i) for i in range(20_000)))
    (tmp_path / "c.txt").write_text(some_text(1))
    assert run(tmp_path / "c.txt", tmp_path / "small") == 0
    tokenizer = f"--tokenizer={tmp_path}/small.tokenizer.json"
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.train.data.tokenize", *arguments, tokenizer],
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: len(list(tmp_path.glob("out.parts/*.bin.tmp"))) == 2)
    workers = [int(p.name.split(".")[1]) for p in tmp_path.glob("out.parts/*.bin.tmp")]
    yield process, workers
    process.kill()
    process.wait()
    process.stderr.close()
    for pid in filter(is_alive, workers):  # only if a test failed
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_when_the_parent_is_killed(busy):
    process, workers = busy
    assert all(is_alive(pid) for pid in workers)
    process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in workers))


def test_a_killed_worker_is_an_error_not_a_hang(busy):
    process, workers = busy
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(timeout=30) == 1
    assert b"error: a worker process died (out of memory?)" in process.stderr.read()


def test_interrupting_ends_the_workers(busy):
    process, workers = busy
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert not any(is_alive(pid) for pid in workers)


def test_tokenising_does_not_import_torch():
    script = "import sys, stoker.train.data.tokenize; print([m for m in ('torch', 'tokenizers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match="either --tokenizer FILE or --train-vocab N"):
        tokenize.tokenize(TokenizeOptions(("x",), tmp_path / "out"))
