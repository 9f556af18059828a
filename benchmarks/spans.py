"""When the actions of a pipeline ran, and when they would have run by the schedule alone.

Owns the stopwatch that an executor takes, and the playing of a schedule with measured costs. It
knows no model.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from rankmesh.comm.seam import Ledger
from rankmesh.obs.trace import COMPUTE, NO_MARK, Tracer
from rankmesh.schedule import Action, Kind, Schedule
from rankmesh.schedule.waits import Waits, compute_only, play

# (kind, stage, microbatch, start, end, seconds of these spent waiting for another stage)
Span = tuple[str, int, int, float, float, float]


class Stopwatch(Tracer):
    """Takes the time of every computing action of one rank, in every step."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._taken: list[Span] = []

    def open(self, track: str, name: str, **args: int | str) -> Any:
        """A span of computation; nothing else is of interest."""
        return self._timed(args) if track == COMPUTE else NO_MARK

    @contextmanager
    def _timed(self, args: Mapping[str, int | str]) -> Iterator[None]:
        waited, start = self._ledger.waited_s["pp"], time.perf_counter()
        yield
        end, waited = time.perf_counter(), self._ledger.waited_s["pp"] - waited
        place = str(args["kind"]), int(args["stage"]), int(args["microbatch"])
        self._taken.append((*place, start, end, waited))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self._taken = self._taken, []
        return taken


def busy(span: Span) -> float:
    """Seconds that the action took by itself."""
    return span[4] - span[3] - span[5]


def length(spans: Iterable[Span]) -> float:
    """Seconds from the first start to the last end; the ranks are on one machine and its clock."""
    all_spans = list(spans)
    return max(span[4] for span in all_spans) - min(span[3] for span in all_spans)


def typical(spans: Iterable[Span]) -> Callable[[Action], float]:
    """The median cost of each kind of action on each stage."""
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for span in spans:
        taken[span[0], span[1]].append(busy(span))
    medians = {place: median(costs) for place, costs in taken.items()}
    return lambda action: medians[action.kind, action.stage]


def exact(spans: Iterable[Span]) -> Callable[[Action], float]:
    """What each single action took."""
    costs = {Action(Kind(span[0]), span[1], span[2]): busy(span) for span in spans}
    return lambda action: costs[action]


def makespan(schedule: Schedule, cost: Callable[[Action], float]) -> float:
    """Seconds that the schedule takes where every action starts as soon as what it needs has ended,
    and messages take no time.
    """
    plain = compute_only(schedule)
    waits, ends = Waits(plain), dict[Action, float]()
    free = [0.0] * len(plain)

    def able(rank: int, place: int, action: Action) -> bool:
        needs = waits(action)
        if not all(need in ends for need in needs):
            return False
        free[rank] = max([free[rank], *(ends[need] for need in needs)]) + cost(action)
        ends[action] = free[rank]
        return True

    play(plain, able)
    return max(free)


def overheads(schedule: Schedule, steps: Sequence[Sequence[Span]], first: int) -> list[list[float]]:
    """Measured over simulated length of each step from number `first` on, with two sets of costs:
    medians over the steps before it but the very first, and what each of its own actions took.
    """
    early, own = [], []
    for number in range(first, len(steps)):
        measured = length(steps[number])
        before = [span for step in steps[1:number] for span in step]
        early.append(measured / makespan(schedule, typical(before)))
        own.append(measured / makespan(schedule, exact(steps[number])))
    return [early, own]
