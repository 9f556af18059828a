"""Owns the proof of the blend: weights kept at every point, any point at once, nothing repeated."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data.blend import BOUND, Blend, BlendOrder, Phase, evaluation_order, training_order
from rankmesh.data.indexed import TokenFile
from rankmesh.data.loader import Loader, eval_loader
from rankmesh.data.order import SampleOrder
from rankmesh.data.samples import Samples
from rankmesh.data.writer import TokenWriter
from rankmesh.topology.batch import BatchPlan

WEIGHT = st.one_of(
    st.integers(1, 1000).map(float),
    st.floats(1e-6, 1e6),
    st.integers(0, 30).map(lambda power: 2.0**-power),
    st.integers(0, 30).map(lambda power: 1.618**-power),
)
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=12)


def shares(weights: list[float]) -> list[Fraction]:
    """The weights, exact and of sum 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


@given(weights=WEIGHTS)
def test_after_any_number_of_samples_the_counts_are_right(weights: list[float]) -> None:
    """Within 1.7 of k * w for every k, within 1/2 for two sources and 1 for three."""
    blend, part = Blend(weights), shares(weights)
    bound = {1: 0.0, 2: 0.5, 3: 1.0}.get(len(weights), BOUND)
    counts = [0] * len(weights)
    for k in range(300):
        source, number = blend.at(k)
        assert number == counts[source]
        counts[source] += 1
        assert max(abs(n - (k + 1) * w) for n, w in zip(counts, part, strict=True)) <= bound
    assert blend.counts(300) == counts


@given(weights=WEIGHTS, k=st.integers(0, 2**70))
def test_any_position_is_known_at_once(weights: list[float], k: int) -> None:
    """Field report X02: also beyond 2^31, 2^32 and 2^64: the counts before it, and who is next."""
    blend, part = Blend(weights), shares(weights)
    before, after = blend.counts(k), blend.counts(k + 1)
    source, number = blend.at(k)
    assert sum(before) == k and before[source] == number
    before[source] += 1
    assert before == after
    assert max(abs(n - (k + 1) * w) for n, w in zip(after, part, strict=True)) <= BOUND


def test_only_proportions_count() -> None:
    """7:3 as weights, as shares, as anything; the sequence is pinned, for resumed runs."""
    expected = [Blend([7, 3]).at(k) for k in range(50)]
    for weights in ([0.7, 0.3], [70.0, 30.0], [1.4, 0.6]):
        assert [Blend(weights).at(k) for k in range(50)] == expected
    assert [source for source, _ in expected[:10]] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]


def test_equal_weights_take_turns() -> None:
    """Of 2^n sources each comes once in every 2^n samples."""
    for size in (1, 2, 4, 16):
        blend = Blend([0.1] * size)
        for turn in range(5):
            taken = [blend.at(k) for k in range(turn * size, (turn + 1) * size)]
            assert sorted(taken) == [(source, turn) for source in range(size)]
            assert taken[0] == (0, turn)


def test_negative_numbers_are_refused() -> None:
    """-1 marks padding rows."""
    with pytest.raises(IndexError):
        Blend([1, 2]).at(-1)


