"""Jobs of the ZeRO tests; they run inside worker processes."""

from __future__ import annotations

import torch

from rankmesh.errors import MeshError
from rankmesh.testing.worker import Worker
from rankmesh.train.replicas import replica_check
from rankmesh.train.step import train_step
from tests import tiny
from tests.gloo.field_jobs import start_run


def kept_elements(worker: Worker, zero: int) -> tuple[int, int]:
    """Elements of the first moment and of main gradients that this rank keeps after a step."""
    run = start_run(
        worker,
        tiny.llama(),
        dp=worker.world_size,
        parallel={"zero": zero},
        optimizer={"name": "adamw"},
    )
    batch = tiny.batches(steps=1, global_batch=7, seq_len=8, vocab=61)[0]
    train_step(run, 1, tiny.microbatches(batch, run.batch, run.mesh.coordinate.dp))
    moments = sum(len(one) for name, one in run.optimizer.state().items() if name.endswith(".m"))
    memories = [bucket.memory for bucket in run.buffers.buckets]
    if zero == 2:
        assert all(memory is None for memory in memories)
    return moments, run.buffers.grads.untyped_storage().nbytes() // 8


def flipped_bit(worker: Worker, tp: int, dp: int, pp: int, zero: int, what: str) -> str:
    """What the check says after the second step, before which a bit of rank 1 has flipped."""
    spec = tiny.llama(tie_embeddings=pp > 1)
    parallel = {"zero": zero}
    options = {"optimizer": {"name": "adamw"}, "parallel": parallel}
    run = start_run(worker, spec, tp=tp, dp=dp, pp=pp, **options)
    check = replica_check(run, worker.store())
    batches = tiny.batches(steps=2, global_batch=7, seq_len=8, vocab=61)
    for number, batch in enumerate(batches, start=1):
        train_step(run, number, tiny.microbatches(batch, run.batch, run.mesh.coordinate.dp))
        if number == 2 and worker.rank == 1:
            state = run.optimizer.state()
            tensor = state[what] if what in state else run.buffers.param(what)
            tensor.view(-1).view(torch.int64)[0] ^= 1
        try:
            check(number)
        except MeshError as error:
            return str(error)
    return ""


def overflow(worker: Worker, pp: int) -> tuple[list[bool], list[float], list[float], bool]:
    """Four steps of fp16, in the second of which a gradient of the last rank is infinite: which
    were skipped, the scale after each, their rates, and whether the skipped one changed nothing.
    """
    train = {"dtype": "fp16", "loss_scale": 1024.0, "loss_scale_window": 100}
    optimizer = {"lr": 0.1, "schedule": "linear", "warmup_steps": 10, "decay_steps": 100}
    run = start_run(worker, tiny.llama(), dp=2, pp=pp, train=train, optimizer=optimizer)
    skipped, scales, rates, still = [], [], [], True
    slot = run.buffers.slots[0]
    plain = slot._deposited

    def spoiled() -> None:
        slot.grad.view(-1)[0] = float("inf")
        plain()

    batches = tiny.batches(steps=4, global_batch=7, seq_len=8, vocab=61)
    for number, batch in enumerate(batches, start=1):
        before = run.buffers.params.clone()
        strike = number == 2 and worker.rank == worker.world_size - 1
        slot._deposited = spoiled if strike else plain  # type: ignore[method-assign]
        result = train_step(
            run, number, tiny.microbatches(batch, run.batch, run.mesh.coordinate.dp)
        )
        assert run.scale is not None
        skipped.append(result.skipped)
        scales.append(run.scale.value)
        rates.append(round(result.lr, 12))
        if result.skipped:
            still = torch.equal(before, run.buffers.params)
    return skipped, scales, rates, still
