"""What waits for what in a schedule, and playing a schedule through.

Owns the dependencies between compute actions; it knows no time, and of communication only that it
can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankmesh.errors import PlanError
from rankmesh.schedule.actions import COMPUTE, Action, Kind, Schedule

# Ranks that an error names.
_NAMED = 8


class Waits:
    """The dependencies of a schedule: `waits(action)` are the actions that must have ended.

    F waits for F of the stage before, B and I for their own F and for B or I of the stage behind,
    W for its I.
    """

    def __init__(self, schedule: Schedule) -> None:
        actions = [action for rank in schedule for action in rank if action.kind in COMPUTE]
        self._last = max((action.stage for action in actions), default=0)
        self._split = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.I}

    def __call__(self, action: Action) -> tuple[Action, ...]:
        """The compute actions, of any rank, whose end the compute action needs."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind is Kind.F:
            return (Action(Kind.F, stage - 1, microbatch),) if stage else ()
        if kind is Kind.W:
            return (Action(Kind.I, stage, microbatch),)
        own = Action(Kind.F, stage, microbatch)
        return (own,) if stage == self._last else (own, self.backward(stage + 1, microbatch))

    def backward(self, stage: int, microbatch: int) -> Action:
        """The action that makes a stage's input gradient: I where there is one, else B."""
        kind = Kind.I if (stage, microbatch) in self._split else Kind.B
        return Action(kind, stage, microbatch)


def compute_only(schedule: Schedule) -> Schedule:
    """The schedule without its communication."""
    return tuple(tuple(a for a in rank if a.kind in COMPUTE) for rank in schedule)


def homes_of(schedule: Schedule) -> dict[int, int]:
    """The pipeline rank on which each stage's actions stand."""
    return {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}


def play(schedule: Schedule, able: Callable[[int, int, Action], bool]) -> None:
    """Lets every rank go on as far as it can until all have ended or none can move.

    `able(rank, place, action)` does the action at that place of the rank's list if nothing that it
    needs is missing, and says whether it did. Raises PlanError that names where ranks stand still.
    """
    places = [0] * len(schedule)
    ranks = list(range(len(schedule)))
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            actions = schedule[rank]
            while places[rank] < len(actions) and able(rank, places[rank], actions[places[rank]]):
                places[rank] += 1
                moved = True
        # Forward passes go down the ranks, backward passes up: one sweep each.
        ranks.reverse()
    stuck = [
        f"rank {rank} at {actions[place]}"
        for rank, (actions, place) in enumerate(zip(schedule, places, strict=True))
        if place < len(actions)
    ]
    if stuck:
        rest = [f"{len(stuck) - _NAMED} ranks more"] if len(stuck) > _NAMED else []
        raise PlanError(f"the schedule waits for itself: {', '.join([*stuck[:_NAMED], *rest])}")


def runs(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """Where the runs of adjacent communication begin and end (one behind the last)."""
    found: list[tuple[int, int]] = []
    for place, action in enumerate(actions):
        if action.kind in COMPUTE:
            continue
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found
