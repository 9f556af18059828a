"""Benchmark of pipeline parallelism against torch.distributed.pipelining, schedule by schedule.

Owns the cells, the command line and the table. For time both sides live in the same processes and
take turns, as in the step benchmark; for memory each side runs alone in processes of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import sides
from benchmarks.memory import MEASURES
from benchmarks.pipeline_peer import PipelineTrainer, pipeline_trainer
from benchmarks.sides import Shape
from benchmarks.spans import Stopwatch, overheads
from benchmarks.step import ROOT, add_shape, chosen_shape, facts, told
from benchmarks.timing import Spread, calibration, compared
from rankmesh.config.resolve import parallel_plan
from rankmesh.config.schema import RunConfig
from rankmesh.data.loader import Microbatch
from rankmesh.schedule import stage_ranks
from rankmesh.specs.placement import stage_layers
from rankmesh.testing.spawn import Pool
from rankmesh.testing.worker import Worker
from rankmesh.train.run import Run
from rankmesh.train.schedules import training_schedule
from rankmesh.train.step import train_step

RANKS = 2
OURS, PEER = "ours", "peer"
MEASURED = ("time", "memory")
_WARM_UP = 2
# Optimizer state is there after one step, and ours checks its messages in the first one alone.
_MEMORY_WARM_UP = 1
_TIMEOUT_S = 3600.0
_MIB = 2**20
SIMULATED_GOAL = 1.05
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cell:
    """One comparison: our schedule, torch's class, and the chunks a rank."""

    name: str
    peer: str
    chunks: int
    goal: float = 1.0


CELLS = (
    Cell("1f1b", "Schedule1F1B", 1),
    Cell("interleaved", "ScheduleInterleaved1F1B", 2),
    # With one stage a rank torch's class is the paper's ZB-H1.
    Cell("zb-h1", "ScheduleInterleavedZeroBubble", 1),
    Cell("zb-v", "ScheduleZBVZeroBubble", 2),
)


