"""Made-up traces for tests: ranks that follow a timeline, and run directories that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rankmesh.obs.rundir import RankRecord, RunDir
from rankmesh.obs.trace import COMMUNICATION, COMPUTE, TraceSpan
from rankmesh.obs.tracefile import RankTrace, write_trace
from rankmesh.schedule import Costs, Timeline, build_schedule, simulate
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.ranks import coordinate

MS = 1_000_000


def action(
    kind: str, stage: int, microbatch: int, start: int, end: int, step: int = 1
) -> TraceSpan:
    """F, B, I or W from `start` to `end`, in ns."""
    args = {"kind": kind, "stage": stage, "microbatch": microbatch}
    return TraceSpan(COMPUTE, f"{kind}{stage}.{microbatch}", step, start, end, args)


def norm(end: int, step: int = 1) -> TraceSpan:
    """The world all-reduce of a step's norm."""
    args = {"axis": "world", "phase": "norm", "bytes": 24}
    return TraceSpan(COMMUNICATION, "all_reduce", step, end - 5, end, args)


def played(timeline: Timeline, step: int, begin: int = 0) -> list[list[TraceSpan]]:
    """The spans of each rank of a timeline in ms, from `begin` (ns) on, with a norm at its end."""
    ranks = [
        [
            action(
                str(span.kind),
                span.stage,
                span.microbatch,
                begin + round(span.start * MS),
                begin + round(span.end * MS),
                step,
            )
            for span in spans
        ]
        for spans in timeline.ranks
    ]
    end = max(span.end for spans in ranks for span in spans) + MS
    return [[*spans, norm(end, step)] for spans in ranks]


def traces_of(steps: Mapping[int, Timeline], attempt: int = 1) -> list[RankTrace]:
    """What the pipeline ranks record that run these steps one after another."""
    spans: list[list[TraceSpan]] = []
    for step, timeline in steps.items():
        made = played(timeline, step, begin=1000 * MS * step)
        spans = made if not spans else [a + b for a, b in zip(spans, made, strict=True)]
    return [RankTrace(rank, attempt, tuple(found)) for rank, found in enumerate(spans)]


def textbook_steps(
    schedule: str, pp: int, batches: int, steps: Sequence[int]
) -> dict[int, Timeline]:
    """Steps in which every F, I and W takes 1 ms."""
    timeline = simulate(build_schedule(schedule, pp, 1, batches), Costs())
    return dict.fromkeys(steps, timeline)


def run_dir(folder: Path, plan: ParallelPlan, traces: Sequence[RankTrace]) -> Path:
    """A run directory with the launches and files of these traces, all on one host."""
    with RunDir(folder, 10, again=True) as made:
        while made.attempt <= max(trace.attempt for trace in traces):
            records = [
                RankRecord(
                    rank=rank, host="here", device="cpu", pid=1,
                    coordinate=vars(coordinate(plan, rank)),
                )
                for rank in range(plan.world_size)
            ]  # fmt: skip
            made.add_launch(plan.to_dict(), records)
    for trace in traces:
        write_trace(folder, trace)
    return folder
