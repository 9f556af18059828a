"""Owns the proof of the sample order: a bijection for every epoch, well mixed, pinned for ever."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data.order import FileOrder, Permutation, SampleOrder

PINNED = [104, 749, 214, 798, 829, 147]
PINNED_LARGE = 561547052048
SIZES = st.one_of(st.integers(1, 2**40), st.integers(0, 40).map(lambda power: 2**power))
SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**33)


def test_every_small_size_is_a_bijection() -> None:
    """All sizes up to 300, and some above; the vectorised form is the same function."""
    for size in [*range(1, 300), 1000, 4095, 4096, 4097, 65_537]:
        permutation = Permutation(size, seed=size % 7, epoch=size % 3)
        found = permutation.at_many(np.arange(size))
        assert np.array_equal(np.sort(found), np.arange(size)), size
        assert [permutation.at(i) for i in range(min(size, 40))] == found[:40].tolist()


@given(size=SIZES, seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_any_size_is_a_bijection(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    """Different positions go to different places inside the size, in both forms."""
    positions = data.draw(st.sets(st.integers(0, size - 1), max_size=20).map(sorted))
    permutation = Permutation(size, seed, epoch)
    found = [permutation.at(i) for i in positions]
    assert len(set(found)) == len(positions)
    assert all(0 <= place < size for place in found)
    assert permutation.at_many(np.array(positions, dtype=np.int64)).tolist() == found


@pytest.mark.parametrize("size", [2**31 - 1, 2**32, 2**40, 2**53 + 1, 2**62 - 1, 2**62])
def test_64_bits_do_not_wrap(size: int) -> None:
    """Field report X02: Python's integers, which cannot overflow, and numpy's agree at the ends."""
    positions = [0, 1, size // 2, size - 2, size - 1]
    permutation = Permutation(size, seed=3, epoch=5)
    found = permutation.at_many(np.array(positions, dtype=np.int64))
    assert found.tolist() == [permutation.at(i) for i in positions]
    assert all(0 <= place < size for place in found.tolist())


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_sizes_that_are_refused(size: int) -> None:
    """Beyond 2^62 sums would leave 64 bits."""
    with pytest.raises(ValueError, match="positions"):
        Permutation(size, 0, 0)


@given(size=st.integers(20, 10**6), seed=SEEDS, epoch=EPOCHS)
def test_another_seed_or_epoch_is_another_order(size: int, seed: int, epoch: int) -> None:
    """Also neighbouring ones."""
    first = np.arange(20)
    base = Permutation(size, seed, epoch).at_many(first).tolist()
    assert Permutation(size, seed + 1, epoch).at_many(first).tolist() != base
    assert Permutation(size, seed, epoch + 1).at_many(first).tolist() != base
    assert Permutation(size, seed, epoch).at_many(first).tolist() == base


@pytest.mark.parametrize("size", [1000, 99_991, 1 << 17])
def test_the_order_is_well_mixed(size: int) -> None:
    """Figures of a random permutation, each within about 6 standard deviations.

    Mean displacement size / 3; neighbours, and place against position, uncorrelated; as many
    places above the diagonal of each tenth as chance gives.
    """
    position = np.arange(size)
    for seed in range(5):
        place = Permutation(size, seed, 0).at_many(position)
        wide = 6 / math.sqrt(size)
        assert abs(np.abs(place - position).mean() / (size / 3) - 1) < wide
        assert abs(np.corrcoef(place, position)[0, 1]) < wide
        assert abs(np.corrcoef(place[:-1], place[1:])[0, 1]) < wide
        tenths = np.histogram2d(place, position, bins=10)[0]
        assert np.abs(tenths - size / 100).max() < 6 * math.sqrt(size / 100)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_occur(size: int) -> None:
    """Over seeds, each of the size! orders about equally often."""
    trials = 4000
    counts = Counter(
        tuple(Permutation(size, seed, 0).at(i) for i in range(size)) for seed in range(trials)
    )
    expected = trials / math.factorial(size)
    for order in permutations(range(size)):
        assert abs(counts[order] - expected) < 8 * math.sqrt(expected)


def test_every_epoch_shows_every_sample_once() -> None:
    """In an order of its own."""
    order = SampleOrder(seed=11, num_samples=17)
    epochs = [[order.index(k) for k in range(e * 17, (e + 1) * 17)] for e in range(6)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert order.indices(np.arange(6 * 17)).tolist() == sum(epochs, [])


def test_the_order_knows_nothing_but_seed_and_number() -> None:
    """A run of another length, another mesh or a resume asks the same question again."""
    forward = [SampleOrder(5, 100).index(k) for k in range(250)]
    fresh = SampleOrder(5, 100)
    assert [fresh.index(k) for k in reversed(range(250))] == forward[::-1]
    assert SampleOrder(5, 100).indices(np.array([249, 0, 130])).tolist() == [
        forward[249],
        forward[0],
        forward[130],
    ]


def test_sample_numbers_beyond_32_bits() -> None:
    """Field report X02: a corpus of 3 samples, asked for 2^31 + 10 of them and more."""
    order = SampleOrder(seed=1, num_samples=3)
    for start in (2**31 - 2, 2**31 + 10, 2**32, 3 * 2**40):
        start -= start % 3
        assert sorted(order.index(k) for k in range(start, start + 3)) == [0, 1, 2]
        assert order.indices(np.arange(start, start + 3)).tolist() == [
            order.index(k) for k in range(start, start + 3)
        ]


def test_the_order_is_pinned() -> None:
    """Changing it would change every resumed run: a new order needs a new name in the config."""
    order = SampleOrder(seed=1234, num_samples=1000)
    assert [order.index(k) for k in (0, 1, 2, 999, 1000, 1_000_000)] == PINNED
    assert Permutation(2**40 + 1, 7, 2).at(12_345) == PINNED_LARGE


@pytest.mark.parametrize("order", [SampleOrder(0, 5), FileOrder(5)])
def test_negative_numbers_are_refused(order: SampleOrder | FileOrder) -> None:
    """-1 marks padding rows; it must not become the last sample."""
    with pytest.raises(IndexError):
        order.index(-1)


def test_the_order_of_evaluation() -> None:
    """File order, and an end."""
    assert [FileOrder(4).index(k) for k in range(4)] == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        FileOrder(4).index(4)


def test_positions_outside_are_refused() -> None:
    """They would walk to some other position's place."""
    for position in (-1, 10):
        with pytest.raises(IndexError):
            Permutation(10, 0, 0).at(position)
