"""Groups on real processes: all are made, all work, each with its time-out."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh.testing.spawn import Pool
from rankmesh.topology.groups import group_of, needed_groups
from rankmesh.topology.plan import ParallelPlan

JOBS = "tests.gloo.group_jobs"


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "dp": 2},
        {"tp": 4},
        {"pp": 2, "dp": 2},
        {"tp": 2, "pp": 2},
        {"cp": 2, "tp": 2},
        {"dp": 4, "ep": 2},
        {"tp": 2, "dp": 2, "order": ["dp", "tp", "cp", "pp"]},
    ],
    ids=str,
)
def test_every_group_works(pool: Pool, plan: dict[str, Any]) -> None:
    """Field report G01: a barrier and a sum on every group end, and each sum is its members'."""
    made = ParallelPlan(**plan)
    for rank, seen in enumerate(pool.run(f"{JOBS}:use_every_group", 4, timeout=20, plan=plan)):
        assert [name for name, _, _ in seen] == list(needed_groups(made))
        for name, ranks, total in seen:
            assert tuple(ranks) == group_of(made, name, rank) and total == sum(ranks)


def test_groups_made_by_their_members_only_hang(pool: Pool) -> None:
    """Field report G01, the fault itself: without one order for all, creation does not end."""
    reason, _ = pool.fail(f"{JOBS}:create_own_groups_only", 4, timeout=4)
    assert reason


@pytest.mark.parametrize("plan", [{"tp": 2, "pp": 2, "dp": dp} for dp in (1, 2)], ids=str)
def test_set_up_is_quick(pool: Pool, plan: dict[str, Any]) -> None:
    """Field report G03: up to 8 ranks on 2 cores start in well under 15 s, preflight included."""
    world_size = ParallelPlan(**plan).world_size
    seconds = pool.run(f"{JOBS}:time_set_up", world_size, timeout=60, plan=plan)
    assert max(seconds) < 15


def test_each_group_has_the_time_out(pool: Pool) -> None:
    """torch gives a new group 30 minutes unless told; ours have the user's, and a description."""
    plan = {"tp": 2, "dp": 2}
    found = pool.run(f"{JOBS}:describe_groups", 4, timeout=33, plan=plan, seconds=33)
    assert found[0]["tp"] == ["0,1", 33.0]
    assert found[3]["dp"] == ["1,3", 33.0]
    assert {seconds for groups in found for _, seconds in groups.values()} == {33.0}


def test_the_time_out_is_real(pool: Pool) -> None:
    """A peer that never comes to a collective costs the time-out, not half an hour."""
    plan = {"tp": 2, "dp": 2}
    texts = pool.run(f"{JOBS}:wait_in_a_group", 4, timeout=30, plan=plan, seconds=1)
    assert "Timed out" in texts[0] or "timed out" in texts[0]


def test_an_existing_world_is_reused(pool: Pool) -> None:
    """Two starts, one process group: the second mesh comes over the same world and store."""
    ranks = pool.run(f"{JOBS}:start_twice", 4, timeout=40)
    assert ranks[3] == [[0, 1, 2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tp": 2, "dp": 2}, {"tp": 2, "dp": 2, "order": ["dp", "tp", "cp", "pp"]}),
        ({"tp": 2, "dp": 2}, {"tp": 4}),
    ],
    ids=str,
)
def test_two_models_keep_to_their_own_groups(
    pool: Pool, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Field report G08, groundwork: {0,1} {2,3} beside {0,2} {1,3} in one world, in turn."""
    sums = pool.run(f"{JOBS}:two_models", 4, timeout=30, first=first, second=second)
    assert all(got == wanted for rank in sums for got, wanted in rank)
