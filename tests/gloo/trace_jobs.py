"""A pipeline whose actions only wait, so that its timeline is known but for the messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from rankmesh.config.resolve import parallel_plan
from rankmesh.obs.rundir import RankRecord, RunDir
from rankmesh.obs.trace import Tracer
from rankmesh.obs.tracefile import RankTrace, write_trace
from rankmesh.parallel.execute import Execution
from rankmesh.parallel.hops import Arrival
from rankmesh.schedule import Action, Kind
from rankmesh.testing.worker import Worker
from rankmesh.train.run import assemble, fresh_values
from rankmesh.train.step import train_step
from tests import tiny

# Seconds.
WAITS = {Kind.F: 0.024, Kind.B: 0.036, Kind.I: 0.02, Kind.W: 0.016}


def wait(self: Execution, action: Action) -> None:
    """In place of `Execution._compute`: the time passes, and the neighbour gets zeros."""
    time.sleep(WAITS[action.kind])
    stage, microbatch = action.stage, action.microbatch
    if action.kind is not Kind.W:
        arrives = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        self.arrivals.pop((arrives, stage, microbatch), None)
    size = (len(self.inputs[microbatch].tokens), self.hops.hidden)
    made = torch.zeros(size, dtype=self.hops.dtype)
    if action.kind is Kind.F and stage == len(self.hops.ranks) - 1:
        self.arrivals[Kind.RECV_B, stage, microbatch] = Arrival(made)
    elif action.kind is Kind.F:
        self._hand_over(Kind.SEND_F, stage, microbatch, made)
    elif action.kind is not Kind.W and stage > 0:
        self._hand_over(Kind.SEND_B, stage, microbatch, made)


def fixed_waits(
    worker: Worker, *, run_dir: str, pp: int, parallel: dict[str, Any], steps: int, batches: int
) -> None:
    """Train in vain, and leave a run directory with the trace of every step."""
    Execution._compute = wait  # type: ignore[method-assign]
    config = tiny.config(
        pp=pp, parallel=parallel, train={"global_batch_size": batches, "microbatch_size": 1}
    )
    plan = parallel_plan(config.parallel, worker.world_size)
    spec = tiny.llama(num_layers=plan.num_stages)
    if worker.rank == 0:
        with RunDir(Path(run_dir), steps) as folder:
            ranks = range(worker.world_size)
            records = [
                RankRecord(rank=rank, host="here", device="cpu", pid=1, coordinate={})
                for rank in ranks
            ]
            folder.add_launch(plan.to_dict(), records)

    def write(spans: Any) -> None:
        write_trace(Path(run_dir), RankTrace(worker.rank, 1, tuple(spans)))

    tracer = Tracer(range(1, steps + 1), write=write)
    source = fresh_values(config.train.seed)
    run = assemble(config, spec, worker.mesh(plan), source, tracer)
    whole = tiny.batches(steps=1, global_batch=batches, seq_len=5, vocab=spec.vocab_size)[0]
    for number in range(1, steps + 1):
        train_step(run, number, tiny.microbatches(whole, run.batch, 0))
