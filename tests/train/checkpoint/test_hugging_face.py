"""`stoker checkpoint import|export --hf`: from a run to what transformers loads, and from there to the next run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import tiny_config, train
from hf_models import batch_of, build, from_pretrained, relative, same_tensors, save
from safetensors.torch import load_file, save_file
from stoker.conf.compose import compose
from stoker.conf.load import to_plain
from stoker.conf.schema import Balance, ModelConfig, ParamDtype
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.verification import verify
from stoker.train.checkpoint.__main__ import main
from stoker.train.data.tokenize import TokenizeOptions, tokenize
from stoker.train.hf.exporting import Options, export_hf
from stoker.train.hf.importing import import_hf
from tokenizers import Tokenizer
from transformers import AutoTokenizer

TEXT = "the quick brown fox jumps over the lazy dog and the dog does not mind at all " * 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run in bfloat16 on tokenised text, with the files that a launched one has, and its trainer."""
    place = tmp_path_factory.mktemp("trained")
    prefix = place / "text"
    (place / "text.txt").write_text(TEXT)
    made = tokenize(TokenizeOptions((str(place / "text.txt"),), prefix, train_vocab=280))
    model = {"tied_embeddings": True, "vocab_size": made.vocab_size}
    config = tiny_config(
        prefix, 3, model=model, precision={"params": ParamDtype.bfloat16}, data={"validation_tokens": 0}
    )
    trainer, _ = train(place / "run", config)
    (place / "run" / "config.json").write_text(json.dumps(to_plain(config)))
    return place / "run", trainer


def masters(trainer: Any) -> dict[str, torch.Tensor]:
    prefix = "optim/master/"
    return {e.name.removeprefix(prefix): e.tensor for e in trainer.entries() if e.name.startswith(prefix)}


