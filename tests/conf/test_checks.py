"""Rules between fields: a golden line for every rule, and silence for what is right."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.checks import OPS, check, errors, implementations
from stoker.conf.compose import compose
from stoker.conf.fields import build, lookup
from stoker.conf.problems import Problem
from stoker.conf.schema import Config, DataSource

MISSING_DATA = (
    "data.sources.0.prefix=: expected the path of tokenised data, without .bin; `stoker data tokenize` makes it"
)


def right() -> Config:
    """A configuration without a problem, files left aside."""
    config = Config()
    config.data.sources = [DataSource("/data/a")]
    return config


def with_fields(fields: dict[str, Any]) -> Config:
    config = right()
    for field, value in fields.items():
        *path, name = field.split(".")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        problems: list[Problem] = []
        setattr(owner, name, build(lookup(field.split(".")), value, (field,), problems, complete=False))
        assert problems == []
    return config


def lines(fields: dict[str, Any]) -> list[str]:
    return [f"{p.severity[0]} {p}" for p in check(with_fields(fields), files=False)]


def test_a_right_configuration_has_no_problems() -> None:
    assert check(right(), files=False) == []


RULES: list[tuple[dict[str, Any], list[str]]] = [
    ({"train.steps": 0}, ["e train.steps=0: expected a positive number"]),
    ({"train.micro_batch": -1}, ["e train.micro_batch=-1: expected a positive number"]),
    ({"optim.lr": 0}, [
        "e optim.lr=0.0: expected a positive number",
    ]),
    ({"optim.beta2": 1.0}, ["e optim.beta2=1.0: expected at least 0 and less than 1"]),
    ({"model.dropout": -0.1}, ["e model.dropout=-0.1: expected at least 0 and less than 1"]),
    ({"checkpoint.keep": 0}, ["e checkpoint.keep=0: expected a positive number"]),
    ({"profile.steps": [2, 4], "profile.ranks": [0]}, []),
    ({"profile.steps": [4]}, [
        "e profile.steps=[4]: expected the first and the last step to trace, from 1, like [10,12]",
    ]),
    ({"profile.steps": [4, 3]}, [
        "e profile.steps=[4, 3]: expected the first and the last step to trace, from 1, like [10,12]",
    ]),
    ({"profile.steps": [0, 3]}, [
        "e profile.steps=[0, 3]: expected the first and the last step to trace, from 1, like [10,12]",
    ]),
    ({"profile.steps": [999, 1001]}, ["e profile.steps=[999, 1001]: beyond the last step: train.steps=1000"]),
    ({"profile.steps": [10, 30]}, [
        "w profile.steps=[10, 30]: a trace of so many steps is too large for most viewers; a few say as much",
    ]),
    ({"profile.steps": [2, 4], "profile.ranks": [1, 0, 0]}, [
        "e profile.ranks.0=1: no such rank; there are 0 to 0",
        "e profile.ranks.2=0: is there twice",
    ]),
    ({"profile.steps": [2, 4], "profile.ranks": []}, ["e profile.ranks=[]: expected at least one rank, like [0]"]),
    ({"profile.memory": True}, ["w profile.memory=true: has no effect without profile.steps"]),
    ({"profile.steps": [2, 4], "profile.memory": True}, [
        "w profile.memory=true: has no effect on the CPU (cluster.gpus_per_node=0)",
    ]),
    ({"profile.steps": [2, 4], "task.cmd": ["python", "x.py"]}, [
        "w profile.steps=[2, 4]: has no effect with task.cmd: a script of your own has to profile itself",
    ]),
    ({"resilience.budgets": {"crash": -2}}, [
        "e resilience.budgets.crash=-2: expected 0 or more, or -1 for any number",
    ]),
    ({"resilience.budgets": {"preemted": 3}}, [
        "e resilience.budgets.preemted: no cause that has a budget; did you mean preempted?",
    ]),
    ({"seed": 2**63}, ["e seed=9223372036854775808: expected less than 2^63"]),
    ({"train.global_batch": 30, "cluster.nodes": 2}, [
        "e train.global_batch=30: not a multiple of train.micro_batch=4 x 2 processes = 8; nearest that work: "
        "train.global_batch=24 or 32, or train.micro_batch=3",
    ]),
    ({"train.global_batch": 3, "cluster.nodes": 2}, [
        "e train.global_batch=3: not a multiple of train.micro_batch=4 x 2 processes = 8; nearest that work: "
        "train.global_batch=8",
    ]),
    ({"model.num_heads": 0}, ["e model.num_heads=0: expected a positive number"]),
    ({"optim.warmup_steps": 1001}, ["e optim.warmup_steps=1001: longer than the run: train.steps=1000"]),
    ({"optim.warmup_steps": 1000}, []),
    ({"optim.schedule": "wsd", "optim.warmup_steps": 500, "optim.decay_steps": 501}, [
        "e optim.decay_steps=501: with optim.warmup_steps=500 longer than the run: train.steps=1000",
    ]),
    ({"optim.schedule": "wsd", "optim.warmup_steps": 500, "optim.decay_steps": 500}, []),
    ({"optim.schedule": "wsd"}, [
        "w optim.decay_steps=0: the wsd schedule never decays; give the length of its last part",
    ]),
    ({"optim.decay_steps": 5}, [
        "w optim.decay_steps=5: has no effect with optim.schedule=cosine; only wsd has a decay of its own",
    ]),
    ({"optim.min_lr": 1e-3}, ["e optim.min_lr=0.001: above optim.lr=0.0003; lower it"]),
    ({"optim.min_lr": 1e-3, "optim.schedule": "constant"}, []),
    ({"precision.params": "bfloat16"}, [
        "w precision.params=bfloat16: without GPUs (cluster.gpus_per_node=0) this is slow on most CPUs",
    ]),
    ({"train.eval_interval": 10}, [
        "e train.eval_interval=10: validation needs held-out data; set data.validation_tokens, or "
        "train.eval_interval=0",
    ]),
    ({"data.validation_tokens": 1000}, [
        "w data.validation_tokens=1000: keeps data from training that nothing looks at; set train.eval_interval",
    ]),
    ({"train.eval_interval": 10, "data.validation_tokens": 256}, [
        "e data.validation_tokens=256: holds not one sample; expected at least data.seq_len + 1 = 257",
    ]),
    ({"train.eval_interval": 10, "data.validation_tokens": 257}, []),
    ({"train.eval_interval": 1001, "data.validation_tokens": 257}, [
        "w train.eval_interval=1001: longer than the run: train.steps=1000",
    ]),
    ({"checkpoint.interval": 0}, [
        "w checkpoint.interval=0: with resilience.continuation=requeue: a stop without warning starts again at step 0; "
        "set an interval",
    ]),
    ({"checkpoint.interval": 0, "resilience.continuation": "none"}, []),
    ({"name": "a/b"}, [
        "e name=a/b: names a directory and a job; expected up to 100 of A-Z a-z 0-9 . _ -, not beginning with . or -",
    ]),
    ({"name": "-x"}, [
        "e name=-x: names a directory and a job; expected up to 100 of A-Z a-z 0-9 . _ -, not beginning with . or -",
    ]),
    ({"name": "Llama_3.1-8b"}, []),
    ({"run_root": ""}, ["e run_root=: expected a directory for the run directories"]),
    ({"plugins": ["my.models", "my-models"]}, [
        "e plugins.1=my-models: expected a module's importable name, like my_package.models",
    ]),
    ({"kernels.default": "referenc", "kernels.rope": "cuda"}, [
        "e kernels.default=referenc: no such implementation; did you mean reference?",
        "e kernels.rope=cuda: no such implementation; there are: auto, reference, native, apex",
    ]),
    ({"kernels.default": "mine", "plugins": ["my.kernels"]}, []),
    ({"kernels.architectures": [90, 9]}, [
        "e kernels.architectures=[90,9]: expected compute capabilities from 8.0 on, times ten, as [80,90,100]"]),
    ({"kernels.attention": "flash", "precision.params": "bfloat16", "cluster.gpus_per_node": 1}, []),
    ({"kernels.attention": "flash"}, [
        "e kernels.attention=flash: has kernels for half precision only; choose auto or sdpa, or "
        "precision.params=bfloat16",
    ]),
    ({"kernels.attention": "varlen", "precision.params": "bfloat16", "model.attention_softcap": 30,
      "parallel.context": 2, "cluster.procs_per_node": 2, "cluster.cpus_per_task": 2, "cluster.gpus_per_node": 2}, [
        "e kernels.attention=varlen: has no soft cap, which model.attention_softcap asks for; choose auto or sdpa, "
        "or flash",
        "e kernels.attention=varlen: is not asked by the ring, which computes blocks with torch's kernels; leave "
        "it out, or choose parallel.context_method=ulysses",
    ]),
    ({"cluster.setup": ["module load a\nrm -r b"]}, [
        "e cluster.setup.0='module load a\\nrm -r b': holds a line break or another control character; "
        "expected one line",
    ]),
    ({"cluster.env": {"A": "b\0c"}}, [
        "e cluster.env.A='b\\x00c': holds a line break or another control character; expected one line",
    ]),
    # The cluster
    ({"cluster.env": {"WANDB_API_KEY": "s3cret"}}, [
        "e cluster.env.WANDB_API_KEY: looks like a key or password, which would be written into the run directory; "
        "export it before `stoker launch` instead: the job inherits your environment",
    ]),
    ({"cluster.env": {"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1", "lower_case": "1"}}, []),
    ({"cluster.env": {"A-B": "1"}}, [
        "e cluster.env.A-B=1: no name for a variable; expected letters, digits and _, no digit first",
    ]),
    ({"cluster.env": {"SLURM_NNODES": "1"}}, [
        "e cluster.env.SLURM_NNODES=1: set by Slurm or stoker in the job; leave it out",
    ]),
    ({"cluster.env": {"OMP_NUM_THREADS": "2"}}, ["e cluster.env.OMP_NUM_THREADS=2: use cluster.omp_threads"]),
    ({"cluster.procs_per_node": 4, "cluster.gpus_per_node": 2, "cluster.cpus_per_task": 4}, [
        "e cluster.procs_per_node=4: more processes than cluster.gpus_per_node=2; each needs a GPU of its own",
    ]),
    ({"cluster.gpus_per_node": 8}, [
        "w cluster.procs_per_node=1: leaves 7 of cluster.gpus_per_node=8 idle; one process per GPU uses all",
    ]),
    ({"parallel.backend": "nccl"}, [
        "e parallel.backend=nccl: needs GPUs; set cluster.gpus_per_node, or take gloo",
    ]),
    ({"parallel.backend": "gloo", "cluster.gpus_per_node": 1}, [
        "w parallel.backend=gloo: copies every gradient through the host; nccl is for GPUs",
    ]),
    ({"cluster.procs_per_node": 2}, [
        "w cluster.cpus_per_task=1: less than 2 processes x cluster.omp_threads=1: they share these CPUs",
    ]),
    ({"cluster.mem": "4.5G"}, [
        "e cluster.mem=4.5G: expected an integer with K, M, G or T (MiB without one)",
    ]),
    ({"fabric.interface": "bond0,eth1.100"}, []),
    ({"fabric.interface": "=eth0"}, [
        "e fabric.interface==eth0: expected an interface's exact name, as `ip link` shows it",
    ]),
    ({"cluster.mem": "4GB"}, []),
    ({"cluster.mem": "0"}, []),
    ({"cluster.python": ""}, ["e cluster.python=: expected the path of an interpreter, or null for this one"]),
    ({"cluster.sbatch": {"nodes": "3", "deadlin": None}}, [
        "e cluster.sbatch.nodes=3: set by stoker; use cluster.nodes",
        "e cluster.sbatch.deadlin: no long option of sbatch; did you mean deadline?",
    ]),
    ({"cluster.time": "10 min"}, [
        "e cluster.time=10 min: expected one of sbatch's forms: minutes, minutes:seconds, hours:minutes:seconds, "
        "days-hours, days-hours:minutes, days-hours:minutes:seconds, or UNLIMITED",
    ]),
    ({"cluster.time": "2", "resilience.warning": 100}, [
        "e resilience.warning=100: warned up to 130 s before the end of cluster.time=2 (00:02:00), so before it "
        "starts; lower it or ask for more time",
    ]),
    ({"cluster.time": "0:04:00"}, [
        "w resilience.warning=120: warned up to 150 s before the end of cluster.time=0:04:00 (00:04:00): less than "
        "half of it trains; lower it or ask for more time",
    ]),
    ({"cluster.time": "5"}, []),
    ({"cluster.time": "UNLIMITED"}, []),
    ({"resilience.warning": 59}, [
        "w resilience.warning=59: may be too short for three steps and a checkpoint, which are then lost; "
        "60 s or more is safer",
    ]),
    ({"resilience.warning": 70000}, ["e resilience.warning=70000: expected at most 65535 s; sbatch takes no more"]),
    ({"cluster.kind": "local", "resilience.warning": 1}, []),
    ({"cluster.kind": "local", "cluster.partition": "gpu", "cluster.time": "x"}, [
        "w cluster.time: has no effect with cluster.kind=local; leave it out",
        "w cluster.partition: has no effect with cluster.kind=local; leave it out",
    ]),
    # The data
    ({"data.sources": []}, [
        "e data.sources=[]: no data; give data.sources='[{prefix: PATH}]', `stoker data tokenize` makes it",
    ]),
    ({"data.sources": [{"prefix": ""}]}, [f"e {MISSING_DATA}"]),
    ({"data.sources": [{"prefix": "/a.bin"}]}, [
        "e data.sources.0.prefix=/a.bin: leave out .bin; both files belong to it",
    ]),
    ({"data.sources": [{"prefix": "/a", "weight": 0}]}, [
        "e data.sources.0.weight=0.0: expected a positive number; or leave the source out",
    ]),
    ({"data.sources": [{"prefix": "/a/x"}, {"prefix": "/b/x"}]}, [
        "e data.sources.1.name=x: also the name of data.sources.0; it keys the sampling order, so give another",
    ]),
    ({"data.sources": [{"prefix": "/a/x"}, {"prefix": "/b/x", "name": "y"}]}, []),
    ({"data.reset_positions": True}, [
        "w data.reset_positions=true: documents still attend to each other, at positions that overlap; "
        "set data.mask_documents=true too",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), RULES, ids=lambda value: str(value)[:60])
def test_a_rule_between_fields(fields: dict[str, Any], expected: list[str]) -> None:
    assert lines(fields) == expected


def test_all_problems_are_told_at_once_errors_first() -> None:
    found = lines({"checkpoint.interval": 0, "train.steps": 0, "name": "", "cluster.mem": "x", "optim.beta1": 2})
    assert [line.partition(":")[0] for line in found] == [
        "e name=", "e train.steps=0", "e optim.beta1=2.0", "e cluster.mem=x", "w checkpoint.interval=0",
    ]  # fmt: skip
    problems = check(with_fields({"checkpoint.interval": 0, "train.steps": 0}), files=False)
    assert [problem.field for problem in errors(problems)] == ["train.steps"]


@pytest.mark.parametrize("choice", ["experiment=demo", "experiment=smoke", "model=llama-3.1-8b"])
def test_our_own_choices_lack_nothing_but_the_data(choice: str) -> None:
    assert [str(problem) for problem in check(compose([choice]).config)] == [MISSING_DATA]


def test_the_large_experiment_fits_its_example_cluster() -> None:
    problems = check(compose(["experiment=pretrain-160m", "cluster=h100-ib"]).config)
    assert [str(problem) for problem in problems] == [MISSING_DATA]


def test_ops_are_those_of_the_kernels() -> None:
    ops = pytest.importorskip("stoker.kernels.ops")
    assert OPS == ops.OP_NAMES


def test_implementations_are_those_of_the_kernels() -> None:
    rows = pytest.importorskip("stoker.kernels.implementations").IMPLEMENTATIONS
    for op in OPS:
        assert {*implementations(op)} == {"auto", *(row.name for row in rows if row.op == op)}, op


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope", "foo", "no such implementation; there are: auto, reference, native, apex"),
        ("rope", "flash", "no such implementation; there are: auto, reference, native, apex"),
        ("attention", "native", "no such implementation; there are: auto, reference, sdpa, varlen, flash"),
        ("default", "natve", "no such implementation; did you mean native?"),
    ],
)
def test_an_implementation_that_an_op_does_not_have_is_refused(field: str, value: str, message: str) -> None:
    problems = check(compose([f"kernels.{field}={value}"]).config)
    assert [str(p) for p in problems if p.field == f"kernels.{field}"] == [f"kernels.{field}={value}: {message}"]


def index_of_one_document(tokens: int) -> bytes:
    """Header, the one length, the one pointer, two document bounds."""
    return struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, tokens, 0, 0, 1)


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., str]:
    """Makes a data set: an index, so many 16-bit tokens, and what the tokenizer says of itself."""

    def make(name: str = "a", tokens: int = 1000, vocab_size: int = 4096, tokenizer: bytes = b"{}") -> str:
        prefix = tmp_path / name
        prefix.with_suffix(".bin").write_bytes(bytes(2 * tokens))
        prefix.with_suffix(".idx").write_bytes(index_of_one_document(tokens))
        meta = {"vocab_size": vocab_size, "eod": 0, "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest()}
        Path(f"{prefix}.meta.json").write_text(json.dumps(meta))
        return str(prefix)

    return make


def file_lines(tmp_path: Path, *prefixes: str, **fields: Any) -> list[str]:
    config = right()
    config = replace(config, run_root=str(tmp_path / "runs"))
    config.data.sources = [DataSource(prefix) for prefix in prefixes]
    for name, value in fields.items():
        setattr(config.model if name == "vocab_size" else config.data, name, value)
    return [f"{p.severity[0]} {p}".replace(f"{tmp_path}/", "") for p in check(config)]


def test_data_that_suit_the_model_are_taken(tmp_path: Path, data: Callable[..., str]) -> None:
    (tmp_path / "tok.json").write_bytes(b"{}")
    assert file_lines(tmp_path, data(tokens=257), tokenizer=str(tmp_path / "tok.json")) == []


def test_missing_and_damaged_data_are_told(tmp_path: Path, data: Callable[..., str]) -> None:
    assert file_lines(tmp_path, f"{tmp_path}/nope") == [
        "e data.sources.0.prefix=nope: nope.bin cannot be read (No such file or directory); "
        "`stoker data tokenize` makes it"
    ]
    prefix = data()
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX")
    assert file_lines(tmp_path, prefix) == [
        "e data.sources.0.prefix=a: a.idx is no index of Megatron's format, or is damaged; "
        "`stoker data tokenize` makes it"
    ]
    Path(f"{prefix}.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 2, 6, 1, 2))
    assert file_lines(tmp_path, prefix) == [
        "e data.sources.0.prefix=a: a.idx has version 2 and token type 6; expected version 1 and integers"
    ]


def test_an_index_that_is_cut_short_or_of_other_data_is_told(tmp_path: Path, data: Callable[..., str]) -> None:
    prefix = data()
    index = Path(f"{prefix}.idx")
    index.write_bytes(index.read_bytes()[:50])
    assert file_lines(tmp_path, prefix) == [
        "e data.sources.0.prefix=a: a.idx is truncated or damaged: 50 bytes, but its 1 sequences take 62; "
        "copy or make the data again"
    ]
    index.write_bytes(index_of_one_document(999))
    assert file_lines(tmp_path, prefix) == [
        "e data.sources.0.prefix=a: a.idx says that the tokens end at byte 1998, but the .bin has 2000 bytes; "
        "copy or make the data again"
    ]


def test_data_too_small_for_one_sample_are_told(tmp_path: Path, data: Callable[..., str]) -> None:
    assert file_lines(tmp_path, data(tokens=256)) == [
        "e data.sources.0.prefix=a: 256 tokens hold not one sample of data.seq_len + 1 = 257; "
        "shorten the samples, or add data"
    ]
    assert file_lines(tmp_path, data(tokens=500), validation_tokens=257)[0] == (
        "e data.sources.0.prefix=a: 500 tokens less data.validation_tokens=257 hold not one sample of "
        "data.seq_len + 1 = 257; lower data.validation_tokens, shorten the samples, or add data"
    )


def test_a_tokenizer_that_does_not_match_is_told(tmp_path: Path, data: Callable[..., str]) -> None:
    (tmp_path / "tok.json").write_bytes(b"other")
    ours, theirs = hashlib.sha256(b"other").hexdigest()[:12], hashlib.sha256(b"{}").hexdigest()[:12]
    assert file_lines(tmp_path, data(), tokenizer=str(tmp_path / "tok.json")) == [
        f"e data.tokenizer=tok.json: did not make a (sha256 {ours}, there {theirs}); name the one that did"
    ]
    assert file_lines(tmp_path, data(), tokenizer=str(tmp_path / "nope.json")) == [
        "e data.tokenizer=nope.json: cannot be read (No such file or directory)"
    ]
    assert file_lines(tmp_path, data(), data("b", tokenizer=b"other")) == [
        "e data.sources.1.prefix=b: was made by another tokenizer than a; tokenise both with one"
    ]
    Path(f"{data('c')}.meta.json").unlink()
    assert file_lines(tmp_path, f"{tmp_path}/c", tokenizer=str(tmp_path / "tok.json")) == [
        "e data.sources.0.prefix=c: has no .meta.json to say whether data.tokenizer made it; leave data.tokenizer out"
    ]
    assert file_lines(tmp_path, f"{tmp_path}/c") == []


@pytest.mark.parametrize(("rows", "fits"), [(4095, False), (4096, True), (5120, True), (5121, False)])
def test_the_models_vocabulary_fits_the_data(tmp_path: Path, data: Callable[..., str], rows: int, fits: bool) -> None:
    expected = (
        f"e model.vocab_size={rows}: does not suit a, whose tokenizer has 4096; expected that, or padding up to 5120"
    )
    assert file_lines(tmp_path, data(), vocab_size=rows) == ([] if fits else [expected])


def test_a_damaged_description_of_the_data_is_told(tmp_path: Path, data: Callable[..., str]) -> None:
    prefix = data()
    Path(f"{prefix}.meta.json").write_text("[]")
    assert file_lines(tmp_path, prefix) == [
        "e data.sources.0.prefix=a: a.meta.json cannot be read; `stoker data tokenize` makes it"
    ]


def test_a_run_root_that_is_a_file_is_told(tmp_path: Path, data: Callable[..., str]) -> None:
    prefix = data()
    (tmp_path / "runs").write_text("")
    assert file_lines(tmp_path, prefix) == ["e run_root=runs: is a file; expected a directory, existing or to be made"]
