"""Zero-bubble schedules arranged for given costs and a memory limit.

Owns the search: a few rules of thumb, each played through in time, the best kept. Published orders
are in `orders`. The idea is that of Qi et al. 2023 (arXiv 2401.10241, section 3.1): run ahead with
F as far as memory allows, let no I wait, and fill holes with W.
"""

from __future__ import annotations

import heapq
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
    """What a rank has before it: microbatches whose F or I could run from a time on, kept W."""

    stages: list[int]
    free: float = 0.0
    held: int = 0
    forward: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    backward: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    kept: deque[Action] = field(default_factory=deque)
    actions: list[Action] = field(default_factory=list)


class _Player:
    """Plays all ranks in time; each that is free takes the most urgent action that it may."""

    def __init__(
        self, homes: Sequence[int], microbatches: int, costs: Costs, memory: float, patience: float
    ) -> None:
        self.homes, self.costs = homes, costs
        self.memory, self.patience = memory, patience
        self.ranks = [
            _Rank([stage for stage, home in enumerate(homes) if home == rank])
            for rank in range(max(homes) + 1)
        ]
        for rank in self.ranks:
            for stage in rank.stages:
                rank.forward[stage], rank.backward[stage] = deque(), deque()
        self.ranks[homes[0]].forward[0].extend((0.0, k) for k in range(microbatches))
        self.clock = [(0.0, homes[0])]

    def play(self) -> Schedule:
        """The actions of every rank when all have ended."""
        while self.clock:
            now, number = heapq.heappop(self.clock)
            rank = self.ranks[number]
            if rank.free <= now:
                action = self._choose(rank, now)
                if action is not None:
                    self._do(number, action, now)
        return tuple(tuple(rank.actions) for rank in self.ranks)

    def _choose(self, rank: _Rank, now: float) -> Action | None:
        """The next action of a free rank; None to wait for the next arrival."""
        for stage in reversed(rank.stages):
            queue = rank.backward[stage]
            if queue and queue[0][0] <= now:
                return Action(Kind.I, stage, queue[0][1])
        for place, stage in reversed(list(enumerate(rank.stages))):
            queue = rank.forward[stage]
            # A chunk leaves room for those behind it: the oldest microbatch must get through.
            room = rank.held + len(rank.stages) - place <= self.memory
            if queue and queue[0][0] <= now and room:
                return Action(Kind.F, stage, queue[0][1])
        coming = [q[0][0] for q in (*rank.backward.values(), *rank.forward.values()) if q]
        hole = min((time for time in coming if time > now), default=float("inf")) - now
        if rank.kept and hole >= self.patience * self.costs.w:
            return rank.kept[0]
        return None

    def _do(self, number: int, action: Action, now: float) -> None:
        rank, stage, microbatch = self.ranks[number], action.stage, action.microbatch
        rank.free = now + self.costs.of(action.kind)
        rank.actions.append(action)
        heapq.heappush(self.clock, (rank.free, number))
        if action.kind is Kind.F:
            rank.forward[stage].popleft()
            rank.held += 1
            last = stage == len(self.homes) - 1
            target, queues = (stage, "backward") if last else (stage + 1, "forward")
            self._arrive(target, queues, microbatch, number, rank.free)
        elif action.kind is Kind.I:
            rank.backward[stage].popleft()
            rank.kept.append(Action(Kind.W, stage, microbatch))
            if stage:
                self._arrive(stage - 1, "backward", microbatch, number, rank.free)
        else:
            rank.kept.popleft()
            rank.held -= 1

    def _arrive(self, stage: int, queues: str, microbatch: int, source: int, ended: float) -> None:
        """Lets a stage's rank have what has just been made, after the transfer."""
        home = self.homes[stage]
        time = ended + self.costs.send * (home != source)
        getattr(self.ranks[home], queues)[stage].append((time, microbatch))
        heapq.heappush(self.clock, (time, home))
