"""Run: all that a training step needs, built once.

Owns the assembly of chunk, optimizer and batch plan from a config, a spec and a mesh. It reads no
file and starts no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankmesh import models
from rankmesh.comm.mesh import Mesh
from rankmesh.config.schema import OptimizerConfig, RunConfig
from rankmesh.nn import LossOptions
from rankmesh.optim.schedule import LrSchedule
from rankmesh.optim.segment import Segment
from rankmesh.optim.update import SGD, AdamW, Optimizer
from rankmesh.parallel.apply import Chunk, Source, parallelize
from rankmesh.parallel.buffers import Buffers
from rankmesh.schedule.actions import Action
from rankmesh.schedule.one_f_one_b import one_f_one_b
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import param_table
from rankmesh.topology.batch import BatchPlan
from rankmesh.topology.params import ParamSpec, Slices

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Run:
    """plan, mesh, model chunk, schedule and optimizer of one process."""

    config: RunConfig
    spec: ModelSpec
    mesh: Mesh
    chunk: Chunk
    actions: tuple[Action, ...]
    batch: BatchPlan
    optimizer: Optimizer
    owned: tuple[Tensor, ...]
    loss: LossOptions
    lr: LrSchedule

    @property
    def speaks(self) -> bool:
        """True on the one rank of a replica that reports the replica's loss."""
        return self.mesh.coordinate.tp == 0


def fresh_values(seed: int) -> Source:
    """A source of initial values derived from (seed, name, index)."""

    def source(spec: ParamSpec, slices: Slices) -> Tensor:
        return models.initial_values(spec.init, spec.name, spec.shape, slices, seed)

    return source


def assemble(config: RunConfig, spec: ModelSpec, mesh: Mesh, source: Source) -> Run:
    """Build everything that a step needs. Issues no collective."""
    train, optimizer = config.train, config.optimizer
    table = param_table(
        spec,
        mesh.plan,
        decay_norms=optimizer.decay_norms,
        decay_biases=optimizer.decay_biases,
        decay_embeddings=optimizer.decay_embeddings,
    )
    chunk = parallelize(
        models.build(spec),
        table,
        mesh,
        source,
        dtype=DTYPES[train.dtype],
        bucket_bytes=int(config.parallel.bucket_mb * 2**20),
    )
    batch = BatchPlan(train.global_batch_size, mesh.plan.dp, train.microbatch_size)
    return Run(
        config=config,
        spec=spec,
        mesh=mesh,
        chunk=chunk,
        actions=one_f_one_b(mesh.plan.pp, batch.num_microbatches)[mesh.coordinate.pp],
        batch=batch,
        optimizer=make_optimizer(optimizer, segments(chunk.buffers)),
        owned=owned_gradients(chunk.buffers),
        loss=LossOptions(z_loss=train.z_loss, label_smoothing=train.label_smoothing),
        lr=LrSchedule(
            kind=optimizer.schedule,
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=config.decay_steps,
            wsd_decay_steps=optimizer.wsd_decay_steps,
        ),
    )


def segments(buffers: Buffers) -> list[Segment]:
    """One segment for each trainable parameter, in the order of the buffers."""
    return [
        Segment(
            name=name,
            param=buffers.params[entry.start : entry.stop],
            grad=buffers.grads[entry.start : entry.stop],
            decay=entry.spec.decay,
        )
        for name, entry in buffers.entries.items()
        if entry.spec.trainable
    ]


def owned_gradients(buffers: Buffers) -> tuple[Tensor, ...]:
    """The gradient elements that this rank owns in the global norm.

    Of a slice held by several tp ranks the first holder owns it; replicas share it out evenly, so
    that none sums alone.
    """
    mesh = buffers.mesh
    axis_ranks = mesh.axis_ranks()
    group = buffers.group
    pieces = []
    for start, stop in _merged(buffers, axis_ranks):
        low = start + (stop - start) * group.index // group.size
        high = start + (stop - start) * (group.index + 1) // group.size
        if low < high:
            pieces.append(buffers.grads[low:high])
    return tuple(pieces)


def _merged(buffers: Buffers, axis_ranks: dict[str, int]) -> list[tuple[int, int]]:
    """Stretches of the gradient buffer that this tp rank owns; neighbours joined."""
    spans: list[tuple[int, int]] = []
    for entry in sorted(buffers.entries.values(), key=lambda entry: entry.start):
        if not (entry.spec.trainable and entry.spec.is_first_holder(axis_ranks)):
            continue
        if spans and spans[-1][1] == entry.start:
            spans[-1] = (spans[-1][0], entry.stop)
        else:
            spans.append((entry.start, entry.stop))
    return spans


def make_optimizer(config: OptimizerConfig, parts: Sequence[Segment]) -> Optimizer:
    """The optimizer that the config names, over these segments."""
    if config.name == "sgd":
        return SGD(parts, momentum=config.momentum, weight_decay=config.weight_decay)
    return AdamW(parts, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
