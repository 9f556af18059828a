"""Owns groups that cross hosts, and the orders that mend it. Imports no torch."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.topology import (
    GROUP_NAMES,
    ParallelPlan,
    block_hosts,
    crossing_groups,
    cyclic_hosts,
    groups,
    mending_axes,
    mending_order,
)
from tests.pure.plans import plans

PARTITIONS = [name for name in GROUP_NAMES if "embedding" not in name]


def spread(plan, hosts, name):
    return [group for group in groups(plan, name) if len({hosts[rank] for rank in group}) > 1]


def test_placements():
    assert block_hosts([2, 3]) == ("host0", "host0", "host1", "host1", "host1")
    assert cyclic_hosts([2, 3]) == ("host0", "host1", "host0", "host1", "host1")
    assert block_hosts([]) == cyclic_hosts([]) == ()


def test_blocks_of_whole_groups_need_no_mending():
    plan = ParallelPlan(tp=4, dp=4)
    hosts = block_hosts([8, 8])
    assert crossing_groups(plan, hosts) == ()
    assert mending_order(plan, hosts).order == tuple(range(16))
    assert mending_axes(plan, hosts) == plan.order


def test_cyclic_placement_is_mended():
    plan = ParallelPlan(tp=2, dp=4)
    hosts = cyclic_hosts([4, 4])
    assert len(crossing_groups(plan, hosts)) == 4
    mending = mending_order(plan, hosts)
    assert mending.order == (0, 2, 4, 6, 1, 3, 5, 7) and mending.still_crossing == ()
    order = mending_axes(plan, hosts)
    assert order is not None and spread(replace(plan, order=order), hosts, "tp") == []


def test_uneven_hosts_keep_as_many_groups_whole_as_they_have_room_for():
    plan = ParallelPlan(tp=2, dp=4)
    hosts = block_hosts([3, 5])
    assert crossing_groups(plan, hosts) == ((2, 3),)
    mending = mending_order(plan, hosts)
    assert len(mending.still_crossing) == 1
    assert mending_axes(plan, hosts) is None
    # 3 + 1 + 4: a block placement breaks two groups, one of which can be saved.
    hosts = block_hosts([3, 2, 3])
    assert crossing_groups(plan, hosts) == ((2, 3), (4, 5))
    assert len(mending_order(plan, hosts).still_crossing) == 1


@given(plans(), st.sampled_from(PARTITIONS), st.data())
def test_mending_is_a_permutation_and_no_order_does_better(plan, name, data):
    num_hosts = data.draw(st.integers(1, 5))
    names = st.sampled_from([f"node-{number}" for number in range(num_hosts)])
    hosts = [data.draw(names) for _ in range(min(plan.world_size, 24))]
    hosts = (hosts * (plan.world_size // len(hosts) + 1))[: plan.world_size]
    assert list(crossing_groups(plan, hosts, name)) == spread(plan, hosts, name)
    mending = mending_order(plan, hosts, name)
    assert sorted(mending.order) == list(range(plan.world_size))
    moved = [hosts[rank] for rank in mending.order]
    assert list(mending.still_crossing) == spread(plan, moved, name)
    found = groups(plan, name)
    size = len(found[0])
    room = sum(count // size for count in Counter(hosts).values())
    assert len(mending.still_crossing) == len(found) - room


@given(st.sampled_from([2, 3]), st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.integers(1, 3))
def test_an_order_of_axes_is_found_wherever_there_is_one(tp, dp, pp, num_hosts):
    plan = ParallelPlan(tp=tp, dp=dp, pp=pp)
    each = -(-plan.world_size // num_hosts)
    hosts = cyclic_hosts([each] * num_hosts)[: plan.world_size]
    orders = [
        order
        for order in itertools.permutations(plan.order)
        if not spread(replace(plan, order=order), hosts, "tp")
    ]
    found = mending_axes(plan, hosts)
    assert found in orders if orders else found is None


def test_refusals():
    plan = ParallelPlan(tp=2)
    with pytest.raises(PlanError, match="3 hosts are named for 2 ranks"):
        crossing_groups(plan, ["a", "a", "b"])
    with pytest.raises(PlanError, match="'embedding' do not cover the world"):
        mending_order(ParallelPlan(pp=4), ["a"] * 4, "embedding")
