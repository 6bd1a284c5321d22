"""csrc/multi_copy.cu on the CPU: the bits of the references."""

import pytest
import torch
from emulated_runs import only_blocks, sparse
from stoker.kernels import reference
from torch.library import opcheck

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (7, 33), (0, 4), (64,), (3, 11001), (16384,)]


@pytest.fixture
def scale(emulated):
    from stoker.kernels.native.multi_copy import scale

    return scale


@pytest.fixture
def cast_copy(emulated):
    from stoker.kernels.native.multi_copy import cast_copy

    return cast_copy


def many(count=500):
    """More than one launch takes, ragged, every dtype; then odd strides, addresses and values."""
    tensors = [torch.randn(1 + 7 * i % 90).to(DTYPES[i % 3]) for i in range(count)]
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, -0.0])
    return [*tensors, torch.randn(6, 100).t(), torch.randn(65)[1:], torch.empty(0), odd, odd.bfloat16()]


def same(found, wanted):
    return all(torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("factor", [0.37, 1e30, torch.tensor(0.37), torch.tensor([0.37], dtype=torch.float64)])
def test_scale_gives_the_bits_of_the_reference(scale, factor):
    ours = [torch.randn(s).to(d) for s in SHAPES for d in DTYPES] + many()
    theirs = [t.clone() for t in ours]
    scale(ours, factor)
    reference.scale(theirs, factor)
    assert same(ours, theirs)


def test_scale_keeps_neighbours(scale):
    storage = torch.ones(6, 6)
    scale([storage[:, ::2]], 2.0)
    assert storage[0].tolist() == [2.0, 1.0] * 3


@pytest.mark.parametrize("to", DTYPES)
def test_cast_copy_gives_the_bits_of_the_reference(cast_copy, to):
    sources = [torch.randn(s).to(d) for s in SHAPES for d in DTYPES] + many()
    targets, wanted = ([torch.full_like(s, 3.0, dtype=to) for s in sources] for _ in range(2))
    cast_copy(targets, sources)
    reference.cast_copy(wanted, sources)
    assert same(targets, wanted)


def test_cast_copy_to_strided_and_unaligned(cast_copy):
    storage, flat, source = torch.zeros(6, 6, dtype=torch.bfloat16), torch.zeros(19), torch.randn(6, 3)
    cast_copy([storage[:, ::2], flat[1:]], [source, source.half().reshape(-1)])
    assert torch.equal(storage[:, ::2], source.bfloat16())
    assert not storage[:, 1::2].any()
    assert torch.equal(flat[1:], source.half().float().reshape(-1))


def test_past_two_to_the_31(scale, cast_copy):
    n = 2**31 + 16384 * 2 + 5
    x, y = sparse((n,), torch.bfloat16), sparse((n,), torch.float32)
    x[-3:] = 1.0
    with only_blocks(-1):
        scale([x], 2.0)
        cast_copy([y], [x])
    assert x[-4:].tolist() == y[-4:].tolist() == [0.0, 2.0, 2.0, 2.0]


def test_opcheck(scale, cast_copy):
    tensors = [torch.randn(5), torch.randn(2, 3).bfloat16()]
    ops = torch.ops.stoker
    opcheck(ops.scale, (tensors, None, 0.5))
    opcheck(ops.scale, (tensors, torch.tensor(0.5), 1.0))
    opcheck(ops.cast_copy, ([torch.zeros(5).half(), torch.zeros(2, 3)], tensors))


def test_compiles_to_one_graph(scale, cast_copy):
    def both(x, y, factor):
        scale([x], factor)
        cast_copy([y], [x])

    x, y = torch.randn(5), torch.zeros(5, dtype=torch.bfloat16)
    wanted = (x * 0.5).bfloat16()
    torch.compile(both, fullgraph=True, backend="aot_eager")(x, y, torch.tensor(0.5))
    assert torch.equal(y, wanted)


def test_empty_lists_and_mistakes(scale, cast_copy):
    scale([], 2.0)
    cast_copy([], [])
    for call, message in (
        (lambda: scale([torch.ones(2)], torch.ones(2)), "factor has shape"),
        (lambda: scale([torch.ones(2).double()], 2.0), r"tensors\[0\] is float64; .*kernels\.scale=reference"),
        (lambda: scale([torch.ones(2, dtype=torch.int32)], 2.0), r"tensors\[0\] is torch.int32"),
        (lambda: cast_copy([torch.ones(2)], []), "0 sources for 1 targets"),
        (lambda: cast_copy([torch.ones(2)], [torch.ones(3)]), r"at 0 \(3,\) into \(2,\)"),
        (lambda: cast_copy([torch.ones(2)], [torch.ones(2).double()]), r"sources\[0\] is float64; .*=reference"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
