"""Names: which tensors of Hugging Face's files a parameter of ours is made of, per family, for both directions.

Owns: the tables of names and the geometry that follows from them and from the parameter table. A piece pairs a region
of our parameter with one of theirs; importing copies along all pieces one way, exporting the other way. Values never
change: ours and theirs rotate the same halves, and Gemma's norm weights are kept as offsets from 1 in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..box import Box
from ..params import ParamTable


@dataclass(frozen=True)
class Rule:
    """Where a parameter lies in their files.

    theirs: the name, {layer} filled in; with {expert}, the parameter is a stack of one tensor per expert.
    is_transposed: theirs is [in, out].
    among: the parameters whose outputs lie one after another in that one tensor, in this order.
    """

    theirs: str
    is_transposed: bool = False
    among: tuple[str, ...] = ()


Rules = Mapping[str, Rule]  # by the parameter's name, without `blocks.N.`


def _names(prefix: str, names: Mapping[str, str]) -> dict[str, Rule]:
    return {ours: Rule(prefix + theirs) for ours, theirs in names.items()}


def _experts(names: Mapping[str, str], router: str) -> dict[str, Rule]:
    rules = {f"ffn.experts.{ours}": Rule(f"model.layers.{{layer}}.{theirs}") for ours, theirs in names.items()}
    return rules | {"ffn.router": Rule(f"model.layers.{{layer}}.{router}")}


_LAYER = "model.layers.{layer}."
LLAMA: dict[str, Rule] = {
    **_names("", {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}),
    **_names(
        _LAYER,
        {
            "attention.norm": "input_layernorm.weight",
            "attention.wq": "self_attn.q_proj.weight",
            "attention.wk": "self_attn.k_proj.weight",
            "attention.wv": "self_attn.v_proj.weight",
            "attention.wo": "self_attn.o_proj.weight",
            "attention.wq_bias": "self_attn.q_proj.bias",
            "attention.wk_bias": "self_attn.k_proj.bias",
            "attention.wv_bias": "self_attn.v_proj.bias",
            "attention.wo_bias": "self_attn.o_proj.bias",
            "attention.q_norm": "self_attn.q_norm.weight",
            "attention.k_norm": "self_attn.k_norm.weight",
            "ffn.norm": "post_attention_layernorm.weight",
            "ffn.gate": "mlp.gate_proj.weight",
            "ffn.up": "mlp.up_proj.weight",
            "ffn.down": "mlp.down_proj.weight",
            "ffn.gate_bias": "mlp.gate_proj.bias",
            "ffn.up_bias": "mlp.up_proj.bias",
            "ffn.down_bias": "mlp.down_proj.bias",
        },
    ),
}
# Norms behind attention and feed-forward layer: OLMo 2 has only those, Gemma those before them too.
POST_NORMS: Rules = LLAMA | _names(
    _LAYER,
    {
        "attention.post_norm": "post_attention_layernorm.weight",
        "ffn.norm": "pre_feedforward_layernorm.weight",
        "ffn.post_norm": "post_feedforward_layernorm.weight",
    },
)
_BLOCK_SPARSE = "block_sparse_moe.experts.{expert}"
MIXTRAL: Rules = LLAMA | _experts(
    {"gate": f"{_BLOCK_SPARSE}.w1.weight", "up": f"{_BLOCK_SPARSE}.w3.weight", "down": f"{_BLOCK_SPARSE}.w2.weight"},
    "block_sparse_moe.gate.weight",
)
QWEN3_MOE: Rules = LLAMA | _experts(
    {name: f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")}, "mlp.gate.weight"
)
_QKV = ("attention.wq", "attention.wk", "attention.wv")
_QKV_BIAS = tuple(f"{name}_bias" for name in _QKV)
_H = "transformer.h.{layer}."
GPT2: Rules = {
    **_names(
        "transformer.",
        {
            "embedding": "wte.weight",
            "positions": "wpe.weight",
            "norm": "ln_f.weight",
            "norm_bias": "ln_f.bias",
        },
    ),
    "head": Rule("lm_head.weight"),
    **_names(
        _H,
        {
            "attention.norm": "ln_1.weight",
            "attention.norm_bias": "ln_1.bias",
            "attention.wo_bias": "attn.c_proj.bias",
            "ffn.norm": "ln_2.weight",
            "ffn.norm_bias": "ln_2.bias",
            "ffn.up_bias": "mlp.c_fc.bias",
            "ffn.down_bias": "mlp.c_proj.bias",
        },
    ),
    **{name: Rule(f"{_H}attn.c_attn.weight", is_transposed=True, among=_QKV) for name in _QKV},
    **{name: Rule(f"{_H}attn.c_attn.bias", among=_QKV_BIAS) for name in _QKV_BIAS},
    "attention.wo": Rule(f"{_H}attn.c_proj.weight", is_transposed=True),
    "ffn.up": Rule(f"{_H}mlp.c_fc.weight", is_transposed=True),
    "ffn.down": Rule(f"{_H}mlp.c_proj.weight", is_transposed=True),
}


@dataclass(frozen=True)
class Piece:
    """Region `mine` of our parameter `name` holds the values of region `yours` of their tensor `theirs`.

    is_stacked: ours has a dimension more in front, of size 1 here.
    """

    name: str
    mine: Box
    theirs: str
    yours: Box
    is_transposed: bool = False
    is_stacked: bool = False

    def to_theirs(self, part: Box) -> Box:
        """Where a part of `mine` lies in their tensor."""
        offset = [a - b for a, b in zip(part.start, self.mine.start, strict=True)]
        shape = list(part.shape)
        if self.is_stacked:
            offset, shape = offset[1:], shape[1:]
        if self.is_transposed:
            offset, shape = offset[::-1], shape[::-1]
        start = tuple(a + b for a, b in zip(offset, self.yours.start, strict=True))
        return Box(start, tuple(shape))

    def to_ours(self, part: Box) -> Box:
        """Where a part of `yours` lies in our parameter."""
        offset = [a - b for a, b in zip(part.start, self.yours.start, strict=True)]
        shape = list(part.shape)
        if self.is_transposed:
            offset, shape = offset[::-1], shape[::-1]
        if self.is_stacked:
            offset, shape = [0, *offset], [1, *shape]
        start = tuple(a + b for a, b in zip(offset, self.mine.start, strict=True))
        return Box(start, tuple(shape))

    def as_theirs(self, ours: Tensor) -> Tensor:
        """A view of our region's tensor in the form of theirs."""
        tensor = ours.squeeze(0) if self.is_stacked else ours
        return tensor.t() if self.is_transposed else tensor

    def as_ours(self, theirs: Tensor) -> Tensor:
        """A view of their region's tensor in the form of ours."""
        tensor = theirs.t() if self.is_transposed else theirs
        return tensor.unsqueeze(0) if self.is_stacked else tensor


