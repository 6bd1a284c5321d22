"""The parameter table: names and facts of every parameter of a model, never tensors.

Owns: global shapes, roles, how a parameter is initialised, what it is tied to, how it is cut over the grid. Whoever
handles parameters one by one (initialisation, reduction, norm, optimizer, checkpoint, counting) reads them here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import prod, sqrt

from torch import Tensor, nn

from ..conf.schema import Activation, ModelConfig, Norm, NormOrder, Positions, QkNorm
from .box import Box, Replica
from .grid import Grid
from .parallel.stages import StageSpec


class Role(Enum):
    MATRIX = "matrix"
    NORM = "norm"
    BIAS = "bias"
    EMBEDDING = "embedding"  # the output layer too, where both are one
    HEAD = "head"
    ROUTER = "router"


@dataclass(frozen=True)
class ParamFacts:
    """One logical parameter. `name` is also its path in the model (`blocks.3.attention.wq`).

    init_std, init_mean: of its initial normal distribution; 0 starts it at the mean everywhere (norms, biases).
    layer: the block it belongs to; None: to the first stage (embedding) or the last (is_output).
    tied_to: the parameter whose tensor this one shares; such a parameter has no storage, state or gradient of its own.
    shard_dim, shard_axis: the dimension cut over a grid axis, None if every rank of the stage holds all of it. Ranks
    get whole multiples of `unit`, the first ones one more where it does not divide.
    copies_axis: part of shard_axis whose ranks hold the same piece (key and value heads fewer than ranks).
    reduce_over: the axis whose ranks see different tokens, over which gradients are summed first.
    partial_over: axis over which they are summed then, because each rank has only a part of them.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    init_std: float
    layer: int | None = None
    is_output: bool = False
    tied_to: str | None = None
    shard_dim: int | None = None
    shard_axis: str | None = None
    unit: int = 1
    copies_axis: str | None = None
    reduce_over: str = "dense"
    partial_over: str | None = None
    init_mean: float = 0.0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies: matrices, routers and embeddings, not norms and biases."""
        return self.role not in (Role.NORM, Role.BIAS)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes over which ranks hold the same piece."""
        axes = [self.reduce_over]
        if self.reduce_over == "dense" and self.shard_axis != "tensor":
            axes.append("tensor")
        if self.copies_axis is not None:
            axes.append(self.copies_axis)
        if self.partial_over == "tied":
            axes.append("tied")
        return tuple(axes)

    def is_on(self, stage: StageSpec) -> bool:
        """Whether a stage uses it."""
        if self.layer is not None:
            return self.layer in stage.layers
        return stage.is_last if self.is_output else stage.is_first


class ParamTable:
    """All parameters of one model in the order of the forward pass; or those of a few stages, see `part`."""

    def __init__(self, facts: Iterable[ParamFacts], uses: dict[str, int] | None = None) -> None:
        self._facts = {f.name: f for f in facts}
        assert all(f.tied_to is None or f.tied_to in self._facts for f in self)
        self._uses = uses or {f.name: 1 + sum(g.tied_to == f.name for g in self) for f in self.owned()}

    def __getitem__(self, name: str) -> ParamFacts:
        return self._facts[name]

    def __iter__(self) -> Iterator[ParamFacts]:
        return iter(self._facts.values())

    def __contains__(self, name: str) -> bool:
        return name in self._facts

    def owned(self) -> list[ParamFacts]:
        """Those with storage of their own: each weight of the model once."""
        return [f for f in self if f.tied_to is None]

    @property
    def numel(self) -> int:
        """Weights in the whole model, tied ones once."""
        return sum(f.numel for f in self.owned())

    def uses(self, name: str) -> int:
        """How many contributions to its gradient one backward pass makes on a rank with these stages."""
        return self._uses[name]

    def part(self, stages: Iterable[StageSpec]) -> ParamTable:
        """The table of a rank with these stages. What a used parameter is tied to is in it, used there or not."""
        used = [f for stage in stages for f in self if f.is_on(stage)]
        names = [f.tied_to or f.name for f in used]
        kept = {f.name for f in used} | set(names)
        return ParamTable((f for f in self if f.name in kept), {name: names.count(name) for name in names})

    def local(self, model: nn.Module, name: str) -> Tensor:
        """This rank's part of a parameter: the only way from a name to a tensor."""
        return model.get_parameter(self._facts[name].tied_to or name)

    def box(self, name: str, grid: Grid) -> Box:
        """Where this rank's part lies in the whole parameter."""
        facts = self._facts[name]
        whole = Box.whole(facts.shape)
        if facts.shard_dim is None or facts.shard_axis is None:
            return whole
        size, rank = grid.comms[facts.shard_axis].size, grid.comms[facts.shard_axis].rank
        if facts.copies_axis is not None:
            copies = grid.comms[facts.copies_axis].size
            size, rank = size // copies, rank // copies
        units, rest = divmod(facts.shape[facts.shard_dim], facts.unit)
        assert rest == 0, f"{name}: dimension {facts.shard_dim} of {facts.shape} is not made of units of {facts.unit}"
        first, last = cut(units, size, rank), cut(units, size, rank + 1)
        start, shape = list(whole.start), list(whole.shape)
        start[facts.shard_dim], shape[facts.shard_dim] = first * facts.unit, (last - first) * facts.unit
        return Box(tuple(start), tuple(shape))

    def replica(self, name: str, grid: Grid, without: str | None = None) -> Replica:
        """Which of the holders of its piece this rank is; without: an axis over which pieces are cut further."""
        axes = tuple(axis for axis in self._facts[name].replica_axes if axis != without)
        index, count = 0, 1
        for axis in axes:
            comm = grid.comms[axis]
            index, count = index + comm.rank * count, count * comm.size
        return Replica(axes, index, count)

    def check(self, model: nn.Module, grid: Grid) -> None:
        """The model's parameters are exactly the table's, each of its local shape (an invariant of ours)."""
        found = {name: tuple(p.shape) for name, p in model.named_parameters()}
        expected = {f.name: self.box(f.name, grid).shape for f in self.owned()}
        assert found == expected, f"model and parameter table differ: {set(found.items()) ^ set(expected.items())}"


