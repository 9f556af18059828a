"""The state of a run as logical tensors: what this rank writes of it, and how it is put back.

Owns the names of optimizer tensors and the choice of who writes which slice. Files and formats are
the checkpoint folder's business.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rankmesh.checkpoint.manifest import Phases, Shape, Training, state_name
from rankmesh.checkpoint.weights import LocalSlice, Weights
from rankmesh.config.dump import dump
from rankmesh.config.schema import OptimizerConfig, RunConfig
from rankmesh.errors import CheckpointError
from rankmesh.obs.secrets import masked
from rankmesh.optim.segment import Segment
from rankmesh.parallel.buffers import Buffers
from rankmesh.parallel.slots import Piece
from rankmesh.topology.params import Slices
from rankmesh.topology.split import boxes
from rankmesh.train.run import Run, make_optimizer


def plain_config(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain values, as config.toml has them, without secrets."""
    values = masked(tomllib.loads(dump(config)))
    assert isinstance(values, dict)
    return values


def state_kinds(config: OptimizerConfig) -> dict[str, bool]:
    """Kind of optimizer tensor -> whether it is one number for a parameter (else one an
    element)."""
    one = torch.empty(1)
    probe = make_optimizer(config, [Segment("", one, one, decay=False)])
    return {name.removeprefix("."): tensor.dim() == 0 for name, tensor in probe.state().items()}


def state_shapes(config: OptimizerConfig, trained: Mapping[str, Shape]) -> dict[str, Shape]:
    """Name -> global shape of every optimizer tensor of the `trained` parameters."""
    kinds = state_kinds(config)
    return {
        state_name(name, kind): () if scalar else shape
        for name, shape in trained.items()
        for kind, scalar in kinds.items()
    }


def training_record(run: Run, *, samples: int, sizes: Shape, phases: Phases) -> Training:
    """How far the run has come: what a checkpoint says of it beside its tensors."""
    return Training(
        samples=samples,
        sizes=sizes,
        phases=phases,
        optimizer=run.config.optimizer.name,
        frozen=tuple(spec.name for spec in run.table if not spec.trainable),
        config=plain_config(run.config),
        loss_scale=run.scale.state if run.scale is not None else None,
    )


def local_slices(run: Run) -> Iterator[LocalSlice]:
    """What this rank writes: over all ranks every element of weights and optimizer state once.

    Of the ranks that hold a slice the first along tp (of a tied table the first stage's) writes it,
    each what it owns of it; ranks that own the same share the parameters out by size.
    """
    buffers = run.buffers
    writers = _writers(buffers)
    state = run.optimizer.state()
    kinds = state_kinds(run.config.optimizer)
    for one in buffers.pieces.values():
        name, spec = one.name, one.entry.spec
        if writers[name] != buffers.copies.index or not run.parallel.is_first_holder(spec):
            continue
        tensors = {name: buffers.main[name]}
        for kind, scalar in kinds.items() if spec.trainable else ():
            if not scalar:
                tensors[state_name(name, kind)] = state[f"{name}.{kind}"]
            elif all(part.start == 0 for part in _places(run, one)[0]):
                yield LocalSlice(state_name(name, kind), (), (), state[f"{name}.{kind}"])
        for written, tensor in tensors.items():
            for place, part in _boxed(run, one, tensor):
                yield LocalSlice(written, spec.shape, place, part)


def _places(run: Run, one: Piece) -> list[Slices]:
    """The boxes of the logical tensor that a piece consists of."""
    within = boxes(one.entry.shape, one.offset, one.offset + len(one))
    origin = [part.start for part in one.entry.spec.slices(run.mesh.axis_ranks())]
    return [
        tuple(
            slice(part.start + first, part.stop + first)
            for part, first in zip(box, origin, strict=True)
        )
        for box in within
    ]


def _boxed(run: Run, one: Piece, tensor: Tensor) -> Iterator[tuple[Slices, Tensor]]:
    """Each box of a piece, and the part of its flat `tensor` that lies there."""
    start = 0
    for place in _places(run, one):
        shape = [part.stop - part.start for part in place]
        size = math.prod(shape)
        yield place, tensor[start : start + size].view(shape)
        start += size


def _writers(buffers: Buffers) -> dict[str, int]:
    """Parameter -> which of its owners writes it: neighbours in the buffer, about equal bytes."""
    sizes = {one.name: len(one) for one in buffers.pieces.values()}
    total, before, writers = max(1, sum(sizes.values())), 0, {}
    for name, size in sizes.items():
        writers[name] = min(before * buffers.copies.size // total, buffers.copies.size - 1)
        before += size
    return writers


def restore_optimizer(run: Run, weights: Weights) -> None:
    """Put the optimizer state of a checkpoint back, bit for bit where the dtype is the same.

    A parameter that was frozen when the checkpoint was written starts from zero state. The names
    are known to be right. Issues no collective; only this rank's slices are read. Raises
    CheckpointError for damaged files.
    """
    training = weights.manifest.training
    if training is None:
        raise CheckpointError(f"{weights.folder}: holds no training state")
    if run.scale is not None and training.loss_scale is not None:
        run.scale.restore(training.loss_scale)
    state, kinds = run.optimizer.state(), state_kinds(run.config.optimizer)
    for one in run.buffers.pieces.values():
        name = one.name
        if not one.entry.spec.trainable or name in training.frozen:
            continue
        for kind, scalar in kinds.items():
            tensor = state[f"{name}.{kind}"]
            if scalar:
                tensor.copy_(weights.slice(state_name(name, kind), ()))
                continue
            for place, part in _boxed(run, one, tensor):
                part.copy_(weights.slice(state_name(name, kind), place))
