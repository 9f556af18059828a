"""Rank <-> coordinate, in the dense and in the expert view.

Owns the flattening order, the one place where it is applied. It knows no group, host or process.

Both views are plain positional number systems once ranks are numbered stage by stage:
index = pp * ranks_per_stage + position in the stage, positions in ascending rank. The dense view
reads a position as (tp, cp, dp) in the plan's order, the expert view as (etp, ep, edp).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rankmesh.errors import PlanError
from rankmesh.topology.plan import EXPERT_AXES, ParallelPlan

View = Literal["dense", "expert"]
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Coordinate:
    """Where one rank stands: tp cp dp pp in the dense view, etp ep edp pp in the expert view."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Digit:
    """One axis as a digit of the stage-by-stage index: coordinate = index // stride % size."""

    axis: str
    size: int
    stride: int


def digits(plan: ParallelPlan, view: View) -> tuple[Digit, ...]:
    """The axes of a view, fastest-varying first; pp, last, counts whole stages in both."""
    if view == "dense":
        axes = (*(axis for axis in plan.order if axis != "pp"), "pp")
    else:
        axes = EXPERT_AXES
    sizes = [plan.size(axis) for axis in axes]
    return tuple(
        Digit(axis, size, math.prod(sizes[:place]))
        for place, (axis, size) in enumerate(zip(axes, sizes, strict=True))
    )


def to_index(plan: ParallelPlan, ranks: Ranks) -> Ranks:
    """Stage-by-stage index of each rank; any shape."""
    before, stage = _pp_stride(plan), plan.size("stage")
    rest, low = np.divmod(ranks, before)
    high, pp = np.divmod(rest, plan.pp)
    return np.asarray(pp * stage + high * before + low)


def to_rank(plan: ParallelPlan, index: Ranks) -> Ranks:
    """Rank at each stage-by-stage index; the inverse of `to_index`."""
    before, stage = _pp_stride(plan), plan.size("stage")
    if before == stage:  # pp varies slowest, as by default: the two numberings are the same
        return index
    pp, position = np.divmod(index, stage)
    high, low = np.divmod(position, before)
    return np.asarray((high * plan.pp + pp) * before + low)


def coordinates(plan: ParallelPlan) -> dict[str, Ranks]:
    """Axis -> the coordinate of every rank of the world along it, [world_size] each."""
    index = to_index(plan, np.arange(plan.world_size))
    both = (*digits(plan, "dense"), *digits(plan, "expert"))
    found = {digit.axis: index // digit.stride % digit.size for digit in both}
    return {field.name: found[field.name] for field in fields(Coordinate)}


def coordinate(plan: ParallelPlan, rank: int) -> Coordinate:
    """The coordinate of one rank. Raises PlanError for a rank outside the world."""
    check_rank(plan, rank)
    index = int(to_index(plan, np.asarray(rank)))
    both = (*digits(plan, "dense"), *digits(plan, "expert"))
    return Coordinate(**{digit.axis: index // digit.stride % digit.size for digit in both})


def rank_of(plan: ParallelPlan, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
    """The rank at a dense coordinate. Raises PlanError for a coordinate outside the plan."""
    return _rank_at(plan, "dense", {"tp": tp, "cp": cp, "dp": dp, "pp": pp})


def expert_rank_of(
    plan: ParallelPlan, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0
) -> int:
    """The rank at a coordinate of the expert view. Raises PlanError outside the plan."""
    return _rank_at(plan, "expert", {"etp": etp, "ep": ep, "edp": edp, "pp": pp})


def check_rank(plan: ParallelPlan, rank: int) -> None:
    """Raises PlanError for a rank outside the plan's world."""
    if not 0 <= rank < plan.world_size:
        raise PlanError(f"rank {rank}: allowed are 0 to {plan.world_size - 1}")


def _rank_at(plan: ParallelPlan, view: View, place: dict[str, int]) -> int:
    index = 0
    for digit in digits(plan, view):
        value = place[digit.axis]
        if not 0 <= value < digit.size:
            raise PlanError(f"{digit.axis} rank {value}: allowed are 0 to {digit.size - 1}")
        index += value * digit.stride
    return int(to_rank(plan, np.asarray(index)))


def _pp_stride(plan: ParallelPlan) -> int:
    """Distance in ranks between neighbours along pp."""
    faster = plan.order[: plan.order.index("pp")]
    return math.prod(plan.size(axis) for axis in faster)
