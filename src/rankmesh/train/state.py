"""The state of a run as logical tensors: what this rank writes of it, and how it is put back.

Owns the names of optimizer tensors and the choice of who writes which slice. Files and formats are
the checkpoint folder's business.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rankmesh.checkpoint.manifest import Phases, Shape, Training, state_name
from rankmesh.checkpoint.weights import LocalSlice, Weights
from rankmesh.config.dump import dump
from rankmesh.config.schema import OptimizerConfig, RunConfig
from rankmesh.errors import CheckpointError
from rankmesh.obs.secrets import masked
from rankmesh.optim.segment import Segment
from rankmesh.parallel.buffers import Buffers
from rankmesh.topology.params import Slices
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
    )


def local_slices(run: Run) -> Iterator[LocalSlice]:
    """What this rank writes: over all ranks every element of weights and optimizer state once.

    Of the ranks that hold a slice the first along tp (of a tied table the first stage's) writes it;
    its replicas share the parameters out by size.
    """
    buffers = run.buffers
    axis_ranks = run.mesh.axis_ranks()
    writers = _writers(buffers)
    state = run.optimizer.state()
    kinds = state_kinds(run.config.optimizer)
    for name, entry in buffers.entries.items():
        if writers[name] != buffers.group.index or not run.parallel.is_first_holder(entry.spec):
            continue
        slices = entry.spec.slices(axis_ranks)
        yield LocalSlice(name, entry.spec.shape, slices, buffers.param(name))
        for kind, scalar in kinds.items() if entry.spec.trainable else ():
            tensor = state[f"{name}.{kind}"]
            if not scalar:
                tensor = tensor.view(entry.shape)
                yield LocalSlice(state_name(name, kind), entry.spec.shape, slices, tensor)
            elif all(s.start == 0 for s in slices):
                yield LocalSlice(state_name(name, kind), (), (), tensor)


def _writers(buffers: Buffers) -> dict[str, int]:
    """Parameter -> which of the replicas writes it: neighbours in the buffer, about equal bytes."""
    sizes = {name: entry.stop - entry.start for name, entry in buffers.entries.items()}
    total, before, writers = max(1, sum(sizes.values())), 0, {}
    for name, size in sizes.items():
        writers[name] = min(before * buffers.group.size // total, buffers.group.size - 1)
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
    state, kinds = run.optimizer.state(), state_kinds(run.config.optimizer)
    axis_ranks = run.mesh.axis_ranks()
    for name, entry in run.buffers.entries.items():
        if not entry.spec.trainable or name in training.frozen:
            continue
        slices = entry.spec.slices(axis_ranks)
        for kind, scalar in kinds.items():
            index: Slices = () if scalar else slices
            tensor = state[f"{name}.{kind}"]
            tensor.copy_(weights.slice(state_name(name, kind), index).view(tensor.shape))
