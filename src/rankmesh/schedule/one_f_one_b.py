"""The 1F1B schedule under its own name, for callers that know no other.

Owns nothing but the name: the order is in `orders`.
"""

from __future__ import annotations

from rankmesh.schedule.actions import Schedule
from rankmesh.schedule.build import build_schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """F and B of every microbatch on every stage; pipeline rank r runs stage r.

    Rank r holds at most min(stages - r, microbatches) activations at a time. With one stage it is
    F B F B ..., plain gradient accumulation. Raises PlanError for numbers below 1.
    """
    return build_schedule("1f1b", stages, 1, microbatches)
