"""Set-up of all groups of large worlds, on torch's fake backend, and of small ones over Gloo.

`python -m benchmarks.group_setup`. The fake worlds cost what one rank spends in Python and torch;
the connections of the groups that it is in come on top, and are part of the Gloo figures.
"""

from __future__ import annotations

import resource
import statistics
import time
from datetime import timedelta

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.comm.groupfactory import make_groups
from rankmesh.testing.spawn import Pool
from rankmesh.topology.groups import creation_order
from rankmesh.topology.plan import ParallelPlan

TIMEOUT = timedelta(minutes=10)
REPEATS = 7


def fake(plan: ParallelPlan, rank: int) -> tuple[float, float]:
    """Seconds to list all groups, and to make them, as one rank of a fake world."""
    began = time.perf_counter()
    creation_order(plan)
    listed = time.perf_counter()
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    start = time.perf_counter()
    make_groups(plan, rank, timeout=TIMEOUT)
    made = time.perf_counter()
    dist.destroy_process_group()
    return listed - began, made - start


def main() -> None:
    """Prints one line a world: groups, median seconds, and the memory of the process."""
    print("fake backend, one rank of the world")
    print("ranks   plan                   groups  list s  make s (median of 7)  peak RSS MB")
    for world_size, axes in (
        (1024, {"tp": 8, "pp": 8}),
        (8192, {"tp": 8, "pp": 8}),
        (8192, {"tp": 8, "pp": 16, "cp": 4}),
    ):
        plan = ParallelPlan.for_world(world_size, **axes)
        runs = [fake(plan, world_size // 2 + turn) for turn in range(REPEATS)]
        listed, made = (statistics.median(times) for times in zip(*runs, strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        count = len(creation_order(plan)) - 1
        row = f"{world_size:<7} {str(plan):<22} {count:<7} {listed:<7.3f} {made:<21.3f} {peak:.0f}"
        print(row)
    print("\nGloo, real processes on this machine: a whole start with preflight A and B")
    print("ranks   plan                 slowest rank s (median of 7)")
    with Pool() as pool:
        for axes in ({"tp": 2, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}):
            plan = ParallelPlan(**axes)
            seconds = [
                max(
                    pool.run(
                        "tests.gloo.group_jobs:time_set_up", plan.world_size, plan=axes, timeout=60
                    )
                )
                for _ in range(REPEATS)
            ]
            print(f"{plan.world_size:<7} {str(plan):<20} {statistics.median(seconds):.2f}")


if __name__ == "__main__":
    main()