def run_tool(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The JSON that it prints."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_trained_run_is_loaded_by_transformers_with_its_tokenizer(
    trained: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trainer = trained
    made = run_tool(capsys, "export", run, "--hf", tmp_path / "hf", "--dtype", "fp32")
    (name,) = RunDir(run).all_checkpoints()
    assert made["checkpoint"] == str(RunDir(run.resolve()).checkpoint(name))
    assert (made["family"], made["dtype"], made["from_masters"]) == ("Llama 2 and 3", "float32", True)
    theirs = from_pretrained(tmp_path / "hf")
    assert theirs.config.tie_word_embeddings is True
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert torch.equal(theirs.model.embed_tokens.weight, masters(trainer)["embedding"])
    assert (theirs.config.eos_token_id, theirs.generation_config.eos_token_id) == (0, 0)
    assert theirs.config.max_position_embeddings == 32  # data.seq_len
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = Tokenizer.from_file(f"{run.parent / 'text'}.tokenizer.json")
    assert tokenizer("the lazy fox")["input_ids"] == ours.encode("the lazy fox").ids
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.decode(ours.encode("the lazy fox").ids) == "the lazy fox"
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_average_of_a_run_s_checkpoints_is_exported_as_they_are(
    trained: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lies outside the run, and has with it what an export takes from there."""
    run, _ = trained
    (name,) = RunDir(run).all_checkpoints()
    shutil.copytree(RunDir(run).checkpoint(name), tmp_path / "same")
    run_tool(capsys, "average", run, tmp_path / "same", "--out", tmp_path / "mean")
    run_tool(capsys, "average", tmp_path / "mean", tmp_path / "same", "--out", tmp_path / "again")
    run_tool(capsys, "export", run, "--hf", tmp_path / "hf")
    for source in ("mean", "again"):
        verify(tmp_path / source)
        made = run_tool(capsys, "export", tmp_path / source, "--hf", tmp_path / f"{source}-hf")
        assert made["tokenizer"] == str(tmp_path / source)
        for file in (tmp_path / "hf").iterdir():
            assert (tmp_path / f"{source}-hf" / file.name).read_bytes() == file.read_bytes(), file.name


def test_without_a_dtype_it_is_what_the_run_computed_with(trained: tuple[Path, Any], tmp_path: Path) -> None:
    run, trainer = trained
    (name,) = RunDir(run).all_checkpoints()
    export_hf(RunDir(run).checkpoint(name), tmp_path / "hf", Options())
    theirs = from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    assert torch.equal(theirs.model.layers[1].mlp.up_proj.weight, trainer.model.get_parameter("blocks.1.ffn.up"))
    tokens = torch.arange(30).view(2, 15)
    with torch.no_grad():
        assert relative(theirs.float()(tokens).logits, trainer.model.float().logits(batch_of(tokens))) < 1e-5


def test_an_import_is_ready_for_a_run_and_goes_back_as_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_data: Path
) -> None:
    config = tiny_config(tiny_data).model
    export_hf(save(build(config), config, tmp_path / "first"), tmp_path / "hf", Options(dtype=torch.bfloat16))
    described = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"eos_token_id": 5, "rope_theta": 1e6}
    described |= {"max_position_embeddings": 777}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
    (tmp_path / "hf" / "generation_config.json").write_text('{"temperature": 0.5}')
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    made = run_tool(capsys, "import", "--hf", tmp_path / "hf", "--out", tmp_path / "ours")
    assert made["settings"]["rope_theta"] == 1e6
    assert made["tokenizer"] == ["chat_template.jinja"]
    assert verify(tmp_path / "ours").state["weights_only"] is True
    composed = compose(["model=imported", "data.sources=[{prefix: /x}]"], tmp_path / "ours" / "config").config.model
    assert composed == replace(config, rope_theta=1e6)
    run = tiny_config(tiny_data, steps=1)
    run.model = replace(composed, init_from=str(tmp_path / "ours"))
    trainer, _ = train(tmp_path / "run", run)
    assert trainer.progress.step == 1
    run_tool(capsys, "export", tmp_path / "ours", "--hf", tmp_path / "back")
    assert same_tensors(tmp_path / "hf", tmp_path / "back") == []
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == described
    assert (tmp_path / "back" / "generation_config.json").read_text() == '{"temperature": 0.5}'


def test_large_models_are_cut_into_files_of_the_size_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(ModelConfig(), vocab_size=64, hidden_size=64, num_layers=3)
    save(build(config), config, tmp_path / "ours")
    run_tool(capsys, "export", tmp_path / "ours", "--hf", tmp_path / "hf", "--max-shard-size", "200KB")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [f.name for f in files][:2] == ["model-00001-of-00013.safetensors", "model-00002-of-00013.safetensors"]
    assert all(f.stat().st_size < 201_000 for f in files)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in files}
    from_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "one", Options())
    assert same_tensors(tmp_path / "hf", tmp_path / "one") == []


def test_a_config_above_the_checkpoint_that_is_no_run_s_does_not_matter(tmp_path: Path) -> None:
    config = replace(ModelConfig(), vocab_size=64, hidden_size=64)
    save(build(config), config, tmp_path / "checkpoints" / "ours")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    export_hf(tmp_path / "checkpoints" / "ours", tmp_path / "hf", Options())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == 2048


def test_gpt2_as_it_was_published_is_read(tmp_path: Path) -> None:
    """Its body alone, with masks beside the weights."""
    config = compose(["model=gpt2", "data.sources=[{prefix: /x}]"]).config.model
    config = replace(config, vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_size=24)
    export_hf(save(build(config), config, tmp_path / "ours"), tmp_path / "hf", Options())
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(2)}, file)
    import_hf(tmp_path / "hf", tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "back", Options())
    assert same_tensors(tmp_path / "back", tmp_path / "hf") == sorted(
        [*tensors, *(f"transformer.{name}" for name in tensors), "h.0.attn.bias", "h.1.attn.bias"]
    )
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(found[f"transformer.{name}"], tensor) for name, tensor in tensors.items())


def test_the_type_that_is_asked_is_the_type_that_is_named(tmp_path: Path) -> None:
    config = replace(ModelConfig(), vocab_size=64, hidden_size=64)
    export_hf(save(build(config), config, tmp_path / "ours"), tmp_path / "hf", Options(dtype=torch.bfloat16))
    from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    export_hf(tmp_path / "ours", tmp_path / "back", Options(dtype=torch.float16, like=tmp_path / "theirs"))
    assert from_pretrained(tmp_path / "back", dtype="auto").dtype is torch.float16
    assert from_pretrained(tmp_path / "theirs", dtype="auto").dtype is torch.bfloat16


def stop(done: int, total: int) -> None:
    raise OSError(28, "No space left on device")


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    config = replace(ModelConfig(), vocab_size=64, hidden_size=64)
    save(build(config), config, tmp_path / "ours")
    with pytest.raises(OSError, match="No space left"):
        export_hf(tmp_path / "ours", tmp_path / "out" / "hf", Options(), stop)
    export_hf(tmp_path / "ours", tmp_path / "hf", Options())
    with pytest.raises(OSError, match="No space left"):
        import_hf(tmp_path / "hf", tmp_path / "out" / "ours", None, stop)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="exists already; name a new directory"):
        export_hf(tmp_path / "ours", tmp_path / "hf", Options())


def test_what_does_not_fit_is_refused_before_anything_is_written(
    trained: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(ModelConfig(), vocab_size=32, hidden_size=32)
    save(build(config), config, tmp_path / "ours")
    tokenizer = f"{trained[0].parent / 'text'}.tokenizer.json"
    assert main(["export", str(tmp_path / "ours"), "--hf", str(tmp_path / "hf"), "--tokenizer", tokenizer]) == 2
    assert "280 tokens, but the model has model.vocab_size = 32" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "ours"), "--hf", str(tmp_path / "hf"), "--tokenizer", "/nowhere"]) == 2
    assert "--tokenizer /nowhere: no such file or directory" in capsys.readouterr().err
    other = replace(config, shared_expert_ffn_size=8, num_experts=4, balance=Balance.none)
    save(build(other), other, tmp_path / "other")
    assert main(["export", str(tmp_path / "other"), "--hf", str(tmp_path / "hf")]) == 2
    assert "model.shared_expert_ffn_size = 8: expected 0" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), "--hf", str(tmp_path / "hf")]) == 2
    assert not (tmp_path / "hf").exists()
    assert main(["import", "--hf", str(tmp_path / "ours"), "--out", str(tmp_path / "x")]) == 2
    assert "no config.json in it" in capsys.readouterr().err


MEASURE = """
import resource, sys
from pathlib import Path
import torch
from stoker.train.checkpoint.__main__ import main
import stoker.train.hf.importing, stoker.train.hf.exporting, stoker.train.checkpoint.import_
open("/proc/self/clear_refs", "w").write("5")
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024
before = peak()
assert main(sys.argv[1:]) == 0
print(peak() - before)
"""


@pytest.mark.full
def test_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    config = replace(ModelConfig(), vocab_size=60_000, hidden_size=1024, num_layers=16, num_heads=16, ffn_size=4096)
    save(build(config), config, tmp_path / "ours")  # 1.36 GB
    steps = [
        ["export", tmp_path / "ours", "--hf", tmp_path / "hf"],
        ["import", "--hf", tmp_path / "hf", "--out", tmp_path / "b"],
    ]
    for step in steps:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *map(str, step)], capture_output=True, text=True, check=True
        )
        growth = int(done.stdout.splitlines()[-1])
        print(step[0], growth, "MiB")
        assert growth < 400
    assert yaml.safe_load((tmp_path / "b" / "config" / "model" / "imported.yaml").read_text())["ffn_size"] == 4096
