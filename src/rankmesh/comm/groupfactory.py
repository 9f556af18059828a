"""The one place that makes process groups.

Every rank calls for every group of the plan, member or not, in one order; each set of ranks once;
none of one rank. It knows no launcher and no check: bootstrap and preflight come before it.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from rankmesh.comm.seam import Group
from rankmesh.errors import MeshError
from rankmesh.topology.groups import creation_order, group_of, needed_groups
from rankmesh.topology.plan import ParallelPlan

__all__ = ["make_groups"]


def make_groups(
    plan: ParallelPlan,
    rank: int,
    *,
    timeout: timedelta,
    kv_replicas: int = 1,
    experts: bool = False,
    tied_embeddings: bool = False,
) -> dict[str, Group]:
    """This rank's group of each name that the plan needs; absent where it has one rank.

    A collective of the whole world, which must be initialised with the same time-out: `new_group`
    once for each set of ranks of `topology.creation_order` but the world, whose group is reused.
    An error in it is fatal: the ranks' counters of groups no longer agree. Raises MeshError where
    the world has another size than the plan.
    """
    if plan.world_size == 1:
        return {}
    world = dist.group.WORLD
    if world is None or dist.get_world_size() != plan.world_size:
        size = "none" if world is None else dist.get_world_size()
        raise MeshError(f"the plan ({plan}) has {plan.world_size} ranks, the world group {size}")
    order = creation_order(
        plan, kv_replicas=kv_replicas, experts=experts, tied_embeddings=tied_embeddings
    )
    handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in order:
        handle = world if len(ranks) == plan.world_size else _make(ranks, timeout)
        if rank in ranks:
            handles[ranks] = handle
    names = needed_groups(
        plan, kv_replicas=kv_replicas, experts=experts, tied_embeddings=tied_embeddings
    )
    own = ((name, group_of(plan, name, rank, kv_replicas=kv_replicas)) for name in names)
    return {
        name: Group(name, ranks, ranks.index(rank), handles[ranks])
        for name, ranks in own
        if len(ranks) > 1
    }


def _make(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    """One new group; its handle is of use to members only."""
    try:
        # torch's default of 30 minutes is used for any group that is not told otherwise.
        handle: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, group_desc=_describe(ranks)
        )
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise MeshError(f"making the group of ranks {_describe(ranks)} failed: {first}") from error
    return handle


def _describe(ranks: tuple[int, ...]) -> str:
    """`0,1` or, for long groups, `0,8,...,56`: what torch's flight recorder shows."""
    words = [str(rank) for rank in ranks]
    return ",".join(words if len(words) <= 4 else [*words[:2], "...", words[-1]])