@dataclass(frozen=True)
class Layout:
    """All pieces of one model, by our name and by theirs; together they cover every tensor exactly."""

    ours: dict[str, list[Piece]]
    theirs: dict[str, list[Piece]]

    def shape(self, theirs: str) -> tuple[int, ...]:
        """Of one of their tensors."""
        ends = [[a + n for a, n in zip(p.yours.start, p.yours.shape, strict=True)] for p in self.theirs[theirs]]
        return tuple(max(dimension) for dimension in zip(*ends, strict=True))


def layout(table: ParamTable, rules: Rules) -> Layout:
    """The pieces of a model. In their files tied weights are written once too, under the embedding's name.

    Raises:
        ValueError: the family has no name for a parameter of this model.
    """
    ours: dict[str, list[Piece]] = {}
    theirs: dict[str, list[Piece]] = {}
    for facts in table.owned():
        ours[facts.name] = _pieces(table, rules, facts.name)
        for piece in ours[facts.name]:
            theirs.setdefault(piece.theirs, []).append(piece)
    return Layout(ours, theirs)


def _pieces(table: ParamTable, rules: Rules, name: str) -> list[Piece]:
    block, layer, rest = _split(name)
    if rest not in rules:
        raise ValueError(f"{name}: this family has no such weight")
    rule, shape = rules[rest], table[name].shape
    if "{expert}" in rule.theirs:
        yours = Box.whole(shape[1:])
        return [
            Piece(name, Box((e, *yours.start), (1, *yours.shape)), rule.theirs.format(layer=layer, expert=e), yours,
                  rule.is_transposed, is_stacked=True)
            for e in range(shape[0])
        ]  # fmt: skip
    before = rule.among[: rule.among.index(rest)] if rule.among else ()
    start = [sum(table[block + other].shape[0] for other in before), *[0] * (len(shape) - 1)]
    yours = Box(tuple(start), shape)
    if rule.is_transposed:
        yours = Box(yours.start[::-1], yours.shape[::-1])
    return [Piece(name, Box.whole(shape), rule.theirs.format(layer=layer), yours, rule.is_transposed)]


def _split(name: str) -> tuple[str, str, str]:
    """("blocks.3.", "3", "attention.wq") of blocks.3.attention.wq; ("", "", name) of what is no block's."""
    if not name.startswith("blocks."):
        return "", "", name
    _, layer, rest = name.split(".", 2)
    return f"blocks.{layer}.", layer, rest
