"""Owns groups: golden lists, an independent oracle, the properties of partitions, creation order.

Imports no torch.
"""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.topology import (
    DENSE_AXES,
    EXPERT_AXES,
    GROUP_NAMES,
    ParallelPlan,
    axis_groups,
    coordinates,
    creation_order,
    group_of,
    groups,
    needed_groups,
)
from tests.pure.plans import divisors, oracle_groups, oracle_places, plans, thousands

PARTIAL = {"embedding", "position_embedding"}  # leave ranks of other stages out
ALONG = {
    "tp": ["tp"],
    "cp": ["cp"],
    "dp": ["dp"],
    "pp": ["pp"],
    "dp_cp": ["dp", "cp"],
    "tp_pp": ["tp", "pp"],
    "tp_cp": ["tp", "cp"],
    "stage": ["tp", "cp", "dp"],
    "world": ["tp", "cp", "dp", "pp"],
    "etp": ["etp"],
    "ep": ["ep"],
    "edp": ["edp"],
}


def view_of(axes):
    return DENSE_AXES if set(axes) <= set(DENSE_AXES) else EXPERT_AXES


def runs(group, size):
    """Neighbouring ranks of a group, `size` at a time."""
    return [group[start : start + size] for start in range(0, len(group), size)]


def strides(group, size):
    """One rank of each run of `size`."""
    return [group[start::size] for start in range(size)]


def small_plans(limit):
    """Every legal dense layout of up to `limit` ranks in the default order, with every ep."""
    sizes = range(1, limit + 1)
    for tp, cp, dp, pp in itertools.product(sizes, repeat=4):
        if tp * cp * dp * pp <= limit:
            for ep in divisors(tp * cp * dp):
                yield ParallelPlan(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)


def test_16_ranks_tp_2_pp_4():
    plan = ParallelPlan.for_world(16, tp=2, pp=4)
    assert plan.dp == 2
    assert group_of(plan, "tp", 0) == (0, 1)
    assert group_of(plan, "dp", 0) == (0, 2)
    assert group_of(plan, "pp", 0) == (0, 4, 8, 12)
    assert groups(plan, "tp") == tuple((first, first + 1) for first in range(0, 16, 2))
    assert groups(plan, "pp") == tuple(
        (first, first + 4, first + 8, first + 12) for first in range(4)
    )
    assert groups(plan, "dp") == (
        (0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15),
    )  # fmt: skip
    assert groups(plan, "tp_pp") == (
        (0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15),
    )  # fmt: skip
    assert groups(plan, "stage") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert groups(plan, "embedding") == ((0, 12), (1, 13), (2, 14), (3, 15))
    assert groups(plan, "position_embedding") == ((0,), (1,), (2,), (3,))
    assert group_of(plan, "embedding", 6) == () and group_of(plan, "embedding", 14) == (2, 14)


def test_64_ranks_tp_4_dp_4_pp_4():
    plan = ParallelPlan.for_world(64, tp=4, pp=4)
    assert group_of(plan, "tp", 0) == (0, 1, 2, 3)
    assert group_of(plan, "dp", 0) == (0, 4, 8, 12)
    assert group_of(plan, "pp", 0) == (0, 16, 32, 48)
    assert group_of(plan, "tp", 63) == (60, 61, 62, 63)
    assert group_of(plan, "dp", 63) == (51, 55, 59, 63)
    assert group_of(plan, "pp", 63) == (15, 31, 47, 63)


def test_512_ranks_tp_8_pp_4_dp_16():
    plan = ParallelPlan.for_world(512, tp=8, pp=4)
    assert plan.dp == 16
    assert group_of(plan, "tp", 200) == tuple(range(200, 208))
    assert group_of(plan, "dp", 3) == tuple(range(3, 128, 8))
    assert group_of(plan, "pp", 130) == (2, 130, 258, 386)
    assert [len(groups(plan, name)) for name in ("tp", "dp", "pp")] == [64, 32, 128]


def test_experts_fold_over_tp_cp_and_dp():
    """Stages of tp 2 * cp 2 * dp 4 = 16 ranks: one set of experts at etp 2 ep 8, four at ep 4."""
    plan = ParallelPlan(tp=2, cp=2, dp=4, pp=4, ep=8, etp=2)
    assert group_of(plan, "etp", 0) == (0, 1)
    assert group_of(plan, "ep", 0) == tuple(range(0, 16, 2))
    assert group_of(plan, "ep", 17) == tuple(range(17, 32, 2))
    assert group_of(plan, "edp", 0) == (0,)
    plan = ParallelPlan(tp=2, cp=2, dp=4, pp=4, ep=4)
    assert group_of(plan, "ep", 6) == (4, 5, 6, 7)
    assert group_of(plan, "edp", 6) == (2, 6, 10, 14)


