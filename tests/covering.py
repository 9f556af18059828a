"""Covering lists: few cases in which every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def covering(
    values: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Cases that hold every pair of values of two names that a possible case can hold.

    Greedy, and the same at every call: the next case is the one that holds the most pairs that no
    earlier one held.
    """
    names = list(values)
    cases = [dict(zip(names, row, strict=True)) for row in itertools.product(*values.values())]
    left = {number: pairs(case) for number, case in enumerate(cases) if possible(case)}
    wanted = set().union(*left.values())
    chosen = []
    while wanted:
        best = max(left, key=lambda number: len(left[number] & wanted))
        chosen.append(cases[best])
        wanted -= left[best]
    return chosen


def pairs(case: Case) -> frozenset[tuple[str, str]]:
    """All pairs of (name, value) in a case, as text."""
    items = [f"{name}={value}" for name, value in case.items()]
    return frozenset(itertools.combinations(items, 2))