def cut(units: int, parts: int, index: int) -> int:
    """Where part `index` of `units` begins: sizes differ by at most one, larger parts first."""
    return index * (units // parts) + min(index, units % parts)


def head_dim(config: ModelConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_heads


def layer_window(config: ModelConfig, layer: int) -> int | None:
    """Tokens that a query of this layer sees, itself included; None: all before it."""
    is_global = config.global_every > 0 and (layer + 1) % config.global_every == 0
    return None if is_global else config.sliding_window or None


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Whether a layer is a mixture of experts."""
    return config.num_experts > 0 and layer >= config.dense_layers


class _Facts:
    """Makes the facts of one model's parameters.

    sequence: norms see only this rank's tokens of the residual stream (sequence parallelism). pipelined: the embedding
    and the output projection may lie on different ranks.
    """

    def __init__(self, config: ModelConfig, sequence: bool, pipelined: bool) -> None:
        self.config = config
        self._stream_partial_over = "tensor" if sequence else None
        self._tied_partial_over = "tied" if pipelined else None
        self._inner = ["up"] if config.activation is Activation.gelu else ["gate", "up"]
        # What is added to the stream is scaled down with depth, so that the stream's variance does not grow with it
        # (Radford et al. 2019, GPT-2, section 2.3).
        self._residual_std = config.init_std / sqrt(2 * config.num_layers)

    def norm(self, name: str, layer: int | None = None, is_output: bool = False) -> list[ParamFacts]:
        """Of the residual stream, or of what is added to it."""
        weight = ParamFacts(
            name,
            (self.config.hidden_size,),
            Role.NORM,
            0.0,
            layer,
            is_output,
            partial_over=self._stream_partial_over,
            init_mean=1.0 - self.config.norm_offset,
        )
        if self.config.norm is Norm.rmsnorm:
            return [weight]
        return [weight, replace(weight, name=f"{name}_bias", role=Role.BIAS, init_mean=0.0)]

    def head_norm(self, name: str, size: int, layer: int) -> ParamFacts:
        """Sees the heads of this rank only."""
        mean = 1.0 - self.config.norm_offset
        return ParamFacts(name, (size,), Role.NORM, 0.0, layer, partial_over="tensor", init_mean=mean)

    def heads_norm(self, like: ParamFacts, name: str) -> ParamFacts:
        """Over all heads together: one weight per output of the projection `like`, cut as that is."""
        mean = 1.0 - self.config.norm_offset
        return replace(like, name=name, shape=like.shape[:1], role=Role.NORM, init_std=0.0, init_mean=mean)

    def column(self, name: str, rows: int, columns: int, layer: int, unit: int = 1) -> ParamFacts:
        """A matrix whose outputs are cut."""
        std = self.config.init_std
        shape = (rows, columns)
        return ParamFacts(name, shape, Role.MATRIX, std, layer, shard_dim=0, shard_axis="tensor", unit=unit)

    def kv(self, name: str, rows: int, columns: int, layer: int, unit: int) -> ParamFacts:
        """A column-parallel matrix with fewer heads than ranks, perhaps."""
        return replace(self.column(name, rows, columns, layer, unit), copies_axis="kv", partial_over="kv")

    def row(self, name: str, rows: int, columns: int, layer: int, unit: int = 1) -> ParamFacts:
        """A matrix whose inputs are cut; its output is added to the residual stream."""
        std, shape = self._residual_std, (rows, columns)
        return ParamFacts(name, shape, Role.MATRIX, std, layer, shard_dim=1, shard_axis="tensor", unit=unit)

    def bias(self, matrix: ParamFacts) -> ParamFacts:
        """Of a matrix's outputs: cut as they are, or whole and added once, by each rank to its tokens of the stream."""
        bias = replace(matrix, name=f"{matrix.name}_bias", shape=matrix.shape[:1], role=Role.BIAS, init_std=0.0)
        if matrix.shard_dim == 0:
            return bias
        return replace(bias, shard_dim=None, shard_axis=None, unit=1, partial_over=self._stream_partial_over)

    def positions(self) -> ParamFacts:
        """The learned embedding of positions, whole on every rank of the first stage."""
        shape = (self.config.max_positions, self.config.hidden_size)
        partial = self._stream_partial_over
        return ParamFacts("positions", shape, Role.EMBEDDING, self.config.init_std, partial_over=partial)

    def vocabulary(self, name: str, is_output: bool) -> ParamFacts:
        c = self.config
        is_tied = c.tied_embeddings
        return ParamFacts(
            name,
            (c.vocab_size, c.hidden_size),
            Role.HEAD if is_output and not is_tied else Role.EMBEDDING,
            c.init_std,
            is_output=is_output,
            tied_to="embedding" if is_output and is_tied else None,
            shard_dim=0,
            shard_axis="tensor",
            partial_over=self._tied_partial_over if is_tied else None,
        )

    def around(self, branch: str, layer: int, inside: list[ParamFacts]) -> list[ParamFacts]:
        """A branch of a block between its norms."""
        order = self.config.norm_order
        before = [] if order is NormOrder.post else self.norm(f"{branch}.norm", layer)
        behind = [] if order is NormOrder.pre else self.norm(f"{branch}.post_norm", layer)
        return [*before, *inside, *behind]

    def attention(self, name: str, layer: int) -> list[ParamFacts]:
        c, width = self.config, head_dim(self.config)
        queries, keys, hidden = c.num_heads * width, c.num_kv_heads * width, c.hidden_size
        wq = self.column(f"{name}.wq", queries, hidden, layer, width)
        wk = self.kv(f"{name}.wk", keys, hidden, layer, width)
        wv = self.kv(f"{name}.wv", keys, hidden, layer, width)
        wo = self.row(f"{name}.wo", hidden, queries, layer, width)
        facts = [wq, wk, wv]
        if c.qkv_bias:
            facts += [self.bias(matrix) for matrix in (wq, wk, wv)]
        if c.qk_norm is QkNorm.head:
            facts += [self.head_norm(f"{name}.{n}_norm", width, layer) for n in ("q", "k")]
        if c.qk_norm is QkNorm.full:
            facts += [self.heads_norm(wq, f"{name}.q_norm"), self.heads_norm(wk, f"{name}.k_norm")]
        return [*facts, wo, *([self.bias(wo)] if c.linear_bias else [])]

    def feed_forward(self, name: str, layer: int, width: int) -> list[ParamFacts]:
        c = self.config
        matrices = [self.column(f"{name}.{n}", width, c.hidden_size, layer) for n in self._inner]
        matrices.append(self.row(f"{name}.down", c.hidden_size, width, layer))
        if not c.linear_bias:
            return matrices
        return [facts for matrix in matrices for facts in (matrix, self.bias(matrix))]

    def experts(self, name: str, layer: int) -> list[ParamFacts]:
        """A router that every rank holds, which sees the tokens of its rank; experts, each whole on one rank of their
        axis; the expert of all tokens, cut as a dense feed-forward layer is."""
        c = self.config
        hidden, width = c.hidden_size, c.expert_ffn_size or c.ffn_size
        partial = self._stream_partial_over
        router = ParamFacts(
            f"{name}.router", (c.num_experts, hidden), Role.ROUTER, c.init_std, layer, partial_over=partial
        )
        up = ParamFacts(
            f"{name}.experts.up",
            (c.num_experts, width, hidden),
            Role.MATRIX,
            c.init_std,
            layer,
            shard_dim=0,
            shard_axis="expert",
            reduce_over="expert_data",
        )
        inner = [replace(up, name=f"{name}.experts.{n}") for n in self._inner]
        down = replace(
            up, name=f"{name}.experts.down", shape=(c.num_experts, hidden, width), init_std=self._residual_std
        )
        shared = self.feed_forward(f"{name}.shared", layer, c.shared_expert_ffn_size)
        return [router, *inner, down, *(shared if c.shared_expert_ffn_size else [])]


def decoder_table(config: ModelConfig, sequence: bool = False, pipelined: bool = False) -> ParamTable:
    """The parameters of model.Decoder. Matrices are [out, in], as torch.nn.functional.linear takes them.

    sequence, pipelined: whether the layout has sequence parallelism, and more than one pipeline rank.
    """
    make = _Facts(config, sequence, pipelined)
    facts = [make.vocabulary("embedding", is_output=False)]
    if config.positions is Positions.learned:
        facts.append(make.positions())
    for i in range(config.num_layers):
        attention, ffn = f"blocks.{i}.attention", f"blocks.{i}.ffn"
        facts += make.around(attention, i, make.attention(attention, i))
        inside = make.experts(ffn, i) if has_experts(config, i) else make.feed_forward(ffn, i, config.ffn_size)
        facts += make.around(ffn, i, inside)
    facts += make.norm("norm", is_output=True)
    facts.append(make.vocabulary("head", is_output=True))
    return ParamTable(facts)
