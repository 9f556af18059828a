"""Jobs of the pipeline tests; they run inside worker processes."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankmesh import models
from rankmesh.data.loader import Microbatch
from rankmesh.nn import Layout, LossOptions
from rankmesh.parallel import execute as executor
from rankmesh.parallel.hops import Hops
from rankmesh.specs.placement import param_table
from rankmesh.testing.oracle import load_values
from rankmesh.testing.worker import Worker
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import Run
from rankmesh.train.step import stage_input, train_step
from tests import tiny
from tests.gloo.field_jobs import start_run
from tests.gloo.parity import Comparison, whole_values


def rows_of(sizes: list[int], seed: int = 1) -> list[Microbatch]:
    """Microbatches of two rows of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate(sizes):
        tokens = torch.randint(0, 61, (2, length + 1), generator=generator)
        samples = torch.tensor([2 * number, 2 * number + 1])
        made.append(Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), samples))
    return made


def whole_gradients(run: Run, batches: list[Microbatch]) -> dict[str, Tensor]:
    """Gradients of the sum of losses on one process, by plain autograd."""
    model = models.build(run.spec, device="cpu", dtype=torch.float64)
    load_values(model, whole_values(param_table(run.spec, ParallelPlan()), run.config.train.seed))
    for batch in batches:
        layout = Layout.plain(*batch.tokens.shape)
        hidden, _ = model(batch.tokens.flatten(), layout)
        model.loss(hidden, batch.labels.flatten(), LossOptions()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(run: Run, expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a gradient."""
    check = Comparison(run, 1e-9, 1e-12)
    for name in run.buffers.entries:
        reference = expected[name]
        # Of gradients that are zero but for rounding only the size says anything.
        scale = max(float(reference.abs().max()), 1e-3)
        check.tensor("gradient", name, run.buffers.grad(name), reference, scale)
    return check.largest["gradient"]


def lengths(worker: Worker, tp: int, sizes: list[int]) -> float:
    """Gradients of microbatches of these lengths, against one process."""
    spec = tiny.llama()
    batch = {"global_batch_size": 2 * len(sizes), "microbatch_size": 2}
    run = start_run(worker, spec, tp=tp, pp=2, train=batch)
    batches = rows_of(sizes)
    inputs = [stage_input(one, run.mesh, dropout=None) for one in batches]
    expected, worst = whole_gradients(run, batches), 0.0
    # Once with headers, once without.
    for _ in range(2):
        run.buffers.begin_step(len(inputs))
        executor.execute(run.actions, run.parallel, run.hops, inputs, LossOptions())
        run.buffers.finish()
        worst = max(worst, compare(run, expected))
    return worst


def several_runs(worker: Worker, runs: int) -> float:
    """Two microbatches a run of the schedule, and one step."""
    run = start_run(worker, tiny.gpt2(), pp=2, train={"global_batch_size": 4, "microbatch_size": 2})
    batches = rows_of([6, 6] * runs)
    inputs = [stage_input(one, run.mesh, dropout=None) for one in batches]
    run.buffers.begin_step(len(inputs))
    for first in range(0, len(inputs), 2):
        part = inputs[first : first + 2]
        executor.execute(run.actions, run.parallel, run.hops, part, LossOptions())
    run.buffers.finish()
    return compare(run, whole_gradients(run, batches))


def sleeping(
    worker: Worker, schedule: str, chunks: int, microbatches: int, steps: int
) -> list[float]:
    """Losses of a run whose ranks sleep at random; each is that of the same run without sleep."""
    spec = tiny.llama(num_layers=worker.world_size * chunks)
    options: dict[str, Any] = {
        "pp": worker.world_size,
        "parallel": {"schedule": schedule, "num_chunks": chunks},
        "train": {"global_batch_size": microbatches, "microbatch_size": 1},
    }
    plain = executor.Execution._compute
    dice = random.Random(worker.rank)

    def slow(self: executor.Execution, action: Any) -> None:
        time.sleep(dice.random() * 0.005)
        plain(self, action)
        time.sleep(dice.random() * 0.005)

    losses = []
    for compute in (plain, slow):
        executor.Execution._compute = compute  # type: ignore[method-assign]
        run = start_run(worker, spec, **options)
        losses.append(
            [train_step(run, n, rows_of([5] * microbatches, n)).loss for n in range(1, steps + 1)]
        )
    assert losses[0] == losses[1]
    return losses[1]


def strange_message(worker: Worker, fault: str) -> None:
    """Rank 1 expects another type or width, or takes itself for another stage."""
    run = start_run(worker, tiny.llama(), pp=2)
    hops = run.hops
    if worker.rank == 0 and fault == "dtype":
        run.hops.commit = lambda *args: _narrowed(hops, *args)  # type: ignore[method-assign]
    if worker.rank == 1 and fault == "width":
        hops.hidden += 1
    actions = run.actions
    if worker.rank == 0 and fault == "stage":
        # Microbatch 1 goes first.
        swap = {0: 1, 1: 0}
        actions = tuple(
            replace(action, microbatch=swap.get(action.microbatch, action.microbatch))
            for action in actions
        )
    batches = tiny.microbatches(
        tiny.batches(steps=1, global_batch=7, seq_len=7, vocab=61)[0], run.batch, 0
    )
    train_step(replace(run, actions=actions), 1, batches)


def _narrowed(hops: Hops, actions: Any, outgoing: Any, rows: Any) -> Any:
    """The message in fp32."""
    narrow = {key: tensor.float() for key, tensor in outgoing.items()}
    outgoing.clear()
    return Hops.commit(hops, actions, narrow, rows)


def swapped(worker: Worker) -> None:
    """Rank 0 takes rank 2 for its neighbour, and rank 2 takes rank 0 for its own."""
    run = start_run(worker, tiny.llama(num_layers=4), pp=4)
    run.hops.ranks = {0: (0, 2, 1, 3), 2: (1, 0, 2, 3)}.get(worker.rank, run.hops.ranks)
    batch = tiny.batches(steps=1, global_batch=7, seq_len=7, vocab=61)[0]
    train_step(run, 1, tiny.microbatches(batch, run.batch, 0))


def absent(worker: Worker) -> None:
    """Rank 0 sends nothing for longer than the groups' time-out."""
    worker.timeout = 3.0
    run = start_run(worker, tiny.llama(), pp=2)
    if worker.rank == 0:
        time.sleep(12)
        return
    batch = tiny.batches(steps=1, global_batch=7, seq_len=7, vocab=61)[0]
    train_step(run, 1, tiny.microbatches(batch, run.batch, 0))


def kept(worker: Worker, microbatches: int) -> int:
    """The most messages that were on their way at once, in a step whose headers are not sent."""
    train = {"global_batch_size": microbatches, "microbatch_size": 1}
    run = start_run(worker, tiny.llama(), pp=2, train=train)
    run.hops.checked = False
    most = 0
    plain = run.hops._let_go

    def let_go(count: int) -> None:
        nonlocal most
        plain(count)
        most = max(most, len(run.hops._sent))

    run.hops._let_go = let_go  # type: ignore[method-assign]
    train_step(run, 1, rows_of([5] * microbatches))
    return most
