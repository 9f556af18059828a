"""Checks on a mesh of what the parity of a sound run does not reach: reductions that start too
early or too late, parameters without a gradient, the verdict of a step, evaluation, the loop.

Each runs on every rank of a job and raises AssertionError with a message of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh import models
from rankmesh.comm.mesh import Mesh, fake_mesh
from rankmesh.comm.seam import Group, Seam, TorchTransport
from rankmesh.config.load import load_config
from rankmesh.data.order import SampleOrder
from rankmesh.data.samples import Samples
from rankmesh.errors import MeshError, StepError
from rankmesh.nn import Layout, LossOptions
from rankmesh.optim.norm import agree
from rankmesh.parallel.hops import Hops
from rankmesh.schedule import Action, Kind
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import kv_replicas, param_table
from rankmesh.testing.oracle import WholeBatch, load_values
from rankmesh.testing.together import run_together
from rankmesh.testing.worker import Worker
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.build import prepare_job
from rankmesh.train.evaluate import evaluate
from rankmesh.train.loop import Hooks, train_loop
from rankmesh.train.run import Run, assemble, fresh_values
from rankmesh.train.step import train_step
from tests import runs, tiny
from tests.gloo import field_jobs, parity, zero_jobs


class PromptTransport(TorchTransport):
    """All-reduces that have ended when they return."""

    def all_reduce(self, tensor: Tensor, group: Group, op: str) -> None:
        """At once, so that a sum taken too early always lacks what comes later."""
        super().all_reduce(tensor, group, op).wait()


class PromptWorker(Worker):
    """A worker whose meshes have a PromptTransport."""

    def mesh(self, plan: ParallelPlan, **options: Any) -> Mesh:
        """The usual mesh over another transport."""
        made = super().mesh(plan, **options)
        return replace(made, seam=Seam(PromptTransport(), made.seam.ledger))


def prompt_parity(worker: Worker, **args: Any) -> dict[str, float]:
    """`parity.case` without a race between a reduction and the gradients that it must wait for."""
    prompt = PromptWorker(worker.rank, worker.world_size, worker.folder, worker.timeout)
    return parity.case(prompt, **args)


def overlap(worker: Worker) -> None:
    """Buckets go out while backward runs, none before the last microbatch; rank 0 of 4 is played
    alone.
    """
    mesh = fake_mesh(ParallelPlan(tp=2, dp=2), 0)
    config = tiny.config(tp=2, dp=2)
    run = assemble(config, tiny.llama(), mesh, fresh_values(config.train.seed))
    batch = tiny.batches(steps=1, global_batch=7, seq_len=11, vocab=61)[0]
    train_step(run, 1, tiny.microbatches(batch, run.batch, 0))
    phases = [event.phase for event in mesh.seam.ledger.events]
    last_forward = max(i for i, phase in enumerate(phases) if phase == "forward")
    last_backward = max(i for i, phase in enumerate(phases) if phase == "backward")
    first = phases.index("gradients")
    assert first > last_forward, "overlap: a bucket goes out before the last microbatch"
    assert first < last_backward, "overlap: no bucket goes out before backward has ended"


def unused(worker: Worker) -> None:
    """A parameter without a gradient in a step has the gradient zero, not its last one."""
    for step, (never, second) in enumerate(field_jobs.sometimes_used(worker, 1, 2), start=1):
        assert never == 0.0, f"unused: a parameter never used has {never} in step {step}"
        assert (second > 0) == (step % 2 == 0), f"unused: {second} in step {step}"


def _assembled(worker: Worker, spec: ModelSpec, tp: int, dp: int, pp: int = 1) -> Run:
    plan = ParallelPlan(tp=tp, dp=dp, pp=pp)
    mesh = worker.mesh(plan, kv_replicas=kv_replicas(spec, plan))
    config = tiny.config(tp=tp, dp=dp, pp=pp)
    return assemble(config, spec, mesh, fresh_values(config.train.seed))


def verdict(worker: Worker) -> None:
    """What one rank knows, all decide by: squares, loss, a stop and an infinity of rank 1."""
    mesh = worker.mesh(ParallelPlan(dp=worker.world_size))
    last = worker.rank == worker.world_size - 1
    piece = torch.full((3,), float(worker.rank + 1), dtype=torch.float64)
    loss = torch.tensor([10.0 * (worker.rank + 1)])
    for stop in (False, True):
        made = agree([piece], loss, mesh, stop=stop and last)
        assert made.stop is stop, f"verdict: stop is {made.stop} where a rank said {stop}"
    squares = sum(3.0 * (rank + 1) ** 2 for rank in range(worker.world_size))
    assert math.isclose(made.norm, math.sqrt(squares)), f"verdict: norm {made.norm}"
    assert made.loss_sum == 30.0 and made.finite, f"verdict: loss {made.loss_sum}"
    nothing = agree([torch.zeros(3)], loss, mesh)
    assert nothing.finite and nothing.norm == 0.0, "verdict: a gradient of zero is not finite"
    for broken in (math.inf, math.nan):
        made = agree([piece * (broken if last else 1.0)], loss, mesh)
        assert not made.finite, f"verdict: {broken} of another rank passes for finite"


def not_finite(worker: Worker) -> None:
    """A NaN that only rank 1 has stops all ranks, names rank 1 and leaves the weights alone."""
    run = _assembled(worker, tiny.llama(), tp=1, dp=worker.world_size)
    if worker.rank == 1:
        run.buffers.param("norm.weight")[0] = math.nan
    before = run.buffers.params.clone()
    batch = tiny.batches(steps=1, global_batch=7, seq_len=11, vocab=61)[0]
    said = ""
    try:
        train_step(run, 1, tiny.microbatches(batch, run.batch, run.mesh.coordinate.dp))
    except StepError as error:
        said = str(error)
    assert said, "not finite: the step went through"
    assert said.startswith("step 1: ") and "first on rank 1;" in said, f"not finite: {said}"
    same = torch.equal(before.nan_to_num(), run.buffers.params.nan_to_num())
    assert same, "not finite: the weights moved"


@dataclass
class Noise:
    """A token file of pseudo-random ids below 61."""

    num_tokens: int
    prefix: str = "noise"
    meta: None = None

    def tokens(self, start: int, stop: int) -> Any:
        """Ids of a stretch."""
        return (np.arange(start, stop) ** 2 * 7919 + 31) % 1009 % 61


def overflow(worker: Worker) -> None:
    """An infinity of rank 1 skips the step on both, and only that one."""
    skipped, scales, rates, still = zero_jobs.overflow(worker, 1)
    assert skipped == [False, True, False, False], f"overflow: skipped {skipped}"
    assert still, "overflow: a skipped step moved the weights"
    assert scales == [1024.0, 512.0, 512.0, 512.0], f"overflow: scales {scales}"
    assert rates == [0.01, 0.02, 0.02, 0.03], f"overflow: rates {rates}"


def headers(worker: Worker) -> None:
    """Microbatch 1 arrives where microbatch 0 is expected."""

    def rank_main(seam: Seam, group: Group) -> str:
        mesh = Mesh(ParallelPlan(pp=2), group.index, torch.device("cpu"), seam, {"pp": group})
        hops = Hops(mesh=mesh, ranks=(0, 1), hidden=3, dtype=torch.float64)
        sent = {(Kind.SEND_F, 0, 1): torch.ones(4, 3, dtype=torch.float64)}
        sending = group.index == 0
        action = Action(Kind.SEND_F, 0, 1) if sending else Action(Kind.RECV_F, 1, 0)
        try:
            hops.commit([action], sent, [4, 4])
        except MeshError as error:
            return str(error)
        return ""

    said = run_together(2, rank_main, name="pp")
    assert "expected the activation of microbatch 0" in said[1], (
        f"a message of another microbatch passed: {said}"
    )


def evaluation(worker: Worker, *, tp: int, dp: int, pp: int = 1) -> None:
    """The mean over every target of a set that fills no whole batch, without dropout."""
    length, count = 11, 9
    samples = Samples([Noise(count * length + 1)], length)  # type: ignore[list-item]
    spec = tiny.llama(dropout=0.3, attention_dropout=0.3)
    run = _assembled(worker, spec, tp, dp, pp)
    whole = models.build(spec, device="cpu", dtype=torch.float64)
    load_values(
        whole, parity.whole_values(param_table(spec, ParallelPlan()), run.config.train.seed)
    )
    rows = torch.stack([torch.from_numpy(samples.sample(i)) for i in range(count)])
    with torch.no_grad():
        hidden, _ = whole(rows[:, :-1].flatten(), Layout.plain(count, length))
        total = whole.loss(hidden, rows[:, 1:].flatten(), LossOptions())
    expected = float(total) / (count * length)
    made = evaluate(run, samples)
    assert abs(made - expected) < 1e-9, f"evaluation: {made} against {expected}"


def loop(worker: Worker) -> None:
    """The losses of a run on dp are those of the oracle on the samples that the order names."""
    folder = worker.folder / f"data-{worker.rank}"
    folder.mkdir()
    run_dir = worker.folder / "run"
    changes = [f"parallel.dp={worker.world_size}", "train.dtype=fp64", "train.steps=3"]
    changes += ["model.dropout=0.1", "data.valid=[]", f"log.run_dir={run_dir}"]
    config = load_config(runs.write_config(folder), changes)
    job = prepare_job(config, worker.world_size)
    run = assemble(config, job.spec, worker.mesh(job.plan), job.source)
    order, size = SampleOrder(config.data.seed, len(job.train)), config.train.global_batch_size
    batches = []
    for step in range(3):
        numbers = range(step * size, (step + 1) * size)
        rows = [torch.from_numpy(job.train.sample(order.index(k))) for k in numbers]
        whole = torch.stack(rows)
        batches.append(WholeBatch(whole[:, :-1], whole[:, 1:], torch.tensor(numbers)))
    expected, _ = parity.oracle_trace(run, batches, [config.optimizer.lr] * 3)
    made = train_loop(run, job, run_dir, Hooks(report=id, wait=dist.barrier))
    for step, (ours, theirs) in enumerate(zip(made.losses, expected.losses, strict=True), start=1):
        assert abs(ours - theirs) < 1e-9, f"loop: loss of step {step}: {ours} against {theirs}"
