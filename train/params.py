"""The parameter table: names and facts of every parameter of a model, never tensors.

Owns: global shapes, roles, how a parameter is initialised, what it is tied to, how it is cut over the grid. Whoever
handles parameters one by one (initialisation, reduction, norm, optimizer, checkpoint, counting) reads them here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod, sqrt

from torch import Tensor, nn

from ..conf.schema import ModelConfig, QkNorm
from .box import Box
from .grid import Grid


class Role(Enum):
    MATRIX = "matrix"
    NORM = "norm"
    EMBEDDING = "embedding"


@dataclass(frozen=True)
class ParamFacts:
    """One logical parameter. `name` is also its path in the model (`blocks.3.attention.wq`).

    init_std: standard deviation of its initial normal distribution; 0 starts it at one (norms).
    shard_dim, shard_axis: the dimension cut over a grid axis, None if every rank holds all of it.
    tied_to: the parameter whose tensor this one shares; such a parameter has no storage, state or gradient of its own.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    init_std: float
    shard_dim: int | None = None
    shard_axis: str | None = None
    tied_to: str | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies: matrices and embeddings, not norms."""
        return self.role is not Role.NORM


class ParamTable:
    """All parameters of one model in the order of the forward pass."""

    def __init__(self, facts: list[ParamFacts]) -> None:
        self._facts = {f.name: f for f in facts}
        assert len(self._facts) == len(facts)
        assert all(f.tied_to is None or f.tied_to in self._facts for f in facts)

    def __getitem__(self, name: str) -> ParamFacts:
        return self._facts[name]

    def __iter__(self) -> Iterator[ParamFacts]:
        return iter(self._facts.values())

    def owned(self) -> list[ParamFacts]:
        """Those with storage of their own: each weight of the model once."""
        return [f for f in self if f.tied_to is None]

    @property
    def numel(self) -> int:
        """Weights in the whole model, tied ones once."""
        return sum(f.numel for f in self.owned())

    def uses(self, name: str) -> int:
        """How many contributions to its gradient one backward pass makes."""
        return 1 + sum(f.tied_to == name for f in self)

    def local(self, model: nn.Module, name: str) -> Tensor:
        """This rank's part of a parameter: the only way from a name to a tensor."""
        tensor = model.get_parameter(self._facts[name].tied_to or name)
        return tensor

    def box(self, name: str, grid: Grid) -> Box:
        """Where this rank's part lies in the whole parameter.

        Raises:
            ValueError: the cut dimension does not divide by the size of its axis.
        """
        facts = self._facts[name]
        whole = Box.whole(facts.shape)
        if facts.shard_dim is None or facts.shard_axis is None:
            return whole
        comm = grid.comms[facts.shard_axis]
        size, rank = comm.size, comm.rank
        length = facts.shape[facts.shard_dim]
        if length % size:
            raise ValueError(f"{name}: dimension {facts.shard_dim} of {facts.shape} does not divide by {size} ranks")
        start, shape = list(whole.start), list(whole.shape)
        start[facts.shard_dim], shape[facts.shard_dim] = rank * (length // size), length // size
        return Box(tuple(start), tuple(shape))

    def check(self, model: nn.Module, grid: Grid) -> None:
        """The model's parameters are exactly the table's, each of its local shape (an invariant of ours)."""
        found = {name: tuple(p.shape) for name, p in model.named_parameters()}
        expected = {f.name: self.box(f.name, grid).shape for f in self.owned()}
        assert found == expected, f"model and parameter table differ: {set(found.items()) ^ set(expected.items())}"


def head_dim(config: ModelConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_heads


def decoder_table(config: ModelConfig) -> ParamTable:
    """The parameters of model.Decoder. Matrices are [out, in], as torch.nn.functional.linear takes them."""
    hidden, ffn, width = config.hidden_size, config.ffn_size, head_dim(config)
    queries, keys = config.num_heads * width, config.num_kv_heads * width
    std = config.init_std
    # What is added to the residual stream is scaled down with depth, so that its variance does not grow with it
    # (Radford et al. 2019, GPT-2, section 2.3).
    residual_std = std / sqrt(2 * config.num_layers)

    def matrix(name: str, rows: int, columns: int, std: float = std) -> ParamFacts:
        return ParamFacts(name, (rows, columns), Role.MATRIX, std)

    def norm(name: str, size: int) -> ParamFacts:
        return ParamFacts(name, (size,), Role.NORM, 0.0)

    vocabulary = (config.vocab_size, hidden)
    facts = [ParamFacts("embedding", vocabulary, Role.EMBEDDING, std)]
    for i in range(config.num_layers):
        b = f"blocks.{i}"
        facts += [
            norm(f"{b}.attention.norm", hidden),
            matrix(f"{b}.attention.wq", queries, hidden),
            matrix(f"{b}.attention.wk", keys, hidden),
            matrix(f"{b}.attention.wv", keys, hidden),
        ]
        if config.qk_norm is QkNorm.head:
            facts += [norm(f"{b}.attention.q_norm", width), norm(f"{b}.attention.k_norm", width)]
        facts += [
            matrix(f"{b}.attention.wo", hidden, queries, residual_std),
            norm(f"{b}.ffn.norm", hidden),
            matrix(f"{b}.ffn.gate", ffn, hidden),
            matrix(f"{b}.ffn.up", ffn, hidden),
            matrix(f"{b}.ffn.down", hidden, ffn, residual_std),
        ]
    facts.append(norm("norm", hidden))
    tied_to = "embedding" if config.tied_embeddings else None
    facts.append(ParamFacts("head", vocabulary, Role.EMBEDDING if tied_to else Role.MATRIX, std, tied_to=tied_to))
    return ParamTable(facts)
