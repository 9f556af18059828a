"""Owns ParamSpec and ParamTable: slices, owners, refusals. Imports no torch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.topology import Init, ParamSpec, ParamTable, Replicate, Shard, even


def spec(**fields):
    return ParamSpec(**{"name": "w", "shape": (8, 6), "init": Init("zeros")} | fields)


@st.composite
def sharded(draw):
    """A spec cut over tp, unevenly and with replicas, and its tp size."""
    pieces, replicas = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    dim = draw(st.integers(0, 1))
    shape = (draw(st.integers(0, 20)), draw(st.integers(0, 20)))
    inner = sorted(draw(st.integers(0, shape[dim])) for _ in range(pieces - 1))
    shard = Shard(dim, (0, *inner, shape[dim]), replicas)
    return spec(shape=shape, placements={"tp": shard}), pieces * replicas


@given(sharded())
def test_slices_of_the_owners_cover_the_tensor_once(case):
    param, size = case
    assert param.placements["tp"].axis_size == size
    seen = []
    for tp in range(size):
        rows, columns = param.slices({"tp": tp})
        assert param.local_shape({"tp": tp}) == (
            rows.stop - rows.start,
            columns.stop - columns.start,
        )
        if param.is_first_holder({"tp": tp}):
            seen += itertools.product(range(*rows.indices(99)), range(*columns.indices(99)))
    assert sorted(seen) == list(itertools.product(range(param.shape[0]), range(param.shape[1])))


@given(sharded())
def test_neighbouring_replicas_hold_the_same_slice(case):
    param, size = case
    replicas = param.placements["tp"].replicas
    for tp in range(size):
        first = tp // replicas * replicas
        assert param.slices({"tp": tp}) == param.slices({"tp": first})
        assert param.is_first_holder({"tp": tp}) == (tp == first)


def test_two_kv_heads_on_four_ranks():
    param = spec(shape=(16, 6), placements={"tp": Shard(0, (0, 8, 16), 2)})
    held = [param.slices({"tp": tp})[0] for tp in range(4)]
    assert held == [slice(0, 8), slice(0, 8), slice(8, 16), slice(8, 16)]


def test_a_replicated_parameter_has_one_owner_over_all_axes():
    for placements in ({}, {"tp": Replicate()}):
        param = spec(placements=placements)
        owners = [
            (tp, cp)
            for tp, cp in itertools.product(range(3), range(2))
            if param.is_first_holder({"tp": tp, "cp": cp})
        ]
        assert owners == [(0, 0)]
        assert param.local_shape({"tp": 2, "cp": 1}) == (8, 6)
    cut = spec(placements={"tp": Shard(0, even(8, 3))})
    assert [cut.is_first_holder({"tp": tp, "cp": 1}) for tp in range(3)] == [False] * 3


def test_two_axes_cut_two_dims():
    param = spec(placements={"tp": Shard(1, (0, 3, 6)), "ep": Shard(0, (0, 4, 8))})
    assert param.slices({"tp": 1, "ep": 0}) == (slice(0, 4), slice(3, 6))
    assert param.local_shape({"tp": 0, "ep": 1}) == (4, 3)


@pytest.mark.parametrize(
    ("shard", "line"),
    [
        (Shard(2, (0, 8)), "w: axis tp shards dim 2 of shape"),
        (Shard(-1, (0, 6)), "w: axis tp shards dim -1 of shape"),
        (Shard(0, (0, 4)), "boundaries .* do not cover dim 0"),
        (Shard(0, (1, 8)), "boundaries .* do not cover dim 0"),
        (Shard(0, (0, 5, 4, 8)), "boundaries .* do not cover dim 0"),
    ],
)
def test_placements_that_do_not_fit_are_refused(shard, line):
    with pytest.raises(PlanError, match=line):
        spec(placements={"tp": shard})


def test_a_table_finds_counts_and_refuses_twins():
    table = ParamTable((spec(), spec(name="b", shape=(6,)), spec(name="n", kind="buffer")))
    assert [param.name for param in table] == ["w", "b", "n"] and len(table) == 3
    assert table["b"].numel == 6 and table.numel == 48 + 6
    with pytest.raises(KeyError):
        table["missing"]
    with pytest.raises(PlanError, match=r"repeat: \['w'\]"):
        ParamTable((spec(), spec()))
