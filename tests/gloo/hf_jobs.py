"""Jobs that train from a Hugging Face folder; they run inside worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankmesh.checkpoint.source import open_weights
from rankmesh.specs.placement import kv_replicas
from rankmesh.testing.worker import Worker
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import assemble
from rankmesh.train.step import train_step
from tests import tiny


def train(
    worker: Worker,
    *,
    folder: str,
    tp: int,
    dp: int,
    steps: int,
    global_batch: int,
    seq_len: int,
    optimizer: dict[str, Any],
) -> dict[str, list[float]]:
    """Losses and gradient norms of the first steps, in fp32, from the weights in `folder`."""
    source = open_weights(Path(folder))
    spec, plan = source.spec, ParallelPlan(tp=tp, dp=dp)
    train = {"steps": steps, "global_batch_size": global_batch, "dtype": "fp32"}
    config = tiny.config(tp=tp, dp=dp, train=train, optimizer=optimizer)
    mesh = worker.mesh(plan, kv_replicas=kv_replicas(spec, plan))
    run = assemble(config, spec, mesh, lambda param, slices: source.slice(param.name, slices))
    batches = tiny.batches(
        steps=steps, global_batch=global_batch, seq_len=seq_len, vocab=spec.vocab_size
    )
    results = [
        train_step(run, number, tiny.microbatches(batch, run.batch, mesh.coordinate.dp))
        for number, batch in enumerate(batches, start=1)
    ]
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
    }