def test_hybrid_zero_shards_stay_among_neighbours():
    plan = ParallelPlan(tp=2, dp=8, zero=1, zero_group=4)
    assert group_of(plan, "dp_cp", 0) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert group_of(plan, "shard", 0) == (0, 2, 4, 6)
    assert group_of(plan, "shard_rep", 0) == (0, 8)
    plan = ParallelPlan(tp=2, dp=8, ep=4, zero=1, zero_group=4)
    assert group_of(plan, "edp", 0) == (0, 4, 8, 12)
    assert group_of(plan, "expert_shard", 0) == (0, 4)
    assert group_of(plan, "expert_shard_rep", 0) == (0, 8)


def test_two_level_context_parallelism():
    plan = ParallelPlan(tp=2, cp=4, cp_ulysses=2)
    assert group_of(plan, "cp", 0) == (0, 2, 4, 6)
    assert group_of(plan, "cp_ulysses", 0) == (0, 2)
    assert group_of(plan, "cp_ring", 0) == (0, 4)
    plan = ParallelPlan(cp=4, cp_kind="ulysses")
    assert group_of(plan, "cp_ulysses", 0) == (0, 1, 2, 3) and group_of(plan, "cp_ring", 0) == (0,)


def test_holders_of_one_kv_head():
    plan = ParallelPlan(tp=4, dp=2)
    assert groups(plan, "tp_rep", kv_replicas=2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert group_of(plan, "tp_rep", 6, kv_replicas=4) == (4, 5, 6, 7)
    assert group_of(plan, "tp_rep", 6) == (6,)
    with pytest.raises(PlanError, match="kv_replicas 3 does not divide tp 4"):
        groups(plan, "tp_rep", kv_replicas=3)


def test_in_a_v_the_first_and_last_stage_share_a_rank():
    plan = ParallelPlan(pp=4, schedule="zb-v", num_chunks=2)
    assert groups(plan, "embedding") == ((0,),)
    assert "embedding" not in needed_groups(plan, tied_embeddings=True)


@thousands()
@given(plans(), st.data())
def test_groups_along_any_axes_are_those_of_the_oracle(plan, data):
    view = data.draw(st.sampled_from([DENSE_AXES, EXPERT_AXES]))
    axes = data.draw(st.sets(st.sampled_from(view)))
    expected = oracle_groups(oracle_places(plan), axes, view)
    assert axis_groups(plan, axes).tolist() == expected


@thousands()
@given(plans(), st.data())
def test_named_groups_are_those_of_the_oracle(plan, data):
    places = oracle_places(plan)
    replicas = data.draw(st.sampled_from(divisors(plan.tp)))
    along = {name: oracle_groups(places, axes, view_of(axes)) for name, axes in ALONG.items()}
    ulysses = plan.cp if plan.cp_kind == "ulysses" else plan.cp_ulysses
    shard = plan.zero_group or plan.dp * plan.cp
    expert_shard = len(along["edp"][0]) // (plan.dp * plan.cp // shard)
    last = 0 if plan.schedule == "zb-v" else plan.pp - 1
    expected = along | {
        "tp_rep": [run for group in along["tp"] for run in runs(group, replicas)],
        "cp_ulysses": [run for group in along["cp"] for run in runs(group, ulysses)],
        "cp_ring": [part for group in along["cp"] for part in strides(group, ulysses)],
        "shard": [run for group in along["dp_cp"] for run in runs(group, shard)],
        "shard_rep": [part for group in along["dp_cp"] for part in strides(group, shard)],
        "expert_shard": [run for group in along["edp"] for run in runs(group, expert_shard)],
        "expert_shard_rep": [p for group in along["edp"] for p in strides(group, expert_shard)],
        "embedding": [sorted({group[0], group[last]}) for group in along["pp"]],
        "position_embedding": [group[:1] for group in along["pp"]],
    }
    assert set(expected) == set(GROUP_NAMES)
    for name, lists in expected.items():
        found = groups(plan, name, kv_replicas=replicas)
        assert found == tuple(map(tuple, sorted(lists))), name
        sizes = {len(group) for group in found}
        if name not in {*PARTIAL, "tp_rep"}:
            assert sizes == {plan.size(name)}
    rank = data.draw(st.integers(0, plan.world_size - 1))
    for name, lists in expected.items():
        own = [tuple(group) for group in lists if rank in group]
        assert [group_of(plan, name, rank, kv_replicas=replicas)] == (own or [()]), name


@thousands()
@given(plans())
def test_groups_partition_the_world(plan):
    everyone = list(range(plan.world_size))
    for name in GROUP_NAMES:
        members = sorted(itertools.chain.from_iterable(groups(plan, name)))
        assert name in PARTIAL or members == everyone
        assert len(set(members)) == len(members)


@thousands()
@given(plans())
def test_members_differ_in_just_the_axes_of_the_group(plan):
    places = oracle_places(plan)
    for name, axes in ALONG.items():
        view = view_of(axes)
        for group in groups(plan, name)[:5]:
            for axis in view:
                values = {places[rank][axis] for rank in group}
                assert len(values) == (plan.size(axis) if axis in axes else 1)


@thousands()
@given(plans())
def test_both_views_share_pipelines_and_stages(plan):
    """Ranks that differ in pp alone do so in either view, and a stage is one set of ranks."""
    arrays = coordinates(plan)
    columns = [arrays[axis].tolist() for axis in arrays]
    places = [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]
    pipelines = axis_groups(plan, ("pp",)).tolist()
    assert oracle_groups(places, ("pp",), DENSE_AXES) == pipelines
    assert oracle_groups(places, ("pp",), EXPERT_AXES) == pipelines
    stages = axis_groups(plan, ("tp", "cp", "dp")).tolist()
    assert axis_groups(plan, ("etp", "ep", "edp")).tolist() == stages


def test_axes_of_two_views_do_not_mix():
    with pytest.raises(PlanError, match="not of one view"):
        axis_groups(ParallelPlan(tp=2), ("tp", "ep"))
    with pytest.raises(PlanError, match="unknown group 'mp'; allowed: world, tp"):
        groups(ParallelPlan(), "mp")
    with pytest.raises(PlanError, match="rank 2: allowed are 0 to 1"):
        group_of(ParallelPlan(tp=2), "tp", 2)


@thousands()
@given(plans(), st.booleans(), st.booleans(), st.data())
def test_creation_order_has_each_set_of_ranks_once_and_none_of_one_rank(plan, experts, tied, data):
    facts = {
        "kv_replicas": data.draw(st.sampled_from(divisors(plan.tp))),
        "experts": experts,
        "tied_embeddings": tied,
    }
    order = creation_order(plan, **facts)
    assert len(set(order)) == len(order)
    assert all(len(group) > 1 and list(group) == sorted(group) for group in order)
    names = needed_groups(plan, **facts)
    wanted = {
        group for name in names for group in groups(plan, name, kv_replicas=facts["kv_replicas"])
    }
    assert set(order) == {group for group in wanted if len(group) > 1}
    if plan.world_size > 1:
        assert order[0] == tuple(range(plan.world_size))


def test_every_rank_finds_each_of_its_groups_in_the_one_order():
    """Field report G01, pure part: for every legal layout up to 16 ranks."""
    count = 0
    for plan in small_plans(16):
        order = set(creation_order(plan, tied_embeddings=True))
        for name in needed_groups(plan, tied_embeddings=True):
            own = {group_of(plan, name, rank) for rank in range(plan.world_size)} - {()}
            assert own <= order and own == set(groups(plan, name))
        count += 1
    assert count > 400


def test_the_order_does_not_depend_on_the_process():
    """Field report G01: string hashes differ between processes, the lists may not."""
    script = (
        "from rankmesh.topology import ParallelPlan, creation_order as order;"
        "plan = ParallelPlan(tp=2, cp=2, dp=4, pp=2, ep=4, zero=2, zero_group=4);"
        "print(order(plan, kv_replicas=2, tied_embeddings=True))"
    )
    path = ":".join(sys.path)
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("dp", "count"),
    [
        (1, 1 + 2 + 2),  # world of 4; tp, pp
        (2, 1 + 4 + 4 + 4),  # world of 8; tp, dp, pp
        (4, 1 + 8 + 4 + 8),  # world of 16; tp, dp, pp
    ],
)
def test_how_many_groups_are_made(dp, count):
    """Field report G03: no set of ranks twice, no group of one rank."""
    assert len(creation_order(ParallelPlan(tp=2, pp=2, dp=dp))) == count