@dataclass(frozen=True)
class Work:
    """What both sides of a cell do: so many microbatches of a shape, under a schedule."""

    cell: Cell
    shape: Shape
    microbatches: int

    def config(self) -> RunConfig:
        """Our side's."""
        base = sides.config(self.shape, 1, 1)
        size = self.shape.microbatch * self.microbatches
        parallel = {"pp": RANKS, "schedule": self.cell.name, "num_chunks": self.cell.chunks}
        return replace(
            base,
            parallel=replace(base.parallel, **parallel),
            train=replace(base.train, global_batch_size=size),
        )

    def batches(self, count: int) -> Batches:
        """(tokens, labels), each [microbatches * B, T], of `count` steps."""
        parts = self.shape.batches(count * self.microbatches, 0)
        groups = [parts[i : i + self.microbatches] for i in range(0, len(parts), self.microbatches)]
        return [
            (torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])) for group in groups
        ]

    def peer(self) -> PipelineTrainer:
        """The peer's trainer on this rank, its layers cut as ours are."""
        spec, cell = self.shape.spec(), self.cell
        plan = parallel_plan(self.config().parallel, RANKS)
        return pipeline_trainer(
            self.shape.plain(),
            stage_layers(spec, plan),
            stage_ranks(cell.name, RANKS, cell.chunks),
            cell.peer,
            self.microbatches,
            self.microbatches * self.shape.microbatch * self.shape.seq,
            sides.LR,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_work(values: dict[str, Any]) -> Work:
    """The inverse of `Work.to_dict`."""
    return Work(Cell(**values["cell"]), Shape(**values["shape"]), values["microbatches"])


def our_steps(run: Run, batches: Batches) -> sides.Step:
    """One step a call, on the next batch; returns the loss."""
    numbered = iter(enumerate(batches, start=1))
    size = run.batch.microbatch

    def step() -> float:
        number, (tokens, labels) = next(numbered)
        pairs = zip(tokens.split(size), labels.split(size), strict=True)
        parts = [Microbatch(x, y, torch.arange(len(x))) for x, y in pairs]
        return train_step(run, number, parts).loss

    return step


def job(worker: Worker, *, work: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Runs on every rank: times both sides in turn."""
    worker.start()
    asked = read_work(work)
    batches = asked.batches(_WARM_UP + pairs)
    run = sides.built(worker, asked.shape, asked.config())
    watch = Stopwatch(run.mesh.seam.ledger)
    run = replace(run, trace=watch)
    spans = []
    step = our_steps(run, batches)

    def ours() -> float:
        loss = step()
        spans.append(watch.take())
        return loss

    theirs = sides.peer_steps(asked.peer(), batches)
    return compared(ours, theirs, pairs, _WARM_UP, dist.barrier) | {"spans": spans}


def memory_job(worker: Worker, *, work: dict[str, Any], side: str, measure: str) -> dict[str, int]:
    """Runs on every rank: the peak of one side alone."""
    worker.start()
    asked = read_work(work)
    batches = asked.batches(_MEMORY_WARM_UP + 1)

    def build() -> Callable[[], Any]:
        if side == PEER:
            return sides.peer_steps(asked.peer(), batches)
        run = sides.built(worker, asked.shape, asked.config())
        return our_steps(run, batches)

    return MEASURES[measure](build, _MEMORY_WARM_UP)


def measure_time(pool: Pool, work: Work, pairs: int) -> dict[str, Any]:
    """A step takes as long as its slowest rank, and as much CPU time as all ranks together."""
    args = {"work": work.to_dict(), "pairs": pairs}
    ranks = pool.run("benchmarks.pipeline:job", RANKS, timeout=_TIMEOUT_S, **args)

    def joined(key: str, side: int) -> list[tuple[float, ...]]:
        return list(zip(*(rank[key][side] for rank in ranks), strict=True))

    wall = [[max(each) for each in joined("wall", side)] for side in (0, 1)]
    cpu = [[sum(each) for each in joined("cpu", side)] for side in (0, 1)]
    ratios = [theirs / ours for ours, theirs in zip(*wall, strict=True)]
    spans = [sum(step, []) for step in zip(*(rank["spans"] for rank in ranks), strict=True)]
    parallel = work.config().parallel
    schedule = training_schedule(parallel, parallel_plan(parallel, RANKS), work.microbatches)
    early, own = overheads(schedule, spans, _WARM_UP)
    losses = ranks[0]["losses"]
    return {
        "seconds": {OURS: wall[0], PEER: wall[1]},
        "cpu_seconds": {OURS: cpu[0], PEER: cpu[1]},
        "ratios": ratios,
        "ratio": asdict(Spread.of(ratios)),
        "cpu_ratio": asdict(Spread.of([b / a for a, b in zip(*cpu, strict=True)])),
        "met": Spread.of(ratios).median >= work.cell.goal,
        "simulated": asdict(Spread.of(early)),
        "simulated_own": asdict(Spread.of(own)),
        "losses": {OURS: losses[0], PEER: losses[1]},
        "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
        "gflops": [rank["gflops"] for rank in ranks],
    }


def measure_memory(pool: Pool, work: Work) -> dict[str, Any]:
    """Of each measure and side the peak on every rank, in bytes."""
    peaks: dict[str, Any] = {}
    for measure in MEASURES:
        for side in (OURS, PEER):
            args = {"work": work.to_dict(), "side": side, "measure": measure}
            ranks = pool.run("benchmarks.pipeline:memory_job", RANKS, timeout=_TIMEOUT_S, **args)
            peaks.setdefault(measure, {})[side] = ranks
    return peaks


def measure(pool: Pool, work: Work, pairs: int, wanted: Sequence[str] = MEASURED) -> dict[str, Any]:
    """The figures of one comparison: of time, of memory, or both."""
    figures = asdict(work.cell)
    if "time" in wanted:
        figures |= measure_time(pool, work, pairs)
    if "memory" in wanted:
        figures["memory"] = measure_memory(pool, work)
    return figures


def lines(figures: dict[str, Any]) -> list[str]:
    """What a person reads of one comparison."""
    title = (
        f"{figures['name']}: rankmesh against torch's {figures['peer']}, pp {RANKS}, "
        f"{figures['chunks']} chunk(s) a rank"
    )
    timed = _time_lines(figures) if "ratio" in figures else []
    peaks = figures.get("memory", {}).items()
    return [title, *timed, *(_memory_line(name, each, figures["goal"]) for name, each in peaks)]


def _time_lines(figures: dict[str, Any]) -> list[str]:
    ours, peer = (Spread.of(figures["seconds"][side]).median for side in (OURS, PEER))
    simulated = figures["simulated"]
    losses = [f"{each[0]:.6f} .. {each[-1]:.6f}" for each in figures["losses"].values()]
    return [
        f"  median step     {ours:.3f} s against {peer:.3f} s",
        f"  peer / ours     {told(figures['ratio'])}; goal {figures['goal']}: "
        f"{_verdict(figures['met'])}",
        f"  in CPU time     {told(figures['cpu_ratio'])}",
        f"  each pair       {' '.join(f'{each:.3f}' for each in figures['ratios'])}",
        f"  over simulated  {told(simulated)}; goal {SIMULATED_GOAL}: "
        f"{_verdict(simulated['median'] <= SIMULATED_GOAL)}",
        f"  .. own costs    {told(figures['simulated_own'])}",
        f"  matmul          {calibration(figures['gflops'])}",
        f"  losses          {losses[0]} against {losses[1]}; largest difference "
        f"{figures['loss_difference']:.1e}",
    ]


def _verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def _memory_line(name: str, peaks: dict[str, list[dict[str, int]]], goal: float) -> str:
    """MiB of every rank; the verdict is of the fullest."""
    most = {side: max(rank["peak"] for rank in peaks[side]) for side in (OURS, PEER)}
    each = [", ".join(f"{rank['peak'] / _MIB:.1f}" for rank in peaks[s]) for s in (OURS, PEER)]
    ratio = most[PEER] / most[OURS]
    return (
        f"  {f'peak {name}':<15} {each[0]} MiB against {each[1]} MiB; fullest rank, peer / ours "
        f"{ratio:.3f}: {_verdict(ratio >= goal)}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen cells. A missed goal is no failure: machines differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    names = [cell.name for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument(
        "--measure", nargs="+", choices=MEASURED, default=MEASURED, help="default: both"
    )
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs (default 7)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    add_shape(parser)
    args = parser.parse_args(argv)
    if args.quick and args.layers is None:
        args.layers = 2 * RANKS  # one for each chunk
    shape = chosen_shape(args)
    report = facts(shape) | {"microbatches": args.microbatches, "cells": []}
    with Pool(cwd=ROOT) as pool:
        for cell in CELLS:
            if cell.name in args.cells:
                work = Work(cell, shape, args.microbatches)
                pairs = 3 if args.quick else args.pairs
                figures = measure(pool, work, pairs, args.measure)
                report["cells"].append(figures)
                print("\n".join(lines(figures)), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
