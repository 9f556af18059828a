"""Checks of traces: what a span covers, one clock for all hosts, what a bubble is compared with.

Each raises AssertionError with a message of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from rankmesh.cli.trace_run import Attempt, compare
from rankmesh.comm.seam import FakeTransport, Group, Seam
from rankmesh.obs.trace import COMPUTE, Tracer, TraceSpan
from rankmesh.obs.tracefile import RankTrace, read_trace, write_trace
from rankmesh.obs.tracemerge import aligned
from rankmesh.report.timeline import measured
from rankmesh.schedule import Costs, build_schedule, simulate
from rankmesh.testing.worker import Worker
from rankmesh.theory.bubble import textbook_bubble
from rankmesh.topology.plan import ParallelPlan
from tests import traces
from tests.gloo import trace_jobs


class Ticks:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 0

    def begin(self) -> None:
        """Nothing to prepare."""

    def now(self) -> int:
        """The time that was set."""
        return self.time

    def read(self, ticks: Sequence[int]) -> list[int]:
        """As they are."""
        return list(ticks)


def collective(worker: Worker) -> None:
    """From its start to the end of its wait, on the steps that are traced alone."""
    clock = Ticks()
    spans: list[TraceSpan] = []
    tracer = Tracer(range(2, 3), clock, spans.extend)
    seam = Seam(FakeTransport()).traced(tracer)
    for step in (1, 2, 3):
        with tracer.step(step):
            clock.time = 10
            handle = seam.all_reduce(torch.ones(3), Group("dp", (0, 1), 0), "gradients")
            clock.time = 30
            handle.wait()
    found = [(span.name, span.step, span.start, span.end) for span in spans[1:]]
    assert found == [("all_reduce", 2, 10, 30)], f"trace: collectives are {found}"


def clocks(worker: Worker) -> None:
    """Hosts whose clocks differ by 7000 in one step and by 7010 in the next end each norm together;
    so does what stands in a file.
    """
    ranks = [
        RankTrace(0, 1, (traces.norm(1000), traces.norm(2000, step=2))),
        RankTrace(1, 1, (traces.norm(8000), traces.norm(9010, step=2))),
    ]
    ends = [[span.end for span in trace.spans] for trace in aligned(ranks, {0: "a", 1: "b"})]
    assert ends == [[5, 1005], [5, 1005]], f"trace: norms end at {ends}"
    path = write_trace(worker.folder, ranks[1])
    assert read_trace(path) == ranks[1], "trace: a file gives back something else"
    times = [(e["ts"], e["dur"]) for e in json.loads(path.read_text())["traceEvents"] if "ts" in e]
    assert times == [(7.995, 0.005), (9.005, 0.005)], f"trace: us in the file are {times}"


def figures(worker: Worker) -> None:
    """Idle time, formulas, and a simulation from the steps before the one compared."""
    plain = simulate(build_schedule("1f1b", 3, 1, 6), Costs())
    slow = simulate(build_schedule("1f1b", 3, 1, 6), Costs(), lambda one: 1.0 + 4 * one.stage)
    ranks = traces.traces_of({4: plain, 5: slow})
    plan = ParallelPlan(pp=3)
    found = compare(ranks, Attempt(1, plan, plan.schedule, {}, ()), [5])
    idle = measured(ranks, 5).bubble
    assert math.isclose(idle, slow.bubble), f"trace: measured {idle}, idle are {slow.bubble}"
    made = found.simulated[5].bubble
    assert math.isclose(made, plain.bubble), f"trace: simulated {made} from the step itself"
    for name in ("gpipe", "1f1b", "zb-h1"):
        whole = simulate(build_schedule(name, 4, 1, 8), Costs()).bubble
        book = textbook_bubble(name, 4, 1, 8)
        assert book is not None and math.isclose(book, whole), f"trace: textbook {name} is {book}"


def waits(worker: Worker) -> None:
    """An action lasts as long as it works: waiting for its input is idle time."""
    folder = worker.folder / "run"
    steps, pp = 4, worker.world_size
    parallel = {"schedule": "1f1b"}
    trace_jobs.fixed_waits(
        worker, run_dir=str(folder), pp=pp, parallel=parallel, steps=steps, batches=4
    )
    trace = read_trace(Path(folder) / "trace" / f"rank-{worker.rank:04}.json")
    firsts = [
        next(s for s in trace.spans if (s.track, s.step) == (COMPUTE, step)) for step in (2, 3, 4)
    ]
    lasted = median((span.end - span.start) / 1e9 for span in firsts)
    wait = trace_jobs.WAITS[trace_jobs.Kind.F]
    assert wait <= lasted < 1.6 * wait, f"trace: the first F lasts {lasted:.4f} s, not {wait} s"
