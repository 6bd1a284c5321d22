"""Rules for the layout of a run's processes: which sizes fit together, the model and the batch.

Owns: `parallel_rules`, one generator per part of the trainer. A combination that cannot work is told here, never by a
collective deep inside a run. Numbers of ranks and groups come from layout.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .checks_pipeline import pipeline_rules
from .layout import Layout, LayoutError
from .pipeline import SCHEDULES, stages_per_rank
from .problems import Problem
from .schema import Config, ContextMethod, DataParallel


def parallel_rules(config: Config) -> Iterator[Problem]:
    """Where a range rule has found a size that is not positive, nothing more is said."""
    model, train = config.model, config.train
    if not _sizes_are_positive(config) or min(model.num_heads, train.micro_batch, config.data.seq_len) < 1:
        return
    for rule in (_layout, _heads, _widths, _tokens, _context, _sharing, _nodes):
        yield from rule(config)
    yield from pipeline_rules(config, layout_of(config))


def layout_of(config: Config) -> Layout | None:
    """The layout of the whole allocation; None where the sizes do not fit, which is a problem of its own."""
    if not _sizes_are_positive(config):
        return None
    try:
        return Layout.of(config, _processes(config))
    except LayoutError:
        return None


def _processes(config: Config) -> int:
    return config.cluster.nodes * config.cluster.procs_per_node


def _sizes_are_positive(config: Config) -> bool:
    p = config.parallel
    sizes = (p.tensor, p.pipeline, p.context, p.expert, config.model.num_kv_heads, _processes(config))
    return min(sizes) >= 1 and p.data_shard >= 0


def _layout(config: Config) -> Iterator[Problem]:
    try:
        Layout.of(config, _processes(config))
    except LayoutError as error:
        yield error.problem


def _heads(config: Config) -> Iterator[Problem]:
    """Query heads are cut over `tensor`; key and value heads too, or each is held by as many ranks as the others."""
    tensor, heads, groups = config.parallel.tensor, config.model.num_heads, config.model.num_kv_heads
    if heads % groups:
        return  # told by the rule for the model
    works = [t for t in range(1, heads + 1) if heads % t == 0 and (groups % t == 0 or t % groups == 0)]
    if tensor in works:
        return
    if heads % tensor:
        reason = f"does not divide model.num_heads={heads}"
    else:
        reason = f"neither divides model.num_kv_heads={groups} nor is a multiple of it"
    yield Problem("parallel.tensor", str(tensor), f"{reason}; {_that_work(works, tensor)}")


def _widths(config: Config) -> Iterator[Problem]:
    """Vocabulary and feed-forward layers need not divide, but every rank needs a row."""
    tensor = config.parallel.tensor
    for name, size in (("vocab_size", config.model.vocab_size), ("ffn_size", config.model.ffn_size)):
        if 0 < size < tensor:
            message = f"is cut over parallel.tensor={tensor} ranks; expected at least {tensor}"
            yield Problem(f"model.{name}", str(size), message)


def _tokens(config: Config) -> Iterator[Problem]:
    """Sequence parallelism cuts the flat tokens of a micro-batch evenly."""
    p, batch, seq_len = config.parallel, config.train.micro_batch, config.data.seq_len
    if p.tensor == 1 or not p.sequence or seq_len % p.context:
        return
    tokens = batch * seq_len // p.context
    if tokens % p.tensor:
        share = f"train.micro_batch x data.seq_len / parallel.context = {batch} x {seq_len} / {p.context} = {tokens}"
        message = f"cuts the tokens of a micro-batch over parallel.tensor={p.tensor} ranks, which does not divide"
        yield Problem("parallel.sequence", "true", f"{message} {share}; change one of them, or set it to false")


def _context(config: Config) -> Iterator[Problem]:
    """The ring cuts rows into two chunks per rank; Ulysses into one part, and the heads of a tensor rank too."""
    p, seq_len, heads = config.parallel, config.data.seq_len, config.model.num_heads
    if p.context == 1:
        return
    parts = 2 * p.context if p.context_method is ContextMethod.ring else p.context
    if seq_len % parts:
        below, above = seq_len // parts * parts, -(-seq_len // parts) * parts
        near = " or ".join(str(n) for n in (below, above) if n)
        message = f"parallel.context={p.context} cuts it into {parts} parts, which do not divide it; nearest that work"
        yield Problem("data.seq_len", str(seq_len), f"{message}: {near}")
    if p.context_method is ContextMethod.ulysses and heads % p.tensor == 0 and heads // p.tensor % p.context:
        share = f"model.num_heads={heads}" + (f" / parallel.tensor={p.tensor} = {heads // p.tensor}" * (p.tensor > 1))
        message = (
            f"ulysses cuts heads over ranks, and it does not divide {share}; context_method=ring has no such limit"
        )
        yield Problem("parallel.context", str(p.context), message)


def _sharing(config: Config) -> Iterator[Problem]:
    """What goes with fully sharded weights only, and what does not go with them."""
    p = config.parallel
    is_sharded = p.data in (DataParallel.fsdp, DataParallel.hsdp)
    if p.data_shard > 0 and p.data is not DataParallel.hsdp:
        yield Problem("parallel.data_shard", str(p.data_shard), f"is for parallel.data=hsdp; data is {p.data.value}")
    if p.reduce_each and not is_sharded:
        message = f"is for parallel.data=fsdp and hsdp, which shard gradients; data is {p.data.value}"
        yield Problem("parallel.reduce_each", "true", message)
    schedule = SCHEDULES.get(p.pipeline_schedule)
    if p.reduce_each and p.pipeline > 1 and schedule is not None and (schedule.is_split or stages_per_rank(p) > 1):
        message = (
            "a rank's gradients are complete micro-batch by micro-batch only with one stage per rank and a backward "
            f"pass that is not split; set it to false, or take 1f1b or gpipe instead of {p.pipeline_schedule}"
        )
        yield Problem("parallel.reduce_each", "true", message)
    layout = layout_of(config)
    has_shards = is_sharded and layout is not None and layout.data_shard > 1
    if has_shards and p.pipeline > 1 and config.model.tied_embeddings and schedule is not None and schedule.is_v:
        message = (
            f"parallel.pipeline_schedule={p.pipeline_schedule} has the first and the last stage on one rank, and with "
            "model.tied_embeddings they share a weight, which sharded ones cannot; zero1, ddp or interleaved_zb can"
        )
        yield Problem("parallel.data", p.data.value, message)


def _nodes(config: Config) -> Iterator[Problem]:
    """Ranks of the tensor axis exchange activations several times per layer, and wait for them."""
    tensor, cluster = config.parallel.tensor, config.cluster
    if tensor == 1 or cluster.nodes == 1 or cluster.procs_per_node % tensor == 0:
        return
    message = (
        f"ranks that share each layer lie on several nodes, as it does not divide "
        f"cluster.procs_per_node={cluster.procs_per_node}, and wait for the network in every layer; choose a divisor, "
        "and parallel.pipeline or parallel.data=fsdp for the rest"
    )
    yield Problem("parallel.tensor", str(tensor), message, "warning")


def _that_work(values: Sequence[int], wanted: int) -> str:
    """The values below and above `wanted`."""
    below, above = [v for v in values if v < wanted], [v for v in values if v > wanted]
    near = [str(v) for v in (*below[-1:], *above[:1])]
    return f"nearest that work: {' or '.join(near)}"
