"""When things happen: spans of time for each pipeline rank, and the figures that follow.

Owns the simulator of a schedule and the figures, which measured times may have too. It knows no
schedule by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankmesh.schedule.actions import COMPUTE, Action, Costs, Kind, Schedule
from rankmesh.schedule.waits import Waits, compute_only, homes_of, play


@dataclass(frozen=True, slots=True)
class Span:
    """An action and the time it took: from `start` to `end`, in any one unit."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """For each pipeline rank its spans in order, simulated or measured.

    Figures count F, B, I and W; a rank without them is idle throughout.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end on any rank."""
        windows = [self._window(rank) for rank in range(len(self.ranks)) if self._busy(rank)]
        if not windows:
            return 0.0
        return max(end for _, end in windows) - min(start for start, _ in windows)

    @property
    def bubble(self) -> float:
        """Idle share of the makespan over all ranks: what a step pays. From 0 to below 1."""
        return max(0.0, 1 - self._work / self.makespan) if self.makespan else 0.0

    @property
    def bubble_stage(self) -> float:
        """Idle share of the longest rank's own window, first start to last end (Qi et al. 2023,
        arXiv 2401.10241, section 5.3).
        """
        lengths = [end - start for start, end in map(self._window, range(len(self.ranks)))]
        longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
        if not lengths or not lengths[longest]:
            return 0.0
        return max(0.0, 1 - self._busy(longest) / lengths[longest])

    @property
    def bubble_over_ideal(self) -> float:
        """(makespan - work) / work, work being the mean of the ranks (Narayanan et al. 2021)."""
        return max(0.0, self.makespan / self._work - 1) if self._work else 0.0

    @property
    def peak_live(self) -> tuple[int, ...]:
        """For each rank the most activations of one chunk that it holds at once, F to B or I."""
        return tuple(_peak(spans, (Kind.F,), (Kind.B, Kind.I)) for spans in self.ranks)

    @property
    def peak_live_w(self) -> tuple[int, ...]:
        """For each rank the most microbatches of one chunk that it keeps at once, I to W."""
        return tuple(_peak(spans, (Kind.I,), (Kind.W,)) for spans in self.ranks)

    @property
    def peak_held(self) -> tuple[int, ...]:
        """For each rank the most that it holds at once, F to B or W: what a memory limit bounds."""
        return tuple(_peak(spans, (Kind.F,), (Kind.B, Kind.W)) for spans in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """The figures, and for each rank [kind, stage, microbatch, start, end] of its spans."""
        return {
            "bubble": self.bubble,
            "bubble_stage": self.bubble_stage,
            "bubble_over_ideal": self.bubble_over_ideal,
            "peak_live": list(self.peak_live),
            "peak_live_w": list(self.peak_live_w),
            "makespan": self.makespan,
            "actions": [
                [[str(s.kind), s.stage, s.microbatch, s.start, s.end] for s in spans]
                for spans in self.ranks
            ],
        }

    @property
    def _work(self) -> float:
        """Busy time, the mean of the ranks."""
        return sum(map(self._busy, range(len(self.ranks)))) / max(len(self.ranks), 1)

    def _busy(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.ranks[rank] if span.kind in COMPUTE)

    def _window(self, rank: int) -> tuple[float, float]:
        spans = [span for span in self.ranks[rank] if span.kind in COMPUTE]
        return min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0)


def _peak(spans: tuple[Span, ...], begin: tuple[Kind, ...], end: tuple[Kind, ...]) -> int:
    live = peak = 0
    for span in spans:
        live += (span.kind in begin) - (span.kind in end)
        peak = max(peak, live)
    return peak


def simulate(
    schedule: Schedule, costs: Costs, duration: Callable[[Action], float] | None = None
) -> Timeline:
    """The timeline of a schedule: every rank does its list in order, each action as soon as it can.

    A transfer between ranks takes `costs.send` after its producer ends and occupies no rank;
    communication actions are passed over. `duration` gives the time of each action where it is not
    that of its kind in `costs`. Raises PlanError where the ranks wait in a circle.
    """
    plain = compute_only(schedule)
    waits, homes = Waits(plain), homes_of(plain)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in plain]

    def able(rank: int, place: int, action: Action) -> bool:
        needs = waits(action)
        if not all(need in ends for need in needs):
            return False
        start = spans[rank][-1].end if place else 0.0
        for need in needs:
            start = max(start, ends[need] + costs.send * (homes[need.stage] != rank))
        took = costs.of(action.kind) if duration is None else duration(action)
        ends[action] = end = start + took
        spans[rank].append(Span(action.kind, action.stage, action.microbatch, start, end))
        return True

    play(plain, able)
    return Timeline(tuple(map(tuple, spans)))
