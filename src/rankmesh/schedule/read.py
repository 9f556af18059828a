"""Schedules as text: one line a pipeline rank, one word an action.

Owns the grammar, which docs/schedules.md describes; whether a schedule is right is for the checker.
"""

from __future__ import annotations

import re
from pathlib import Path

from rankmesh.errors import PlanError
from rankmesh.schedule.actions import Action, Kind, Schedule

_WORD = re.compile(rf"({'|'.join(Kind)})(\d{{1,6}})\.(\d{{1,6}})", re.ASCII)


def read_schedule(path: str | Path) -> Schedule:
    """The schedule in a text file. Raises PlanError that names file, line and word."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise PlanError(f"schedule file {path} cannot be read: {reason}") from None
    words = [(number, line.partition("#")[0].split()) for number, line in enumerate(lines, 1)]
    schedule = tuple(
        tuple(_action(word, f"{path}:{number}") for word in rank) for number, rank in words if rank
    )
    if not schedule:
        raise PlanError(f"schedule file {path} has no action; needed is one line a pipeline rank")
    return schedule


def schedule_text(schedule: Schedule) -> str:
    """The text that `read_schedule` reads back."""
    return "".join(f"{' '.join(map(str, rank))}\n" for rank in schedule)


def _action(word: str, where: str) -> Action:
    match = _WORD.fullmatch(word)
    if match is None:
        raise PlanError(
            f"{where}: {word!r} is no action; allowed are {', '.join(Kind)}, each followed by "
            "STAGE.MICROBATCH as in F0.3"
        )
    return Action(Kind(match[1]), int(match[2]), int(match[3]))
