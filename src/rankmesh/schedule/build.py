"""Schedules by name.

Owns the table of names, what each allows, and what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankmesh.errors import PlanError
from rankmesh.schedule.actions import UNIT_COSTS, Costs, Schedule
from rankmesh.schedule.arrange import arrange
from rankmesh.schedule.orders import ORDERS
from rankmesh.schedule.timeline import simulate

# Chunks of a rank by schedule; None: any number.
CHUNKS: Mapping[str, int | None] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": None,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "dualpipe-v": 2,
}
_FOLDED = ("zb-v", "dualpipe-v")
_ARRANGED = ("zb-h1", "zb-h2", "zb-v")


def build_schedule(
    name: str,
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: Costs = UNIT_COSTS,
    memory: float | None = None,
) -> Schedule:
    """The compute actions of each pipeline rank; there are ranks * chunks stages.

    Without `memory` it is the published order of that name, whatever `costs` are. `memory` bounds
    the activations of one chunk that a rank holds at once, each from its F to its B or W: the
    zero-bubble schedules (zb-h1, zb-h2, zb-v) are then arranged for `costs` and that limit, the
    others stay as they are and must fit. Raises PlanError for what cannot be, with the numbers.
    """
    _check(name, ranks, chunks, microbatches)
    if memory is not None and not memory >= 1:
        raise PlanError(f"memory {memory}: a number of at least 1 is needed")
    if memory is not None and name in _ARRANGED:
        return arrange(stage_ranks(name, ranks, chunks), microbatches, costs, memory)
    order = ORDERS[name]
    schedule = tuple(order(ranks, rank, chunks, microbatches) for rank in range(ranks))
    if memory is not None:
        held = simulate(schedule, costs).peak_held
        if max(held) > memory:
            raise PlanError(
                f"memory {memory:g}: {name} of {ranks} ranks, {chunks} chunk(s) and {microbatches} "
                f"microbatches holds {max(held)} activations on rank {held.index(max(held))}; "
                f"{', '.join(_ARRANGED)} fit any limit from their number of chunks up"
            )
    return schedule


def stage_ranks(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The pipeline rank of each stage: round and round, or there and back for the V shapes."""
    if name in _FOLDED:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * chunks))


def _check(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    if name not in CHUNKS:
        raise PlanError(f"schedule {name!r}: allowed are {', '.join(CHUNKS)}")
    if min(ranks, chunks, microbatches) < 1:
        raise PlanError(
            f"{name} of {ranks} ranks, {chunks} chunk(s) and {microbatches} microbatches: at least "
            "1 of each is needed"
        )
    allowed = CHUNKS[name]
    if allowed not in (None, chunks):
        raise PlanError(f"schedule {name} runs {allowed} chunk(s) a rank, not {chunks}")
