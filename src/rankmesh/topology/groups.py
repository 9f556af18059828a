"""Groups of ranks: along any axes of the dense or expert view, and the named ones of a run.

Owns who is in which group, which groups a plan needs and the one order in which they are made. It
knows no process group and no torch.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rankmesh.errors import PlanError
from rankmesh.topology.plan import DENSE_AXES, EXPERT_AXES, ParallelPlan
from rankmesh.topology.ranks import Digit, Ranks, View, check_rank, digits, to_index, to_rank

RankList = tuple[int, ...]

# Named groups along axes.
_ALONG: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "tp_pp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "ep": ("ep",),
    "etp": ("etp",),
    "edp": ("edp",),
    "stage": ("tp", "cp", "dp"),
    "world": DENSE_AXES,
}
# Named groups that cut another group: (the group cut, the group whose size is the length of a run
# of neighbours in it, whether the part is such a run or one rank of each).
_PART: dict[str, tuple[str, str, bool]] = {
    "tp_rep": ("tp", "tp_rep", True),
    "cp_ulysses": ("cp", "cp_ulysses", True),
    "cp_ring": ("cp", "cp_ulysses", False),
    "shard": ("dp_cp", "shard", True),
    "shard_rep": ("dp_cp", "shard", False),
    "expert_shard": ("edp", "expert_shard", True),
    "expert_shard_rep": ("edp", "expert_shard", False),
}
# In order of creation, world first: it exists before any other.
GROUP_NAMES = (
    "world", "tp", "cp", "dp", "pp", "dp_cp", "tp_pp", "tp_cp", "etp", "ep", "edp", "tp_rep",
    "cp_ulysses", "cp_ring", "shard", "shard_rep", "expert_shard", "expert_shard_rep", "stage",
    "embedding", "position_embedding",
)  # fmt: skip


def axis_groups(plan: ParallelPlan, axes: Collection[str]) -> Ranks:
    """All groups along any set of axes of one view, [number of groups, ranks in each].

    A group's ranks differ in just these axes. Ranks ascend in a group, groups ascend by their
    first rank. `axes`: from tp cp dp pp, or from etp ep edp pp; no axis gives groups of one.
    """
    view = digits(plan, _view(axes))
    starts = _span([digit for digit in view if digit.axis not in axes])
    return _rows(plan, starts, _span([digit for digit in view if digit.axis in axes]))


def group_rows(plan: ParallelPlan, name: str, *, kv_replicas: int = 1) -> Ranks:
    """All groups of one name in the world, [number of groups, ranks in each], as `axis_groups`.

    kv_replicas: neighbouring tp ranks that hold the same KV head, the size of a `tp_rep` group.
    `embedding` and `position_embedding` leave the ranks of the other stages out.
    """
    return _cut(plan, name, axis_groups(plan, _base(name)), kv_replicas)


def groups(plan: ParallelPlan, name: str, *, kv_replicas: int = 1) -> tuple[RankList, ...]:
    """`group_rows` as tuples."""
    rows = group_rows(plan, name, kv_replicas=kv_replicas)
    return tuple(map(tuple, rows.tolist()))


def group_of(plan: ParallelPlan, name: str, rank: int, *, kv_replicas: int = 1) -> RankList:
    """The group of that name in which `rank` is; () where it is in none, as `embedding` may be.

    The work is proportional to the group, not to the world.
    """
    check_rank(plan, rank)
    axes = _base(name)
    own = [digit for digit in digits(plan, _view(axes)) if digit.axis in axes]
    index = int(to_index(plan, np.asarray(rank)))
    start = index - sum(index // digit.stride % digit.size * digit.stride for digit in own)
    rows = _cut(plan, name, _rows(plan, np.asarray([start]), _span(own)), kv_replicas)
    found = rows[(rows == rank).any(axis=1)]
    return tuple(found[0].tolist()) if len(found) else ()


def needed_groups(
    plan: ParallelPlan,
    *,
    kv_replicas: int = 1,
    experts: bool = False,
    tied_embeddings: bool = False,
) -> tuple[str, ...]:
    """Names of the groups over which a run of this plan communicates and that have several ranks.

    The last three are facts about the model; ep above 1 says by itself that it has experts. `tp_pp`
    is never needed: norm and overflow are decided by the world.
    """
    experts = experts or plan.ep > 1
    needed = {"world", "tp", "cp", "dp", "pp", "dp_cp", "tp_cp", "tp_rep"}
    if experts:
        needed |= {"etp", "ep", "edp", "stage"}
    if plan.cp > 1:
        needed |= {"cp_ulysses", "cp_ring"}
    if plan.zero:
        needed |= {"shard", "shard_rep"}
    if plan.zero and experts:
        needed |= {"expert_shard", "expert_shard_rep"}
    if tied_embeddings:
        needed |= {"embedding"}
    return tuple(
        name for name in GROUP_NAMES if name in needed and _group_size(plan, name, kv_replicas) > 1
    )


def creation_order(
    plan: ParallelPlan,
    *,
    kv_replicas: int = 1,
    experts: bool = False,
    tied_embeddings: bool = False,
) -> tuple[RankList, ...]:
    """The groups that every process creates, member or not, in this order.

    Each set of ranks once, whatever names share it, none of one rank. The world comes first where
    it has several ranks: start-up has made it already.
    """
    names = needed_groups(
        plan, kv_replicas=kv_replicas, experts=experts, tied_embeddings=tied_embeddings
    )
    found = (group for name in names for group in groups(plan, name, kv_replicas=kv_replicas))
    return tuple(dict.fromkeys(found))


def _view(axes: Collection[str]) -> View:
    """The view to which all the axes belong."""
    if set(axes) <= set(DENSE_AXES):
        return "dense"
    if set(axes) <= set(EXPERT_AXES):
        return "expert"
    raise PlanError(
        f"axes {', '.join(axes)} are not of one view; allowed: {', '.join(DENSE_AXES)} together, "
        f"or {', '.join(EXPERT_AXES)} together"
    )


def _base(name: str) -> tuple[str, ...]:
    """The axes of a named group, or of the group that it cuts."""
    if name in ("embedding", "position_embedding"):
        return ("pp",)
    name = _PART[name][0] if name in _PART else name
    if name not in _ALONG:
        raise PlanError(f"unknown group {name!r}; allowed: {', '.join(GROUP_NAMES)}")
    return _ALONG[name]


def _span(part: list[Digit]) -> Ranks:
    """Every sum that these digits can form, ascending, [product of their sizes]."""
    sums = np.zeros(1, dtype=np.int64)
    for digit in reversed(part):  # slowest first, so that the fastest varies within
        sums = (sums[:, None] + np.arange(digit.size) * digit.stride).reshape(-1)
    return sums


def _rows(plan: ParallelPlan, starts: Ranks, offsets: Ranks) -> Ranks:
    """Groups from their first indices [G] and the offsets of their members [S], [G, S]."""
    rows = to_rank(plan, starts[:, None] + offsets)
    if plan.order[-1] == "pp":  # rank = index, so that all is in order
        return rows
    return _by_first(np.sort(rows, axis=1))


def _by_first(rows: Ranks) -> Ranks:
    return rows[np.argsort(rows[:, 0])]


def _cut(plan: ParallelPlan, name: str, rows: Ranks, kv_replicas: int) -> Ranks:
    """The parts that a named group makes of the rows [G, S] of the group it cuts."""
    if name == "embedding":
        return rows[:, sorted({0, plan.last_stage_pp})]
    if name == "position_embedding":
        return rows[:, :1]
    if name not in _PART:
        return rows
    _, run_name, neighbours = _PART[name]
    run = _group_size(plan, run_name, kv_replicas)
    parts = rows.reshape(len(rows), -1, run)
    if not neighbours:
        parts = parts.swapaxes(1, 2)
    return _by_first(parts.reshape(-1, parts.shape[2]))


def _group_size(plan: ParallelPlan, name: str, kv_replicas: int) -> int:
    """Ranks in one group of that name."""
    if name == "tp_rep":
        if plan.tp % kv_replicas:
            raise PlanError(f"kv_replicas {kv_replicas} does not divide tp {plan.tp}")
        return kv_replicas
    if name == "embedding":
        return len({0, plan.last_stage_pp})
    return plan.size(name)
