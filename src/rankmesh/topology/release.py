"""What this release cannot run yet, and nothing else.

Plans are complete for all axes; layers, schedules and optimizers for some of them come later. Who
adds one deletes its row here.
"""

from __future__ import annotations

from collections.abc import Callable

from rankmesh.errors import PlanError
from rankmesh.topology.plan import ParallelPlan

# (whether a plan asks for it, its name, what runs instead)
_NOT_YET: tuple[tuple[Callable[[ParallelPlan], bool], str, str], ...] = (
    (lambda plan: plan.cp > 1, "cp", "1"),
    (lambda plan: plan.ep > 1, "ep", "1"),
    (lambda plan: plan.etp > 1, "etp", "1"),
    (lambda plan: plan.zero > 2, "zero", "0, 1 or 2"),
)


def check_release(plan: ParallelPlan) -> None:
    """Raises PlanError, in one line, for all that the plan asks and this release cannot run."""
    missing = [
        f"{name} {getattr(plan, name)} (allowed: {instead})"
        for asked, name, instead in _NOT_YET
        if asked(plan)
    ]
    if missing:
        raise PlanError(f"not in this release: {', '.join(missing)}; tp, pp and dp may be any size")
