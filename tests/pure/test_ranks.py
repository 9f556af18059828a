"""Owns rank <-> coordinate: the flattening order, both views, the round trips.

Imports no torch.
"""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given

from rankmesh.errors import PlanError
from rankmesh.topology import (
    ParallelPlan,
    coordinate,
    coordinates,
    expert_rank_of,
    rank_of,
)
from rankmesh.topology.ranks import to_index, to_rank
from tests.pure.plans import oracle_places, plans, thousands


@thousands()
@given(plans())
def test_coordinates_are_those_of_nested_loops(plan):
    arrays = coordinates(plan)
    columns = [arrays[axis].tolist() for axis in arrays]
    found = [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]
    assert found == oracle_places(plan)


@given(plans())
def test_round_trips(plan):
    for rank, place in enumerate(oracle_places(plan)):
        assert asdict(coordinate(plan, rank)) == place
        assert rank_of(plan, **{axis: place[axis] for axis in ("tp", "cp", "dp", "pp")}) == rank
        expert = {axis: place[axis] for axis in ("etp", "ep", "edp", "pp")}
        assert expert_rank_of(plan, **expert) == rank
    ranks = np.arange(plan.world_size)
    assert (to_rank(plan, to_index(plan, ranks)) == ranks).all()


def test_default_order_is_tp_cp_dp_pp():
    """Megatron's own example: tp 2, cp 2, dp 2, pp 2 is tp + 2 cp + 4 dp + 8 pp."""
    plan = ParallelPlan(tp=2, cp=2, dp=2, pp=2)
    for rank in range(16):
        place = coordinate(plan, rank)
        assert rank == place.tp + 2 * place.cp + 4 * place.dp + 8 * place.pp


def test_another_order():
    """Megatron's second order, tp-cp-pp-dp."""
    plan = ParallelPlan(tp=2, cp=2, dp=2, pp=2, order=("tp", "cp", "pp", "dp"))
    for rank in range(16):
        place = coordinate(plan, rank)
        assert rank == place.tp + 2 * place.cp + 4 * place.pp + 8 * place.dp


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp")])
def test_expert_view_as_megatron_flattens_it(order):
    """Its expert grid puts etp, ep, edp in the places of tp, ep, dp.

    With pp before dp it demands dp = edp; then and there the two definitions agree.
    """
    plan = ParallelPlan(tp=2, cp=2, dp=3, pp=2, ep=4, order=order)
    pp_stride, edp_stride = (12, 4) if order[-1] == "pp" else (4, 8)
    for rank in range(plan.world_size):
        place = coordinate(plan, rank)
        assert rank == place.etp + place.ep + edp_stride * place.edp + pp_stride * place.pp


def test_coordinates_outside_the_plan_are_refused():
    plan = ParallelPlan(tp=2, dp=2, ep=2)
    for rank in (-1, 4):
        with pytest.raises(PlanError, match=f"rank {rank}: allowed are 0 to 3"):
            coordinate(plan, rank)
    with pytest.raises(PlanError, match="tp rank 2: allowed are 0 to 1"):
        rank_of(plan, tp=2)
    with pytest.raises(PlanError, match="ep rank -1: allowed are 0 to 1"):
        expert_rank_of(plan, ep=-1)
