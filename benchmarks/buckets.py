"""Benchmark of the size of gradient buckets: the step at dp 2 with each size, in turn.

Owns the sizes and the table. All sizes share one model in one pair of processes; only the cut of
its gradient buffer changes between steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import sides
from benchmarks.sides import Shape
from benchmarks.step import ROOT, add_shape, chosen_shape, facts
from benchmarks.timing import Spread, calibration, interleave
from rankmesh.parallel.placing import Hold, lay_out
from rankmesh.testing.spawn import Pool
from rankmesh.testing.worker import Worker
from rankmesh.train.run import Run

SIZES_MB = (1.0, 4.0, 16.0, 32.0, 64.0, 256.0)


def cut(run: Run, bucket_mb: float) -> None:
    """Give the run's gradient buffer buckets of another size."""
    buffers = run.buffers
    other = lay_out(
        [Hold(run.table[name]) for slot in reversed(buffers.slots) for name in slot.names],
        [slot.names for slot in buffers.slots if len(slot.names) > 1],
        replace(run.mesh, device=torch.device("meta")),
        dtype=buffers.params.dtype,
        bucket_bytes=int(bucket_mb * 2**20),
    )
    buffers.buckets = other.buckets
    for slot, like in zip(buffers.slots, other.slots, strict=True):
        slot.bucket = like.bucket


def job(
    worker: Worker, *, dp: int, shape: dict[str, int], sizes: list[float], rounds: int
) -> dict[str, Any]:
    """Runs on every rank: seconds, and seconds spent waiting for buckets, of every size."""
    worker.start()
    sized = Shape(**shape)
    run = sides.our_run(worker, sized, 1, dp)
    step = sides.our_steps(run, sized.batches(2 + rounds * len(sizes), worker.rank))
    ledger = run.mesh.seam.ledger
    waits: list[list[float]] = [[] for _ in sizes]

    def with_size(number: int) -> Callable[[], None]:
        def work() -> None:
            cut(run, sizes[number])
            before = ledger.waited_s["dp_cp"]
            step()
            waits[number].append(ledger.waited_s["dp_cp"] - before)

        return work

    for _ in range(2):
        step()
    taken, speeds = interleave([with_size(n) for n in range(len(sizes))], rounds, dist.barrier)
    return {
        "wall": [[run.wall for run in size] for size in taken],
        "waits": waits,
        "gflops": speeds,
    }


def measure(pool: Pool, shape: Shape, sizes: Sequence[float], rounds: int) -> dict[str, Any]:
    """One row a size; ratios are to the round's mean over all sizes, so that drift cancels."""
    args = {"dp": 2, "shape": shape.to_dict(), "sizes": list(sizes), "rounds": rounds}
    ranks = pool.run("benchmarks.buckets:job", 2, timeout=3600.0, **args)
    rows = range(len(sizes))
    wall = [[max(e) for e in zip(*(r["wall"][i] for r in ranks), strict=True)] for i in rows]
    waits = [[max(e) for e in zip(*(r["waits"][i] for r in ranks), strict=True)] for i in rows]
    means = [sum(turn) / len(sizes) for turn in zip(*wall, strict=True)]
    table = [
        {
            "bucket_mb": sizes[i],
            "seconds": wall[i],
            "waited_s": waits[i],
            "relative": asdict(Spread.of([t / m for t, m in zip(wall[i], means, strict=True)])),
        }
        for i in rows
    ]
    return {"sizes": table, "gflops": [rank["gflops"] for rank in ranks]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buckets", description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES_MB), metavar="MB")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each size (default 7)")
    add_shape(parser)
    args = parser.parse_args(argv)
    shape = chosen_shape(args)
    report = facts(shape)
    with Pool(cwd=ROOT) as pool:
        report |= measure(pool, shape, args.sizes, 3 if args.quick else args.rounds)
    print("bucket MiB   median step   waited for dp   time relative to the mean of the sizes")
    for row in report["sizes"]:
        seconds, waited = Spread.of(row["seconds"]).median, Spread.of(row["waited_s"]).median
        relative = row["relative"]
        print(
            f"{row['bucket_mb']:10g}   {seconds:9.3f} s   {waited:11.3f} s   "
            f"{relative['median']:.3f} ({relative['low']:.3f} to {relative['high']:.3f})"
        )
    print("matmul", calibration(report["gflops"]))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
