"""The trace of a run: which steps are recorded, by which clock, into which file.

Owns the way from the config to a tracer, and what an action's span says. Recording and the form of
the files are `obs`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rankmesh.comm.exchange import Store
from rankmesh.comm.mesh import Mesh
from rankmesh.config.schema import LogConfig
from rankmesh.obs.cuda_clock import CudaClock
from rankmesh.obs.rundir import RunDir
from rankmesh.obs.trace import COMPUTE, NO_TRACE, HostClock, Tracer, TraceSpan
from rankmesh.obs.tracefile import RankTrace, write_trace
from rankmesh.parallel.execute import Watch

FIRST_STEPS = 20


def action_watch(trace: Tracer) -> Watch:
    """Each action of a schedule as a span of `trace`."""
    return lambda action: trace.open(
        COMPUTE,
        str(action),
        kind=str(action.kind),
        stage=action.stage,
        microbatch=action.microbatch,
    )


def make_tracer(
    config: LogConfig, mesh: Mesh, attempt: int, first_step: int, logger: logging.Logger
) -> Tracer:
    """The tracer of this rank, to be closed at the run's end.

    Its file is written once, after the last traced step or when the run ends before that. A file
    that cannot be written is a warning: the run goes on.
    """
    if not config.trace:
        return NO_TRACE
    first, last = config.trace_steps or (first_step, first_step + FIRST_STEPS - 1)

    def write(spans: Sequence[TraceSpan]) -> None:
        trace = RankTrace(mesh.rank, attempt, tuple(spans))
        try:
            logger.debug("trace: %s", write_trace(Path(config.run_dir), trace))
        except OSError as error:
            logger.warning("trace: cannot be written: %s", error)

    clock = CudaClock(mesh.device) if mesh.device.type == "cuda" else HostClock()
    return Tracer(range(first, last + 1), clock, write)


def agreed_attempt(folder: RunDir | None, store: Store) -> int:
    """The number of this launch, which rank 0 reads off its folder before the launch is recorded;
    every rank calls it.
    """
    if folder is not None:
        store.set("trace/attempt", str(folder.attempt))
    return int(store.get("trace/attempt"))