def test_a_thousand_sources() -> None:
    """The walk is as long as a code word: short for what is drawn often."""
    weights = np.random.default_rng(1).integers(1, 10**6, 1000).tolist()
    blend, part = Blend(weights), shares(weights)
    counts = blend.counts(10**9)
    assert max(abs(n - 10**9 * w) for n, w in zip(counts, part, strict=True)) <= BOUND


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_every_source_goes_through_its_own_epochs(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    """Each epoch of a source shows each of its samples once, in an order that the weights do not
    change.
    """
    weights = data.draw(st.lists(WEIGHT, min_size=len(sizes), max_size=len(sizes)))
    order = BlendOrder(seed, sizes, [Phase(0, tuple(weights))])
    offsets = np.cumsum([0, *sizes])
    seen: dict[int, list[int]] = {source: [] for source in range(len(sizes))}
    for k in range(200):
        index = order.index(k)
        source = int(np.searchsorted(offsets, index, "right")) - 1
        seen[source].append(index - int(offsets[source]))
    for source, size in enumerate(sizes):
        plain = SampleOrder(seed, size, source)
        assert seen[source] == [plain.index(n) for n in range(len(seen[source]))]
        for epoch in range(len(seen[source]) // size):
            part = seen[source][epoch * size : (epoch + 1) * size]
            assert sorted(part) == list(range(size))


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    """Else two halves of one text would be drawn in step."""
    first, second = (SampleOrder(3, 1000, source) for source in (0, 1))
    assert [first.index(k) for k in range(5)] != [second.index(k) for k in range(5)]
    assert SampleOrder(3, 1000).index(0) not in (first.index(0), second.index(0))


@given(
    changes=st.lists(st.tuples(st.integers(1, 90), WEIGHT, WEIGHT), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_weights_that_change_on_the_way(
    changes: list[tuple[int, float, float]], sizes: tuple[int, int]
) -> None:
    """Field report X05: each set goes on at its own next sample, none is skipped or repeated."""
    phases, start = [Phase(0, (1.0, 1.0))], 0
    for length, left, right in changes:
        start += length
        phases.append(Phase(start, (left, right)))
    order = BlendOrder(5, sizes, phases)
    counts = [0, 0]
    for k in range(start + 100):
        source, number = order.source(k)
        assert number == counts[source]
        counts[source] += 1


def test_one_to_one_then_two_to_one() -> None:
    """Field report X05: 100 samples at 1:1, then 2:1; what was read stays read."""
    sizes = (1000, 1000)
    before = BlendOrder(0, sizes, [Phase(0, (1, 1))])
    after = BlendOrder(0, sizes, [Phase(0, (1, 1)), Phase(100, (2, 1))])
    read = [after.index(k) for k in range(400)]
    assert read[:100] == [before.index(k) for k in range(100)]
    assert len(set(read)) == 400
    assert Counter(index // 1000 for index in read[:100]) == {0: 50, 1: 50}
    assert Counter(index // 1000 for index in read[100:]) == {0: 200, 1: 100}
    with pytest.raises(ValueError, match="expected to rise from 0"):
        BlendOrder(0, sizes, [Phase(1, (1, 1))])


def test_a_source_that_is_switched_off() -> None:
    """Weight 0 in a later phase; it keeps its place for the one after that."""
    phases = [Phase(0, (1, 1)), Phase(10, (1, 0)), Phase(20, (0, 1))]
    order = BlendOrder(0, (50, 50), phases)
    assert [order.source(k) for k in (9, 10, 19, 20)] == [(1, 4), (0, 5), (0, 14), (1, 5)]


def samples(folder: Path, weights: tuple[float, ...] | None) -> Samples:
    """Two files of 12 and 30 samples of one token and the next; ids tell which file and where."""
    files = []
    for number, size in enumerate((12, 30)):
        prefix = folder / f"{number}"
        with TokenWriter(prefix, 1000) as writer:
            writer.add(list(range(100 * number, 100 * number + size + 1)))
            writer.commit()
        files.append(TokenFile(prefix))
    return Samples(files, 1, weights=weights)


def test_evaluation_of_a_blend_sees_each_sample_once(tmp_path: Path) -> None:
    """Field report X16: in file order, mixed by weight, up to where one file ends; always the
    same.
    """
    mixed = samples(tmp_path, (3, 1))
    order = evaluation_order(mixed)
    # After 16 samples the first file has given its 12.
    assert order.num_samples == 16
    loader = eval_loader(mixed, BatchPlan(5, 1, 5), 0)
    tokens = [
        int(batch.tokens[row, 0])
        for step in range(loader.num_steps)
        for batch in loader.step(step)
        for row in range(5)
        if batch.samples[row] >= 0
    ]
    assert [token for token in tokens if token < 100] == list(range(12))
    assert [token for token in tokens if token >= 100] == list(range(100, 104))
    assert evaluation_order(samples(tmp_path, None)).num_samples == 42


def test_training_rows_follow_the_blend(tmp_path: Path) -> None:
    """Any step may be asked for; batches of another size see the same samples."""
    mixed = samples(tmp_path, (1, 3))
    order = training_order(7, mixed)
    whole = Loader(mixed, order, BatchPlan(80, 1, 80), 0).step(0)[0].tokens[:, 0].tolist()
    assert sum(token >= 100 for token in whole) == 60
    again = Loader(mixed, training_order(7, mixed), BatchPlan(8, 1, 8), 0)
    assert again.at(32)[0].tokens[:, 0].tolist() == whole[32:40]
    assert isinstance(training_order(7, samples(tmp_path, None)), SampleOrder)
