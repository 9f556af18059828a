"""Run: all that a training step needs, built once.

Owns the assembly of chunk, optimizer and batch plan from a config, a spec and a mesh. It reads no
file and starts no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankmesh import models
from rankmesh.comm.mesh import Mesh
from rankmesh.config.schema import OptimizerConfig, RunConfig
from rankmesh.nn import LossOptions
from rankmesh.obs.trace import NO_TRACE, Tracer
from rankmesh.optim.scaler import LossScale
from rankmesh.optim.schedule import LrSchedule
from rankmesh.optim.segment import Segment
from rankmesh.optim.update import SGD, AdamW, Optimizer
from rankmesh.parallel.apply import Chunk, Parallel, Source, parallelize
from rankmesh.parallel.buffers import Buffers
from rankmesh.parallel.hops import Hops
from rankmesh.schedule import Action, Kind, stage_ranks
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import param_table, stage_layers
from rankmesh.topology.batch import BatchPlan
from rankmesh.topology.params import ParamSpec, ParamTable, Slices
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.schedules import forward_schedule, training_schedule

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Run:
    """plan, mesh, model chunks, schedule and optimizer of one process."""

    config: RunConfig
    spec: ModelSpec
    mesh: Mesh
    table: ParamTable
    parallel: Parallel
    hops: Hops
    actions: tuple[Action, ...]
    batch: BatchPlan
    optimizer: Optimizer
    owned: tuple[Tensor, ...]
    loss: LossOptions
    lr: LrSchedule
    scale: LossScale | None
    trace: Tracer

    @property
    def buffers(self) -> Buffers:
        """Parameters and main gradients of this rank."""
        return self.parallel.buffers

    @property
    def speaks(self) -> bool:
        """True on the one rank of a replica that reports the replica's loss."""
        place = self.mesh.coordinate
        return place.tp == 0 and place.pp == self.mesh.plan.last_stage_pp

    def forward_actions(self, microbatches: int) -> tuple[Action, ...]:
        """This rank's part of a forward pass alone, in the order of the training schedule."""
        return forward_schedule(self.mesh.plan, microbatches)[self.mesh.coordinate.pp]


def fresh_values(seed: int) -> Source:
    """A source of initial values derived from (seed, name, index)."""

    def source(spec: ParamSpec, slices: Slices) -> Tensor:
        return models.initial_values(spec.init, spec.name, spec.shape, slices, seed)

    return source


def assemble(
    config: RunConfig, spec: ModelSpec, mesh: Mesh, source: Source, trace: Tracer = NO_TRACE
) -> Run:
    """Build everything that a step needs. Issues no collective."""
    mesh = replace(mesh, seam=mesh.seam.traced(trace))
    plan, train, optimizer = mesh.plan, config.train, config.optimizer
    table = param_table(
        spec,
        plan,
        decay_norms=optimizer.decay_norms,
        decay_biases=optimizer.decay_biases,
        decay_embeddings=optimizer.decay_embeddings,
    )
    batch = BatchPlan(train.global_batch_size, plan.dp, train.microbatch_size)
    schedule = training_schedule(config.parallel, plan, batch.num_microbatches)
    actions = schedule[mesh.coordinate.pp]
    dtype = DTYPES[train.dtype]
    chunks = _chunks(spec, plan, actions)
    parallel = parallelize(
        chunks,
        table,
        mesh,
        source,
        dtype=dtype,
        bucket_bytes=int(config.parallel.bucket_mb * 2**20),
    )
    return Run(
        config=config,
        spec=spec,
        mesh=mesh,
        table=table,
        parallel=parallel,
        hops=Hops(
            mesh=mesh,
            ranks=stage_ranks(plan.schedule, plan.pp, plan.num_chunks),
            hidden=spec.hidden_size,
            dtype=dtype,
            always=config.log.debug,
        ),
        actions=actions,
        batch=batch,
        optimizer=make_optimizer(optimizer, segments(parallel.buffers)),
        owned=owned_gradients(parallel),
        loss=LossOptions(z_loss=train.z_loss, label_smoothing=train.label_smoothing),
        lr=LrSchedule(
            kind=optimizer.schedule,
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=config.decay_steps,
            wsd_decay_steps=optimizer.wsd_decay_steps,
        ),
        scale=(
            LossScale(train.loss_scale, train.loss_scale_window) if train.dtype == "fp16" else None
        ),
        trace=trace,
    )


def _chunks(spec: ModelSpec, plan: ParallelPlan, actions: Sequence[Action]) -> list[Chunk]:
    """The stages that `actions` run; the one whose gradients are complete last comes first."""
    layers, last = stage_layers(spec, plan), plan.num_stages - 1
    backwards = [action.stage for action in actions if action.kind in (Kind.B, Kind.W)]
    return [
        Chunk(
            stage,
            models.build(spec, layers=layers[stage], first=stage == 0, last=stage == last),
        )
        for stage in dict.fromkeys(reversed(backwards))
    ]


def segments(buffers: Buffers) -> list[Segment]:
    """What this rank updates of each trainable parameter, in the order of the buffers."""
    return [
        Segment(
            name=one.name,
            param=buffers.main[one.name],
            grad=one.grad,
            decay=one.entry.spec.decay,
        )
        for one in buffers.pieces.values()
        if one.entry.spec.trainable
    ]


def owned_gradients(parallel: Parallel) -> tuple[Tensor, ...]:
    """The gradient elements that this rank counts in the global norm.

    Of a slice held by several tp ranks the first holder counts it, of a table held by two stages
    the first one; ranks that own the same elements share them out evenly, so that none sums alone.
    """
    buffers = parallel.buffers
    copies = buffers.copies
    counted = []
    for start, stop in _merged(parallel):
        low = start + (stop - start) * copies.index // copies.size
        high = start + (stop - start) * (copies.index + 1) // copies.size
        if low < high:
            counted.append(buffers.grads[low:high])
    return tuple(counted)


def _merged(parallel: Parallel) -> list[tuple[int, int]]:
    """Stretches of the gradient buffer that this tp rank counts; neighbours joined."""
    spans: list[tuple[int, int]] = []
    for one in sorted(parallel.buffers.pieces.values(), key=lambda one: one.place):
        if not (one.entry.spec.trainable and parallel.is_first_holder(one.entry.spec)):
            continue
        if spans and spans[-1][1] == one.place:
            spans[-1] = (spans[-1][0], one.place + len(one))
        else:
            spans.append((one.place, one.place + len(one)))
    return spans


def make_optimizer(config: OptimizerConfig, parts: Sequence[Segment]) -> Optimizer:
    """The optimizer that the config names, over these segments."""
    if config.name == "sgd":
        return SGD(parts, momentum=config.momentum, weight_decay=config.weight_decay)
    return AdamW(parts, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
