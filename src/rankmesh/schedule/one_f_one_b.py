"""The 1F1B schedule: one stage a pipeline rank, one backward after each forward once warm.

Owns the order of actions alone (Narayanan et al. 2021, arXiv 2104.04473, figure 4 top).
"""

from __future__ import annotations

from collections.abc import Iterator

from rankmesh.errors import PlanError
from rankmesh.schedule.actions import Action, Kind, Schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """F and B of every microbatch on every stage; pipeline rank r runs stage r.

    Rank r holds at most min(stages - r, microbatches) activations at a time. With one stage it is
    F B F B ..., plain gradient accumulation. Raises PlanError for numbers below 1.
    """
    if stages < 1 or microbatches < 1:
        raise PlanError(
            f"1f1b of {stages} stages and {microbatches} microbatches: at least 1 of each is needed"
        )
    return tuple(tuple(_actions(stage, stages, microbatches)) for stage in range(stages))


def _actions(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    warmup = min(stages - stage - 1, microbatches)
    for done in range(microbatches + warmup):
        if done < microbatches:
            yield Action(Kind.F, stage, done)
        if done >= warmup:
            yield Action(Kind.B, stage, done - warmup)
