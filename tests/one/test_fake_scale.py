"""Groups of worlds that no test machine has, made on torch's fake backend by one rank alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.comm import groupfactory
from rankmesh.comm.groupfactory import make_groups
from rankmesh.comm.seam import Group
from rankmesh.errors import MeshError
from rankmesh.topology.groups import creation_order, group_of
from rankmesh.topology.plan import ParallelPlan

TIMEOUT = timedelta(seconds=77)
Calls = list[tuple[int, ...]]


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process plays one rank of a world that is not there."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The rank lists that go to torch's `new_group`, in order; each with our time-out."""
    seen: Calls = []
    real: Callable[..., dist.ProcessGroup] = dist.new_group

    def spy(ranks: list[int], **options: object) -> dist.ProcessGroup:
        assert options["timeout"] == TIMEOUT and options["group_desc"]
        seen.append(tuple(ranks))
        return real(ranks, **options)

    monkeypatch.setattr(groupfactory.dist, "new_group", spy)
    return seen


def layouts(world_size: int) -> Iterator[ParallelPlan]:
    """Every (tp, cp, dp, pp) whose product is the world, in the default order."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tp, cp, pp in itertools.product(sizes, repeat=3):
        if world_size % (tp * cp * pp) == 0:
            yield ParallelPlan(tp=tp, cp=cp, pp=pp, dp=world_size // (tp * cp * pp))


@pytest.mark.parametrize("world_size", range(2, 17))
def test_all_ranks_make_the_same_groups_in_the_same_order(world_size: int, calls: Calls) -> None:
    """Field report G01: for every legal layout up to 16 ranks, member or not."""
    plans = list(layouts(world_size))
    lists: dict[ParallelPlan, set[tuple[tuple[int, ...], ...]]] = {plan: set() for plan in plans}
    for rank in range(world_size):
        with fake_world(rank, world_size):
            for plan in plans:
                calls.clear()
                make_groups(plan, rank, timeout=TIMEOUT)
                lists[plan].add(tuple(calls))
    for plan, found in lists.items():
        assert len(found) == 1, (plan, found)
        made = found.pop()
        # The world's own group is there before, and is not made again.
        assert made == tuple(r for r in creation_order(plan) if len(r) < world_size)


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("dp", "tp", "pp", "cp")])
def test_expert_and_tied_groups_too(order: tuple[str, ...], calls: Calls) -> None:
    """Field report G01, with experts, replicated KV heads, tied embeddings and another order."""
    plan = ParallelPlan(tp=4, pp=2, dp=2, ep=4, order=order)
    found = set()
    for rank in range(16):
        with fake_world(rank, 16):
            calls.clear()
            make_groups(plan, rank, timeout=TIMEOUT, kv_replicas=2, tied_embeddings=True)
            found.add(tuple(calls))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        # tp pairs and pp pairs; the world of 4 has no dp.
        (ParallelPlan(tp=2, pp=2), 2 + 2),
        # tp, dp and pp pairs; dp_cp is dp, and tp_cp is tp.
        (ParallelPlan(tp=2, pp=2, dp=2), 4 + 4 + 4),
        # tp and pp pairs, dp groups of four.
        (ParallelPlan(tp=2, pp=2, dp=4), 8 + 8 + 4),
        # One axis is the world itself: nothing is made.
        (ParallelPlan(dp=8), 0),
        (ParallelPlan(tp=8), 0),
        # Axes of size 1 add nothing.
        (ParallelPlan(tp=2, dp=4), 4 + 2),
    ],
)
def test_the_number_of_groups_is_as_designed(plan: ParallelPlan, count: int, calls: Calls) -> None:
    """Field report G03: each set of ranks once, none of one rank, the world not again."""
    with fake_world(0, plan.world_size):
        groups = make_groups(plan, 0, timeout=TIMEOUT)
    assert len(calls) == count
    assert len(set(calls)) == count and min(map(len, calls), default=2) > 1
    assert all(group.size > 1 for group in groups.values())


def test_names_that_share_ranks_share_a_handle() -> None:
    """Without cp, dp and dp_cp are one group under two names."""
    with fake_world(5, 8):
        groups = make_groups(ParallelPlan(tp=2, dp=4), 5, timeout=TIMEOUT)
        assert groups["dp"].handle is groups["dp_cp"].handle
        assert groups["tp"] == Group("tp", (4, 5), 1, groups["tp"].handle)
        assert groups["world"].handle is dist.group.WORLD


def test_a_world_of_another_size_is_refused() -> None:
    """The line names both sizes."""
    with fake_world(0, 8):
        with pytest.raises(MeshError, match="dp 4.* has 4 ranks, the world group 8"):
            make_groups(ParallelPlan(dp=4), 0, timeout=TIMEOUT)


def test_one_rank_needs_no_process_group() -> None:
    """No network for a world of one."""
    assert make_groups(ParallelPlan(), 0, timeout=TIMEOUT) == {}
    assert not dist.is_initialized()


def test_two_independent_models_share_a_world() -> None:
    """Field report G08, groundwork: the groups of two plans live side by side, none is global."""
    with fake_world(1, 4):
        pairs = make_groups(ParallelPlan(tp=2, dp=2), 1, timeout=TIMEOUT)
        other = make_groups(ParallelPlan(pp=2, dp=2), 1, timeout=TIMEOUT)
        assert pairs["tp"].ranks == (0, 1) == other["dp"].ranks
        assert pairs["tp"].handle is not other["dp"].handle
        assert pairs["dp"].ranks == (1, 3) == other["pp"].ranks


@pytest.mark.parametrize(("world_size", "limit_s"), [(1024, 5.0), (8192, 40.0)])
def test_large_worlds_start(world_size: int, limit_s: float) -> None:
    """The rank's own groups are right in worlds of 1,024 and 8,192, in bounded time."""
    plan = ParallelPlan.for_world(world_size, tp=8, pp=8)
    rank = world_size - 3
    began = time.perf_counter()
    with fake_world(rank, world_size):
        groups = make_groups(plan, rank, timeout=TIMEOUT)
    assert time.perf_counter() - began < limit_s
    for name in ("tp", "pp", "dp"):
        assert groups[name].ranks == group_of(plan, name, rank)
        assert groups[name].ranks[groups[name].index] == rank
