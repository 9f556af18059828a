"""One optimizer step: microbatches, reduction, norm, update.

Owns the order of a step and its numbers: the loss is the sum of token losses of the global batch
divided by its number of valid targets. It has no branch on a degree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh
from rankmesh.data.loader import Microbatch
from rankmesh.errors import StepError
from rankmesh.nn import IGNORED, DropoutKey, Layout
from rankmesh.obs.trace import OPTIMIZER
from rankmesh.optim.norm import agree, clip_factor
from rankmesh.parallel.execute import StageInput, execute
from rankmesh.train.diagnosis import diagnose
from rankmesh.train.run import Run
from rankmesh.train.tracing import action_watch


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, equal on all ranks. `tokens` counts positions of real samples, `valid`
    targets. skipped: the gradient overflowed under a loss scale; the norm is then given as 0.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    valid: int
    stop: bool = False
    skipped: bool = False


def stage_input(batch: Microbatch, mesh: Mesh, *, dropout: tuple[int, int] | None) -> StageInput:
    """A microbatch on the device; `dropout` is (seed, step), or None where no mask is drawn."""
    rows, length = batch.tokens.shape
    samples = batch.samples.to(mesh.device)
    key = None if dropout is None else DropoutKey(*dropout, samples)
    layout = Layout.plain(
        rows, length, device=mesh.device, dropout=key, held=_held(rows * length, mesh)
    )
    return StageInput(
        tokens=batch.tokens.to(mesh.device).flatten(),
        labels=batch.labels.to(mesh.device).flatten(),
        layout=layout,
    )


def _held(tokens: int, mesh: Mesh) -> slice:
    """The tokens whose residual stream this rank holds: its slice under sequence parallelism."""
    if not mesh.plan.sequence_parallel:
        return slice(None)
    part = tokens // mesh.plan.tp
    return slice(mesh.coordinate.tp * part, (mesh.coordinate.tp + 1) * part)


def count(batches: Sequence[Microbatch], mesh: Mesh) -> tuple[int, int]:
    """(valid targets, tokens of real samples) of the global batch; one all-reduce over the
    replicas.
    """
    valid = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    tokens = sum(int((batch.samples >= 0).sum()) * batch.tokens.shape[1] for batch in batches)
    both = torch.tensor([valid, tokens], dtype=torch.int64, device=mesh.device)
    mesh.seam.all_reduce(both, mesh.group("dp_cp"), "count").wait()
    agreed: list[int] = both.tolist()
    return agreed[0], agreed[1]


def train_step(
    run: Run, number: int, batches: Sequence[Microbatch], *, stop: bool = False
) -> StepResult:
    """Step `number` (from 1) on this replica's microbatches.

    Collectives: the count, those of the model, one for each gradient bucket, those of `grad_sum`,
    one for the norm, with ZeRO one more for each bucket. With a loss scale a gradient that
    overflows on any rank skips the step on all. Raises StepError on every rank when loss
    or gradient is not finite; the weights are then untouched.
    """
    with run.trace.step(number):
        return _step(run, number, batches, stop)


def _step(run: Run, number: int, batches: Sequence[Microbatch], stop: bool) -> StepResult:
    skipped = run.scale.skipped if run.scale is not None else 0
    lr, trace = run.lr.at(number - skipped), run.trace
    with trace.open(OPTIMIZER, "count"):
        valid, tokens = count(batches, run.mesh)
    if valid == 0:
        # Nothing was agreed on: a wish to stop waits for the next step.
        return StepResult(number, 0.0, 0.0, lr, tokens, 0)
    dropout = (run.config.train.seed, number)
    inputs = [stage_input(batch, run.mesh, dropout=dropout) for batch in batches]
    buffers = run.buffers
    buffers.begin_step(len(inputs))
    watch = action_watch(trace)
    # Gradients of a sum over tokens would leave fp16's range: a scale is per token.
    scale = run.scale.value / tokens if run.scale is not None else 1.0
    loss_sum = execute(run.actions, run.parallel, run.hops, inputs, run.loss, watch, scale=scale)
    with trace.open(OPTIMIZER, "buckets"):
        buffers.finish()
    with trace.open(OPTIMIZER, "norm"):
        verdict = agree(run.owned, _spoken(run, loss_sum), run.mesh, stop=stop)
    if run.scale is not None and math.isfinite(verdict.loss_sum):
        run.scale.update(verdict.finite)
        if not verdict.finite:
            return StepResult(
                number, verdict.loss_sum / valid, 0.0, lr, tokens, valid, verdict.stop, skipped=True
            )
    if not verdict.finite:
        raise StepError(
            f"step {number}: {diagnose(run, inputs)}; the weights keep their last values"
        )
    norm = verdict.norm / (valid * scale)
    with trace.open(OPTIMIZER, "clip"):
        factor = clip_factor(norm, run.config.optimizer.clip_grad) / (valid * scale)
        for owned in buffers.owned():
            owned.mul_(factor)
    with trace.open(OPTIMIZER, "update"):
        run.optimizer.step(lr)
        buffers.publish()
    return StepResult(number, verdict.loss_sum / valid, norm, lr, tokens, valid, verdict.stop)


def _spoken(run: Run, loss_sum: Tensor) -> Tensor:
    """The loss of a replica counts once, though each tp rank of its last stage holds it."""
    return loss_sum if run.speaks else torch.zeros_like(loss_sum)
