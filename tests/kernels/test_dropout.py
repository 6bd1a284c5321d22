import itertools

import pytest
import torch
from stoker.kernels.philox import philox4x32
from stoker.kernels.reference import dropout

# tests/kat_vectors of Random123 (D. E. Shaw Research), the lines "philox4x32 10": counter, key, output
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, output):
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == output


def address(seed=1, step=2, site=3):
    return {"seed": seed, "step": step, "site": site}


def rows_of(batch, length, first_sample=0):
    return (torch.arange(first_sample, first_sample + batch)[:, None] * length + torch.arange(length)).long()


def test_the_documented_address_picks_the_word():
    row, n_cols, seed = 2**33 + 5, 10, (0xA4093822 << 32) | 0x299F31D0
    kept = dropout(torch.ones(1, n_cols), 0.5, seed, 7, 9, torch.tensor([row]))[0] != 0
    for column in range(n_cols):
        block = row * 3 + column // 4
        counter = (block & 0xFFFFFFFF, block >> 32, 7, 9)
        words = philox4x32(tuple(torch.tensor(c) for c in counter), (0x299F31D0, 0xA4093822))
        assert bool(kept[column]) == (int(words[column % 4]) >= 2**31)


def test_golden_mask():
    kept = dropout(torch.ones(2, 9), 0.5, **address(), rows=torch.tensor([0, 1])) != 0
    assert kept.int().tolist() == [[0, 1, 0, 0, 1, 1, 0, 0, 1], [1, 0, 1, 1, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate_and_scale(p):
    out = dropout(torch.ones(200, 100), p, **address(), rows=torch.arange(200))
    kept = out != 0
    assert abs(kept.float().mean().item() - (1 - p)) < 0.01
    assert out[kept].unique().tolist() == pytest.approx([1 / (1 - p)])


def test_mask_does_not_depend_on_how_the_tensor_is_cut():
    batch, length, width = 4, 6, 21
    x = torch.randn(batch, length, width)
    whole = dropout(x, 0.3, **address(), rows=rows_of(batch, length))

    by_sample = [dropout(x[b : b + 1], 0.3, **address(), rows=rows_of(1, length, b)) for b in range(batch)]
    assert torch.equal(torch.cat(by_sample), whole)

    zigzag = [0, 5, 1, 4, 2, 3]
    assert torch.equal(
        dropout(x[:, zigzag], 0.3, **address(), rows=rows_of(batch, length)[:, zigzag]), whole[:, zigzag]
    )

    for cuts in ([0, 8, 21], [0, 3, 4, 5, 18, 21]):
        columns = [
            dropout(x[..., a:b], 0.3, **address(), rows=rows_of(batch, length), col_start=a, n_cols=width)
            for a, b in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(columns, -1), whole)


def test_every_part_of_the_address_matters():
    x, rows = torch.ones(8, 64), torch.arange(8)
    base = dropout(x, 0.5, **address(), rows=rows)
    others = [address(seed=2), address(seed=1 + (1 << 32)), address(step=3), address(site=4)]
    for other in others:
        assert not torch.equal(dropout(x, 0.5, **other, rows=rows), base)
    assert not torch.equal(dropout(x, 0.5, **address(), rows=rows + 8), base)
    assert not torch.equal(dropout(x, 0.5, **address(), rows=rows + 2**32), base)
    assert torch.equal(dropout(x, 0.5, **address(), rows=rows), base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_backward_uses_the_same_mask(dtype):
    x = torch.randn(5, 7).to(dtype).requires_grad_()
    out = dropout(x, 0.4, **address(), rows=torch.arange(5))
    out.backward(torch.ones_like(out))
    assert out.dtype == dtype
    assert torch.equal(x.grad != 0, out != 0)
    assert x.grad[x.grad != 0].unique().tolist() == pytest.approx([1 / 0.6], rel=1e-2)


def test_gradcheck_on_a_strided_input():
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t.t(), 0.4, **address(), rows=torch.arange(5)), (x,))


def test_a_dropped_infinity_is_zero_and_no_dropout_is_the_input():
    x = torch.full((4, 16), torch.inf)
    out = dropout(x, 0.5, **address(), rows=torch.arange(4))
    assert sorted(out.unique().tolist()) == [0.0, torch.inf]
    assert dropout(x, 0.0, **address(), rows=torch.arange(4)) is x
    assert dropout(x[:0], 0.5, **address(), rows=torch.arange(0)).shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.0}, "p=1.0, expected 0 <= p < 1"),
        ({"seed": -1}, r"seed=-1, expected 0 to 2\^64 - 1"),
        ({"step": 2**32}, r"step=4294967296, expected 0 to 2\^32 - 1"),
        ({"site": 2**32}, "site=4294967296"),
        ({"rows": torch.arange(3)}, r"rows is torch.int64 \(3,\), expected int64 \(2,\)"),
        ({"col_start": 4}, "columns 4 to 12 do not lie in 0 to 8"),
        ({"col_start": 4, "n_cols": 11}, "columns 4 to 12 do not lie in 0 to 11"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dropout(**{"x": torch.ones(2, 8), "p": 0.1, **address(), "rows": torch.arange(2), **change})
