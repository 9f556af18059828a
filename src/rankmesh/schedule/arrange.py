"""Zero-bubble schedules arranged for given costs and a memory limit.

Owns the search: a few rules of thumb, each played through in time, the best kept. Published orders
are in `orders`. The idea is that of Qi et al. 2023 (arXiv 2401.10241, section 3.1): run ahead with
F as far as memory allows, let no I wait, and fill holes with W.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rankmesh.errors import PlanError
from rankmesh.schedule.actions import UNIT_COSTS, Action, Costs, Kind, Schedule
from rankmesh.schedule.orders import ORDERS, split_within
from rankmesh.schedule.timeline import simulate

# A hole is filled with W if it lasts at least this share of W: always, mostly, only if W fits.
PATIENCE = (0.0, 0.5, 1.0)


def arrange(homes: Sequence[int], microbatches: int, costs: Costs, memory: float) -> Schedule:
    """F, I and W of every microbatch; stage s runs on rank `homes[s]`.

    `memory` bounds the activations of one chunk that a rank holds at once, each from its F to its
    W. Tried are the published orders that fit, and playing with several degrees of patience; kept
    is the smallest makespan, among equals the smallest `bubble_stage`. Raises PlanError where the
    limit leaves no room for one microbatch in every chunk.
    """
    chunks = max(map(homes.count, homes))
    if memory < chunks:
        raise PlanError(
            f"memory {memory:g}: a rank with {chunks} chunk(s) holds at least {chunks} activations "
            "at once, one for each"
        )
    tries = [_Player(homes, microbatches, costs, memory, wait).play() for wait in PATIENCE]
    tries += _published(max(homes) + 1, chunks, microbatches, memory)

    def idle(schedule: Schedule) -> tuple[float, float]:
        timeline = simulate(schedule, costs)
        return timeline.makespan, timeline.bubble_stage

    return min(tries, key=idle)


def _published(ranks: int, chunks: int, microbatches: int, memory: float) -> list[Schedule]:
    """The published orders of that many chunks that fit."""
    if chunks == 1:
        most = 2 * ranks - 1  # more than ZB-H2 helps no order of that family
        return [split_within(ranks, microbatches, int(min(memory, most)))]
    order = ORDERS["zb-v"]
    folded = tuple(order(ranks, rank, chunks, microbatches) for rank in range(ranks))
    return [folded] if max(simulate(folded, UNIT_COSTS).peak_held) <= memory else []


@dataclass
class _Rank:
    """A rank in the middle of a schedule."""

    stages: list[int]
    free: float = 0.0
    held: int = 0
    kept: deque[Action] = field(default_factory=deque)
    actions: list[Action] = field(default_factory=list)
    # By kind (F or I) and stage: from when on, and which microbatch.
    inbox: dict[tuple[Kind, int], deque[tuple[float, int]]] = field(default_factory=dict)


class _Player:
    """Plays all ranks in time; each that is free takes the most urgent action that it may."""

    def __init__(
        self, homes: Sequence[int], microbatches: int, costs: Costs, memory: float, patience: float
    ) -> None:
        self.homes, self.costs = homes, costs
        self.memory, self.patience = memory, patience
        self.ranks = [_Rank([]) for _ in set(homes)]
        for stage, home in enumerate(homes):
            self.ranks[home].stages.append(stage)
        for rank in self.ranks:
            # The most urgent first: I before F, the stages near the loss before the others.
            urgent = [(kind, s) for kind in (Kind.I, Kind.F) for s in reversed(rank.stages)]
            rank.inbox = {key: deque() for key in urgent}
        # When to look at which rank.
        self.clock: list[tuple[float, int]] = []
        for microbatch in range(microbatches):
            self._deliver(Kind.F, 0, microbatch, 0.0)

    def play(self) -> Schedule:
        """The actions of every rank when all have ended."""
        while self.clock:
            now, home = heapq.heappop(self.clock)
            rank = self.ranks[home]
            action = self._choose(rank, now) if rank.free <= now else None
            if action is not None:
                self._do(rank, action, now)
        return tuple(tuple(rank.actions) for rank in self.ranks)

    def _choose(self, rank: _Rank, now: float) -> Action | None:
        """The next action of a free rank; None to wait for the next arrival."""
        coming = math.inf
        for (kind, stage), queue in rank.inbox.items():
            if not queue:
                continue
            time, microbatch = queue[0]
            if time > now:
                coming = min(coming, time)
            elif kind is Kind.I or self._has_room(rank, stage):
                return Action(kind, stage, microbatch)
        hole = coming - now
        return rank.kept[0] if rank.kept and hole >= self.patience * self.costs.w else None

    def _has_room(self, rank: _Rank, stage: int) -> bool:
        """Whether F leaves a place for each stage behind it: the oldest microbatch must get by."""
        return rank.held + sum(other >= stage for other in rank.stages) <= self.memory

    def _do(self, rank: _Rank, action: Action, now: float) -> None:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        rank.actions.append(action)
        rank.free = now + self.costs.of(kind)
        heapq.heappush(self.clock, (rank.free, self.homes[stage]))
        if kind is Kind.W:
            rank.kept.popleft()
            rank.held -= 1
            return
        rank.inbox[kind, stage].popleft()
        if kind is Kind.I:
            rank.kept.append(Action(Kind.W, stage, microbatch))
        else:
            rank.held += 1
        if kind is Kind.F and stage == len(self.homes) - 1:
            self._deliver(Kind.I, stage, microbatch, rank.free)
        elif kind is Kind.F or stage:
            target = stage + 1 if kind is Kind.F else stage - 1
            away = self.homes[target] != self.homes[stage]
            self._deliver(kind, target, microbatch, rank.free + self.costs.send * away)

    def _deliver(self, kind: Kind, stage: int, microbatch: int, time: float) -> None:
        """Lets the stage's rank have, from `time` on, what F or I of a microbatch waits for."""
        home = self.homes[stage]
        self.ranks[home].inbox[kind, stage].append((time, microbatch))
        heapq.heappush(self.clock, (time, home))
