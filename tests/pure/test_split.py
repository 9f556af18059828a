"""Owns cuts into neighbouring parts. Imports no torch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.topology import even, given_layers, layers_of_stages


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_even_covers_everything_in_equal_parts(total, parts):
    bounds = even(total, parts)
    sizes = [high - low for low, high in itertools.pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == total and len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_even_examples():
    """Field report D21: sizes that do not divide, down to empty parts."""
    assert even(5, 2) == (0, 3, 5)
    assert even(257, 4) == (0, 65, 129, 193, 257)
    assert even(3, 4) == (0, 1, 2, 3, 3)
    for total, parts in ((4, 0), (-1, 2)):
        with pytest.raises(PlanError, match=f"cannot cut {total} into {parts}"):
            even(total, parts)


def test_80_layers_on_4_stages():
    assert layers_of_stages([1.0] * 80, 4) == (
        range(20),
        range(20, 40),
        range(40, 60),
        range(60, 80),
    )


@given(st.integers(1, 200), st.integers(1, 64))
def test_every_layer_lands_once(layers, stages):
    """Field report P01: 30 layers on 4 stages are 30 layers."""
    if layers < stages:
        with pytest.raises(PlanError, match=f"num_layers {layers} .* stages {stages}"):
            layers_of_stages([3.3] * layers, stages)
        return
    held = layers_of_stages([3.3] * layers, stages)
    assert list(itertools.chain.from_iterable(held)) == list(range(layers))
    assert len(held) == stages and all(held)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_the_dearest_stage_is_as_cheap_as_can_be(costs, stages, first, last):
    """Against every cut there is."""
    if len(costs) < stages:
        return

    def loads(held):
        sums = [float(sum(costs[layer] for layer in layers)) for layers in held]
        sums[0] += first
        sums[-1] += last
        return max(sums), sum(one**2 for one in sums)

    inner = itertools.combinations(range(1, len(costs)), stages - 1)
    cuts = [[range(*pair) for pair in itertools.pairwise((0, *cut, len(costs)))] for cut in inner]
    found = layers_of_stages(costs, stages, first=first, last=last)
    assert loads(found) == min(map(loads, cuts))


def test_a_dear_head_shortens_its_stage():
    held = layers_of_stages([1.0] * 8, 4, last=2.0)
    assert [len(layers) for layers in held] == [3, 2, 2, 1]


def test_given_layers():
    assert given_layers((2, 0, 3)) == (range(2), range(2, 2), range(2, 5))
