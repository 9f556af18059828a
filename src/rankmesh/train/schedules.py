"""The pipeline schedule that a config asks for, checked, with its messages.

Owns the choice between a schedule by name and the user's own; what makes one right is the
checker's.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from rankmesh.config.schema import ParallelConfig
from rankmesh.errors import PlanError
from rankmesh.schedule import (
    Action,
    Costs,
    Kind,
    Schedule,
    build_schedule,
    check_schedule,
    read_schedule,
    stage_ranks,
    with_communication,
)
from rankmesh.topology.plan import ParallelPlan


@lru_cache(maxsize=8)
def training_schedule(config: ParallelConfig, plan: ParallelPlan, microbatches: int) -> Schedule:
    """Each pipeline rank's actions of one step. Raises PlanError for a schedule that cannot be."""
    if config.schedule_file is not None:
        actions = _from_file(config.schedule_file, plan)
    else:
        actions = build_schedule(
            plan.schedule,
            plan.pp,
            plan.num_chunks,
            microbatches,
            Costs(*config.schedule_costs),
            config.schedule_memory,
        )
    schedule = with_communication(actions)
    try:
        check_schedule(schedule, plan.num_stages, microbatches)
    except PlanError as error:
        if config.schedule_file is None:
            raise
        step = f"a step of {microbatches} microbatches on {plan.num_stages} stages"
        raise PlanError(f"{config.schedule_file}: does not fit {step}: {error}") from None
    return schedule


@lru_cache(maxsize=8)
def forward_schedule(plan: ParallelPlan, microbatches: int) -> Schedule:
    """A forward pass alone, in the order of the training schedule."""
    actions = build_schedule(plan.schedule, plan.pp, plan.num_chunks, microbatches)
    # What is left out are both ends of a message, so that the rest still fits together.
    kept = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    return tuple(
        tuple(action for action in rank if action.kind in kept)
        for rank in with_communication(actions)
    )


def _from_file(file: str, plan: ParallelPlan) -> Schedule:
    """The user's schedule; each stage must stand where `plan.schedule` would place it."""
    schedule = read_schedule(Path(file))
    if len(schedule) != plan.pp:
        raise PlanError(
            f"{file}: {len(schedule)} lines of actions; needed is one a rank, pp {plan.pp}"
        )
    homes = stage_ranks(plan.schedule, plan.pp, plan.num_chunks)
    for rank, actions in enumerate(schedule):
        for action in actions:
            _check_home(file, action, rank, homes)
    return schedule


def _check_home(file: str, action: Action, rank: int, homes: tuple[int, ...]) -> None:
    if action.stage >= len(homes):
        raise PlanError(f"{file}: {action} is outside pp * num_chunks = {len(homes)} stages")
    if homes[action.stage] != rank:
        raise PlanError(
            f"{file}: {action} stands on pipeline rank {rank}; parallel.schedule and num_chunks "
            f"place stage {action.stage} on rank {homes[action.stage]}"
        )
