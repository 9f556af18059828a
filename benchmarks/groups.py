"""Benchmark of the groups of big worlds: how long the whole map of a plan takes, in one process.

Owns the worlds measured and the lines printed; it needs no torch and no second process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

from rankmesh.topology import (
    DENSE_AXES,
    GROUP_NAMES,
    ParallelPlan,
    creation_order,
    group_of,
    group_rows,
    groups,
)

AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
MILLION = ParallelPlan(
    tp=8, cp=4, dp=2048, pp=16, ep=64, zero=3, zero_group=128, cp_ulysses=2
)  # 1,048,576 ranks
RUNS = 7


def seconds(work: Callable[[], object]) -> float:
    """Median of RUNS runs, after one that is not counted."""
    work()
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


def arrays(plan: ParallelPlan, names: Iterable[str]) -> list[object]:
    return [group_rows(plan, name) for name in names]


def tuples(plan: ParallelPlan, names: Iterable[str]) -> list[object]:
    return [groups(plan, name) for name in names]


def main() -> None:
    """Print one line a measurement: what, how many ranks, median seconds."""
    slow_tp = replace(MILLION, order=("pp", "dp", "cp", "tp"))
    cluster = ParallelPlan(tp=8, dp=64, pp=16)  # 8,192 ranks
    measured: dict[str, Callable[[], object]] = {
        "arrays, all groups of the 7 axes": lambda: arrays(MILLION, AXES),
        f"arrays, all {len(GROUP_NAMES)} names": lambda: arrays(MILLION, GROUP_NAMES),
        f"arrays, all {len(GROUP_NAMES)} names, order pp dp cp tp": lambda: arrays(
            slow_tp, GROUP_NAMES
        ),
        "tuples, all groups of tp cp dp pp": lambda: tuples(MILLION, DENSE_AXES),
        "one rank's groups of the 7 axes": lambda: [group_of(MILLION, name, 777) for name in AXES],
    }
    for what, work in measured.items():
        print(f"groups: {what:<55} {MILLION.world_size:>9,} ranks  {seconds(work):8.4f} s")
    made = len(creation_order(cluster))
    what = f"creation order, {made:,} groups"
    taken = seconds(lambda: creation_order(cluster))
    print(f"groups: {what:<55} {cluster.world_size:>9,} ranks  {taken:8.4f} s")


if __name__ == "__main__":
    main()
