"""The checker of schedules: completeness and order, by playing them through.

Owns what makes a schedule right; it knows no time, memory or transport. Communication actions are
passed over: a transfer is taken to follow its producer.
"""

from __future__ import annotations

from collections import Counter

from rankmesh.errors import PlanError
from rankmesh.schedule.actions import Action, Kind, Schedule

_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


def check_schedule(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Raises PlanError, in one line, at the first fault of `schedule`.

    Each of F and B (or I and W) must stand exactly once for every stage and microbatch, all of a
    stage on one rank, and every rank must reach the end of its list: F waits for F of the stage
    before, B and I for their own F and for B or I of the stage behind, W for its I.
    """
    plain = tuple(tuple(a for a in rank if a.kind in _COMPUTE) for rank in schedule)
    _check_complete(plain, stages, microbatches)
    _play(plain, stages)


def _check_complete(schedule: Schedule, stages: int, microbatches: int) -> None:
    counts = Counter(action for rank in schedule for action in rank)
    homes = {(action.stage, rank) for rank, actions in enumerate(schedule) for action in actions}
    for stage in range(stages):
        ranks = sorted(rank for home, rank in homes if home == stage)
        if len(ranks) > 1:
            raise PlanError(f"stage {stage} stands on several pipeline ranks: {ranks}")
        for microbatch in range(microbatches):
            once = {kind: counts.pop(Action(kind, stage, microbatch), 0) for kind in _COMPUTE}
            if tuple(once.values()) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                found = ", ".join(f"{kind} {count}" for kind, count in once.items())
                raise PlanError(
                    f"stage {stage}, microbatch {microbatch}: found {found}; needed are F 1 and "
                    "either B 1 or I 1, W 1"
                )
    if counts:
        raise PlanError(
            f"{next(iter(counts))} is outside {stages} stages and {microbatches} microbatches"
        )


def _play(schedule: Schedule, stages: int) -> None:
    """Let every rank go on as far as it can until all have ended or none can move."""
    done: set[Action] = set()
    at = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions) and _ready(actions[at[rank]], done, stages):
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[place]}"
        for rank, (actions, place) in enumerate(zip(schedule, at, strict=True))
        if place < len(actions)
    ]
    if stuck:
        raise PlanError(f"the schedule waits for itself: {', '.join(stuck)}")


def _ready(action: Action, done: set[Action], stages: int) -> bool:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return stage == 0 or Action(Kind.F, stage - 1, microbatch) in done
    if action.kind is Kind.W:
        return Action(Kind.I, stage, microbatch) in done
    behind = {Action(kind, stage + 1, microbatch) for kind in (Kind.B, Kind.I)}
    own = Action(Kind.F, stage, microbatch) in done
    return own and (stage == stages - 1 or not done.isdisjoint(behind))
