"""Files of weights that are damaged, cut off, pickled or of something else are refused, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file, save_file
from stoker.train.box import Box
from stoker.train.hf.files import Reader, read_header, tensors_of
from stoker.train.hf.importing import import_hf
from stoker.train.hf.weights import open_hf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    **{f"model.layers.0.self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.up_proj.weight": (6, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 6),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound directory of one file."""
    tensors = {n: torch.randn(s, generator=torch.Generator().manual_seed(len(n))) for n, s in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def rewrite(directory: Path, **changed: torch.Tensor | None) -> None:
    """None takes a tensor away."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | {n.replace("__", "."): t for n, t in changed.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 8)


def head_only(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def no_json(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8:12] = b"pick"
    file.write_bytes(data)


def overlap(file: Path) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = header["lm_head.weight"]["data_offsets"][:1] * 2
    header["model.norm.weight"]["data_offsets"][1] += 32
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "cut off, or not whole yet"),
        (lengthen, "its header says"),
        (head_only, "no safetensors file, or cut off: 20 bytes"),
        (no_json, "its header is damaged"),
        (overlap, "its header is damaged: a gap or an overlap"),
        (Path.unlink, "no model.safetensors and no model.safetensors.index.json in it"),
    ],
)
def test_a_damaged_file_is_refused(model: Path, damage: Callable[[Path], object], said: str) -> None:
    open_hf(model).close()
    damage(model / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        open_hf(model)


def test_pickled_weights_are_refused_unopened(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: pickled weights, which can run any code"):
        open_hf(model)


def test_weights_must_be_those_of_config_json(model: Path) -> None:
    extra = torch.ones(8)
    rewrite(model, model__layers__0__self_attn__q_proj__bias=extra)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj.bias has no place in the model"):
        open_hf(model)
    rewrite(model, model__layers__0__self_attn__q_proj__bias=None, lm_head__weight=None)
    with pytest.raises(ValueError, match=r"weights and config.json differ: lm_head.weight is missing"):
        open_hf(model)
    rewrite(model, lm_head__weight=torch.ones(12, 8))
    with pytest.raises(ValueError, match=r"lm_head.weight is \[12, 8\], by config.json \[11, 8\]"):
        open_hf(model)
    rewrite(model, lm_head__weight=torch.ones(11, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"lm_head.weight is I8 \(quantised\?\); expected one of F64, F32, F16, BF16"):
        open_hf(model)


def test_what_is_computed_anew_may_lie_there_and_a_tied_output_layer_too(model: Path) -> None:
    rewrite(model, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(2))
    open_hf(model).close()
    (model / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    found = open_hf(model)
    assert "head" not in found.shapes
    found.close()


def test_an_index_leads_nowhere_else(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "../model.safetensors")}))
    with pytest.raises(ValueError, match=r"names '../model.safetensors'; expected names of .safetensors files beside"):
        tensors_of(model)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "pytorch_model.bin")}))
    with pytest.raises(ValueError, match=r"names 'pytorch_model.bin'"):
        tensors_of(model)
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*SHAPES, "more"], "model.safetensors")}))
    with pytest.raises(ValueError, match=r"more is not in it"):
        tensors_of(model)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "model-00002-of-00002.safetensors")}))
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors: No such file"):
        tensors_of(model)


def test_any_region_is_read_into_any_form(model: Path) -> None:
    whole = load_file(model / "model.safetensors")["lm_head.weight"]
    stored, reader = read_header(model / "model.safetensors")["lm_head.weight"], Reader()
    out = torch.zeros(5, 3, dtype=torch.bfloat16).t()
    reader.fill(stored, Box((4, 2), (3, 5)), out)
    assert torch.equal(out, whole[4:7, 2:7].bfloat16())
    reader.close()


def test_no_more_is_read_than_the_rows_that_are_needed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    take = Reader._read

    def counted(self: Reader, file: Path, at: int, into: memoryview) -> None:
        read.append(len(into))
        take(self, file, at, into)

    monkeypatch.setattr(Reader, "_read", counted)
    found = open_hf(model)
    found.fill("head", Box((3, 0), (2, 8)), torch.zeros(2, 8))
    found.fill("blocks.0.ffn.down", Box((0, 0), (0, 6)), torch.zeros(0, 6))
    found.close()
    assert read == [2 * 8 * 4]


def test_a_file_that_shrinks_under_the_reader_is_an_error(model: Path) -> None:
    stored, reader = read_header(model / "model.safetensors")["lm_head.weight"], Reader()
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(stored.at + 4)
    with pytest.raises(ValueError, match=rf"ends at byte {stored.at + 4}, more was expected"):
        reader.fill(stored, Box.whole(stored.shape), torch.zeros(stored.shape))
    reader.close()


@pytest.mark.parametrize("shape", ["[Infinity, 8]", "[" * 5000])
def test_a_header_of_numbers_that_are_none_is_damaged(model: Path, shape: str) -> None:
    text = f'{{"model.norm.weight": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 32]}}}}'.encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 32)
    with pytest.raises(ValueError, match="its header is damaged"):
        open_hf(model)


@pytest.mark.parametrize("name", ["a\x00.safetensors", "\ud800.safetensors", "../model.safetensors"])
def test_an_index_names_nothing_but_files_beside_it(model: Path, name: str) -> None:
    index = {"weight_map": dict.fromkeys(SHAPES, name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"expected names of \.safetensors files beside it"):
        open_hf(model)


def test_more_layers_than_tensors_are_refused_before_they_are_made(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2**50}))
    with pytest.raises(ValueError, match=r"12 tensors, too few for model\.num_layers=1125899906842624"):
        open_hf(model)


def test_a_place_with_a_newline_in_its_name_adds_no_setting(model: Path) -> None:
    source = model / "a\nvocab_size: 7"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).rename(source / name)
    import_hf(source, model / "out")
    assert yaml.safe_load((model / "out/config/model/imported.yaml").read_text())["vocab_size"] == 11
