"""How sides are compared: interleaved rounds, medians, spread, and a matmul that shows noise.

Owns the order of the runs and the figures made of them. It knows no model and no process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

_SIZE, _REPEATS = 1024, 6


def gflops() -> float:
    """What one thread multiplies now, in GFLOP/s: the median of a few fp32 products of 1024^3."""
    a, b = torch.ones(_SIZE, _SIZE), torch.ones(_SIZE, _SIZE)
    out = torch.empty(_SIZE, _SIZE)
    taken = [seconds(lambda: torch.mm(a, b, out=out)) for _ in range(_REPEATS)]
    return 2 * _SIZE**3 / median(taken) / 1e9


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Taken:
    """One run: seconds on the clock, and of this process's threads on the CPU."""

    wall: float
    cpu: float


def interleave(
    sides: Sequence[Callable[[], Any]], rounds: int, barrier: Callable[[], None]
) -> tuple[list[list[Taken]], list[float]]:
    """Run every side once a round, in an order that turns round each time: A B, B A, A B, ...

    Returns each side's runs and the GFLOP/s before, between and after the rounds. All processes of
    a job call it alike; `barrier` makes them start each run together.
    """
    taken: list[list[Taken]] = [[] for _ in sides]
    speeds = []
    for number in range(rounds):
        barrier()
        speeds.append(gflops())
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            barrier()
            cpu = time.process_time()
            wall = seconds(sides[side])
            taken[side].append(Taken(wall, time.process_time() - cpu))
    barrier()
    speeds.append(gflops())
    return taken, speeds


def compared(
    ours: Callable[[], float],
    theirs: Callable[[], float],
    pairs: int,
    warm_up: int,
    barrier: Callable[[], None],
) -> dict[str, Any]:
    """Both sides in turn, after `warm_up` runs of each: seconds of wall and processor, what each
    run returned (its loss), GFLOP/s.
    """
    losses: tuple[list[float], list[float]] = ([], [])
    sides = (lambda: losses[0].append(ours()), lambda: losses[1].append(theirs()))
    for side in sides * warm_up:
        side()
    taken, speeds = interleave(sides, pairs, barrier)
    return {
        "wall": [[one.wall for one in side] for side in taken],
        "cpu": [[one.cpu for one in side] for side in taken],
        "losses": losses,
        "gflops": speeds,
    }


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of some figures."""

    median: float
    low: float
    quarter: float
    three_quarters: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        ends = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return Spread(median(values), min(values), ends[0], ends[2], max(values))


def calibration(per_rank: Sequence[Sequence[float]]) -> str:
    """How calm the machine was, from the GFLOP/s of every rank."""
    speeds = Spread.of([speed for rank in per_rank for speed in rank])
    return (
        f"{speeds.median:.0f} GFLOP/s a thread (range {speeds.low:.0f} to {speeds.high:.0f}) "
        "before, between and after"
    )