def test_axes_of_size_one_need_no_group():
    """Field report G03: nothing at all for one rank, the world alone for one axis."""
    assert creation_order(ParallelPlan()) == ()
    for axis in ("tp", "cp", "dp", "pp"):
        assert creation_order(ParallelPlan(**{axis: 4}), experts=True) == ((0, 1, 2, 3),)


def test_far_fewer_groups_than_one_a_name():
    """Megatron asks for 99 groups at tp 2 pp 2 cp 2 and 29,745 at 6,144 ranks, tp 8 pp 16."""
    assert len(creation_order(ParallelPlan(tp=2, pp=2, cp=2), tied_embeddings=True)) == 15
    big = ParallelPlan.for_world(6144, tp=8, pp=16)
    assert len(creation_order(big)) == 1 + 768 + 128 + 384


@pytest.mark.parametrize(
    ("fields", "facts", "names"),
    [
        ({}, {}, ()),
        ({"tp": 2, "dp": 2}, {}, ("world", "tp", "dp", "dp_cp", "tp_cp")),
        ({"tp": 4}, {"kv_replicas": 2}, ("world", "tp", "tp_cp", "tp_rep")),
        ({"pp": 2}, {"tied_embeddings": True}, ("world", "pp", "embedding")),
        ({"dp": 4, "zero": 1, "zero_group": 2}, {}, ("world", "dp", "dp_cp", "shard", "shard_rep")),
        ({"dp": 4, "ep": 2}, {}, ("world", "dp", "dp_cp", "ep", "edp", "stage")),
        ({"dp": 4}, {"experts": True}, ("world", "dp", "dp_cp", "edp", "stage")),
        (
            {"cp": 4, "cp_ulysses": 2},
            {},
            ("world", "cp", "dp_cp", "tp_cp", "cp_ulysses", "cp_ring"),
        ),
    ],
)
def test_only_needed_groups(fields, facts, names):
    assert needed_groups(ParallelPlan(**fields), **facts) == names
