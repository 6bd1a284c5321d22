"""Attention over several ranks against one: outputs and gradients, and what is not computed."""

from __future__ import annotations

import pytest
import torch
from stoker.conf.layout import Layout
from stoker.conf.schema import ContextMethod
from stoker.kernels.reference import attention
from stoker.train.data.dataset import Batch
from stoker.train.grid import form
from stoker.train.parallel import ring
from stoker.train.parallel.context import ContextAxis, cut_rows

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 48, 4, 2, 8
# Documents that end within chunks, at their borders, and go on over several; the second row is one document and a bit.
DOCUMENTS = ((5, 7, 12, 1, 20, 3), (45, 3))
CASES = {
    "causal": {},
    "documents": {"documents": DOCUMENTS},
    "documents one by one": {"documents": DOCUMENTS, "short": 0},
    "documents and window one by one": {"documents": DOCUMENTS, "short": 0, "window": 9, "softcap": 0.9},
    "window": {"window": 7},
    "wide window": {"window": 31},
    "softcap": {"softcap": 0.8},
    "scale": {"scale": 0.9},
    "all": {"documents": DOCUMENTS, "window": 9, "softcap": 1.5, "scale": 0.7},
    "one key head": {"kv": 1},
    "as many key heads": {"kv": 4, "documents": DOCUMENTS},
    "twelve heads on six": {"heads": 12, "kv": 6, "window": 20},
    "half precision": {"documents": DOCUMENTS, "dtype": "bfloat16"},
}


def make_batch(documents=None, length=LENGTH):
    tokens = torch.arange(ROWS * length).view(ROWS, length)
    doc_ids, positions = None, torch.arange(length).repeat(ROWS, 1)
    if documents is not None:
        lengths = [torch.tensor(d) for d in documents]
        doc_ids = torch.stack([torch.repeat_interleave(torch.arange(len(d)), d) for d in lengths])
        positions = torch.stack([torch.cat([torch.arange(n) for n in d]) for d in documents])
    return Batch(tokens, tokens + 1, positions, doc_ids, torch.tensor([3, 8]))


def make_axis(grid, method):
    return ContextAxis(grid.context, ContextMethod(method), attention)


def case_errors(axis, documents=None, heads=HEADS, kv=KV_HEADS, dtype="float64", short=16, **options):
    """Largest differences between this rank's part and one process: out, dq, dk, dv."""
    ring.SHORT_DOCUMENT = short
    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    whole = [torch.randn(ROWS, LENGTH, n, WIDTH).to(kind).requires_grad_() for n in (heads, kv, kv)]
    upstream = torch.randn(ROWS, LENGTH, heads, WIDTH).to(kind)
    batch = make_batch(documents)
    want_out = attention(*whole, doc_ids=batch.doc_ids, **options)
    want = (want_out, *torch.autograd.grad(want_out, whole, upstream))
    part = cut_rows(batch, axis.method, axis.comm.rank, axis.comm.size)
    own = part.part.indices
    local = [t.detach()[:, own].requires_grad_() for t in whole]
    out = axis.attention(*local, part, **options)
    found = (out, *torch.autograd.grad(out, local, upstream[:, own]))
    assert all(f.dtype == kind for f in found)
    return [(f - w[:, own]).abs().max().item() for f, w in zip(found, want, strict=True)]


def all_cases(member, methods):
    grid = form(member, Layout(context=member.world_size))
    errors = {
        f"{method} {name}": case_errors(make_axis(grid, method), **case)
        for method in methods
        for name, case in CASES.items()
    }
    grid.close()
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(run_ranks, size):
    for errors in run_ranks(size, all_cases, methods=["ring", "ulysses"]):
        assert len(errors) == 2 * len(CASES)
        for name, differences in errors.items():
            assert max(differences) < (0.07 if "half" in name else 1e-12), (name, differences)


def counted_pairs(member, cases):
    """How many of the 4 blocks per turn are computed, by case and turn."""
    grid = form(member, Layout(context=member.world_size))
    calls = []
    forward, ring.block_forward = ring.block_forward, lambda *a: calls.append(0) or forward(*a)
    counts = []
    for case in cases:
        calls.clear()
        case_errors(make_axis(grid, "ring"), **case)
        counts.append(len(calls))
    grid.close()
    return counts


def test_blocks_that_nobody_sees_are_not_computed(run_ranks):
    # Of 8 x 8 blocks 36 are not in the future: 9 a rank. A window of 6, as long as a chunk, leaves each chunk its own
    # and the one before. Documents of whole chunks leave each chunk its own. One by one, documents of 15 and 33 tokens
    # in the first row and one of 48 in the second make: 18 blocks of chunks that are of one document each in both rows,
    # 10 of the second row alone, and with chunk 2, where the border is, 9 of the first row and 8 of the second.
    chunks, mixed = ((6,) * 8,) * 2, ((15, 33), (48,))
    cases = [{}, {"window": 6}, {"documents": chunks}, {"documents": mixed, "short": 0}]
    counts = run_ranks(4, counted_pairs, cases=cases)
    assert [c[0] for c in counts] == [9, 9, 9, 9]
    assert sum(c[1] for c in counts) == 8 + 7
    assert [c[2] for c in counts] == [2, 2, 2, 2]
    assert sum(c[3] for c in counts) == 18 + 10 + 9 + 8


@pytest.mark.parametrize(("method", "own"), [("ring", [*range(12), *range(36, 48)]), ("ulysses", [*range(24)])])
def test_a_rank_gets_its_tokens_with_positions_and_numbers_of_the_whole_row(method, own):
    whole = make_batch(DOCUMENTS)
    first, second = (cut_rows(whole, ContextMethod(method), rank, 2) for rank in range(2))
    assert first.tokens[1].tolist() == [48 + i for i in own]
    assert first.targets[1].tolist() == [49 + i for i in own]
    assert torch.equal(first.positions, whole.positions[:, own])
    assert torch.equal(first.doc_ids, whole.doc_ids[:, own])
    assert first.token_numbers[1].tolist() == [8 * 48 + i for i in own]
    assert sorted([*first.tokens[1].tolist(), *second.tokens[1].tolist()]) == list(range(48, 96))


def test_the_rows_of_a_cut_batch_are_cut_alike():
    whole = make_batch(DOCUMENTS)
    for row, part in enumerate(cut_rows(whole, ContextMethod.ring, 1, 2).split(2)):
        alone = cut_rows(whole.split(2)[row], ContextMethod.ring, 1, 2)
        assert torch.equal(part.token_numbers, alone.token_numbers)
        assert torch.equal(part.part.doc_ids, alone.part.doc_ids)
        assert part.part.starts == alone.part.starts


@pytest.mark.parametrize(("method", "length", "parts"), [("ring", 46, 4), ("ulysses", 47, 2)])
def test_rows_that_do_not_divide_are_refused(method, length, parts):
    with pytest.raises(ValueError, match=f"rows of {length} tokens do not divide into {parts} parts"):
        cut_rows(make_batch(length=length), ContextMethod(method), 0, 2)
