"""The closed formulas for sample order: golden values, bijection, exact mixtures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stoker.train.data.sampling import Blend, Permutation, WindowOrder, derive_keys, window_count


def test_golden_vectors():
    """A change of any of these silently changes the data order of every run that is resumed."""
    assert derive_keys("windows", 0, 0, "a") == (
        15562861974603328315,
        4127706981448447883,
        3358433000844441098,
        7227905667609449480,
        13834525366957799474,
        7608770211151071346,
    )
    ten = Permutation(10, derive_keys("golden", 1))
    assert [ten.at(i) for i in range(10)] == [2, 5, 8, 9, 1, 3, 4, 7, 6, 0]
    million = Permutation(1_000_003, derive_keys("golden", 2))
    expected = [52869, 956584, 932345, 821363, 723481, 364012, 328658, 254101, 962147, 340292, 617876, 710839]
    assert million.take(np.arange(12)).tolist() == expected
    assert [million.at(i) for i in range(12)] == expected
    huge = Permutation(1 << 40, derive_keys("golden", 3))
    assert [huge.at(i) for i in (0, 1, 2, (1 << 40) - 1)] == [739562276945, 286555548884, 803382165206, 546090229011]
    wiki = WindowOrder(7, 3, "wiki").take(np.arange(21)).tolist()
    assert wiki == [3, 6, 1, 4, 2, 0, 5, 1, 4, 5, 2, 0, 6, 3, 2, 5, 6, 1, 3, 0, 4]
    source, local = Blend.of([0.7, 0.3], 5).take(np.arange(12))
    assert source.tolist() == [0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert Blend.of([1, 2, 7], 5).given_before(1) == [102, 205, 717]  # of 102.4, 204.8, 716.8
    assert local.tolist() == [0, 0, 1, 2, 1, 2, 3, 4, 5, 3, 4, 5]


@given(size=st.integers(1, 3000), key=st.integers(0, 1 << 64))
def test_a_permutation_is_a_bijection(size, key):
    out = Permutation(size, derive_keys(key)).take(np.arange(size))
    assert sorted(out.tolist()) == list(range(size))


@given(
    size=st.integers(1, 1 << 62),
    key=st.integers(),
    fractions=st.lists(st.integers(0, (1 << 62) - 1), min_size=12, max_size=40),
)
def test_numpy_and_plain_python_agree(size, key, fractions):
    permutation = Permutation(size, derive_keys(key))
    items = [f % size for f in fractions]
    assert permutation.take(np.array(items)).tolist() == [permutation.at(i) for i in items]


def test_a_permutation_looks_random():
    order = Permutation(100_000, derive_keys("windows", 1, 0, "x")).take(np.arange(100_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (order == np.arange(100_000)).sum() < 10
    first = np.bincount([Permutation(50, derive_keys(k)).at(0) for k in range(5000)], minlength=50)
    assert ((first - 100) ** 2 / 100).sum() < 90  # chi-square with 49 degrees: beyond 90 once in 3000


@pytest.mark.parametrize("item", [-1, 10])
def test_items_outside_are_refused(item):
    permutation = Permutation(10, derive_keys(0))
    with pytest.raises(ValueError, match="of a permutation of 10"):
        permutation.at(item)
    with pytest.raises(ValueError, match="of a permutation of 10"):
        permutation.take(np.full(20, item))


def test_windows_share_one_token_and_stay_inside():
    assert [window_count(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9, 10)] == [0, 0, 0, 1, 1, 2, 2]


@given(windows=st.integers(1, 400), run=st.integers(1, 400), seed=st.integers(0, 2**63))
def test_every_epoch_has_every_window_once(windows, run, seed):
    run = min(run, windows)
    order = WindowOrder(windows, seed, "set", run).take(np.arange(3 * windows)).reshape(3, windows)
    assert (np.sort(order, axis=1) == np.arange(windows)).all()


def test_epochs_seeds_and_names_have_orders_of_their_own():
    orders = [WindowOrder(500, seed, name).take(np.arange(1000)) for seed, name in ((1, "a"), (2, "a"), (1, "b"))]
    halves = [half.tolist() for order in orders for half in (order[:500], order[500:])]
    assert all(a != b for i, a in enumerate(halves) for b in halves[:i])


def test_a_run_of_neighbours_stays_together():
    order = WindowOrder(103, 9, "a", run=4).take(np.arange(103))
    runs = order[:100].reshape(25, 4)
    assert (runs - runs[:, :1] == np.arange(4)).all()
    assert (np.diff(runs[:, 0]) != 4).any()
    assert order[100:].tolist() == [100, 101, 102]


weights = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6)


@given(weights=weights, seed=st.integers(0, 2**63), block=st.integers(0, 1 << 30))
def test_a_blend_repeats_and_drops_nothing(weights, seed, block):
    blend = Blend.of(weights, seed)
    before, after = blend.given_before(block), blend.given_before(block + 1)
    source, local = blend.take(np.arange(block * blend.block, (block + 1) * blend.block))
    for j, (first, stop) in enumerate(zip(before, after, strict=True)):
        assert local[source == j].tolist() == list(range(first, stop))
    assert sum(before) == block * blend.block


@given(weights=weights, block=st.integers(1, 1 << 30))
def test_a_blend_keeps_to_its_weights(weights, block):
    blend = Blend.of(weights, 0)
    total = sum(weights)
    for weight, given_samples in zip(weights, blend.given_before(block), strict=True):
        exact = weight / total * block * blend.block
        assert abs(given_samples - exact) <= 1 + block * blend.block / 2**29


def test_tiny_weights_get_larger_blocks_rather_than_negative_quotas():
    blend = Blend.of([1.0, 1.0, 1e-5], 0)
    counts = [blend.given_before(k)[2] for k in range(50)]
    assert blend.block == 262_144
    assert counts == sorted(counts)
    assert counts[-1] == 64


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_impossible_weights_are_refused(weight):
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.weight"):
        Blend.of([1.0, weight], 0)
