"""Where groups cross hosts, and the orders that mend it.

Owns pure functions of (plan, host of each rank); hosts are discovered elsewhere and never assumed
from rank / ranks-per-host. It knows no launcher and no link.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankmesh.errors import PlanError
from rankmesh.topology.groups import RankList, group_rows
from rankmesh.topology.plan import DENSE_AXES, ParallelPlan
from rankmesh.topology.ranks import Ranks


@dataclass(frozen=True)
class Mending:
    """An order of ranks that keeps as many groups as possible on one host each.

    order: order[new rank] = the rank of today whose process takes that place. still_crossing: the
    groups, in new ranks, that cross hosts all the same because no host has the ranks for them.
    """

    order: RankList
    still_crossing: tuple[RankList, ...]


def block_hosts(counts: Sequence[int]) -> tuple[str, ...]:
    """Host of each rank when hosts of these sizes are filled one after the other."""
    return tuple(f"host{host}" for host, count in enumerate(counts) for _ in range(count))


def cyclic_hosts(counts: Sequence[int]) -> tuple[str, ...]:
    """Host of each rank when ranks are dealt out to hosts of these sizes one at a time."""
    rounds = range(max(counts, default=0))
    return tuple(
        f"host{host}" for turn in rounds for host, count in enumerate(counts) if turn < count
    )


def crossing_groups(
    plan: ParallelPlan, hosts: Sequence[str], name: str = "tp", *, kv_replicas: int = 1
) -> tuple[RankList, ...]:
    """The groups of that name whose ranks are on several hosts. hosts: name of each rank's host."""
    rows = group_rows(plan, name, kv_replicas=kv_replicas)
    numbers = _host_numbers(plan, hosts)[rows]
    crossing = rows[(numbers != numbers[:, :1]).any(axis=1)]
    return tuple(map(tuple, crossing.tolist()))


def mending_order(plan: ParallelPlan, hosts: Sequence[str], name: str = "tp") -> Mending:
    """An order of ranks in which as few groups of that name as possible cross hosts.

    Hosts are filled in the order in which today's ranks meet them, each with whole groups; what is
    left over on the hosts makes up the rest. No order does better: a host of n ranks has room for
    n // size whole groups. For names whose groups partition the world (not `embedding`).
    """
    rows, numbers = group_rows(plan, name), _host_numbers(plan, hosts)
    if rows.size != plan.world_size:
        raise PlanError(f"the groups of {name!r} do not cover the world: no order mends them")
    size = rows.shape[1]
    members = np.argsort(numbers, kind="stable")  # host by host, ranks ascending in each
    counts = np.bincount(numbers)
    place = np.arange(plan.world_size) - np.repeat(np.cumsum(counts) - counts, counts)
    in_whole = place < np.repeat(counts // size * size, counts)
    order = np.empty(plan.world_size, dtype=np.int64)
    order[rows.reshape(-1)] = np.concatenate([members[in_whole], members[~in_whole]])
    mended: list[int] = order.tolist()
    new_hosts = [hosts[rank] for rank in mended]
    return Mending(tuple(mended), crossing_groups(plan, new_hosts, name))


def mending_axes(
    plan: ParallelPlan, hosts: Sequence[str], name: str = "tp"
) -> tuple[str, ...] | None:
    """An order of the axes under which no group of that name crosses hosts, ranks staying put.

    Of several the one that moves the fewest axes; None where there is none.
    """
    orders = sorted(
        itertools.permutations(DENSE_AXES),
        key=lambda order: sum(a != b for a, b in zip(order, plan.order, strict=True)),
    )
    for order in orders:
        if not crossing_groups(replace(plan, order=order), hosts, name):
            return order
    return None


def _host_numbers(plan: ParallelPlan, hosts: Sequence[str]) -> Ranks:
    """A number for each rank's host, counted in order of first appearance."""
    if len(hosts) != plan.world_size:
        raise PlanError(f"{len(hosts)} hosts are named for {plan.world_size} ranks")
    known = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return np.asarray([known[host] for host in hosts], dtype=np.int64)
