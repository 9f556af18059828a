"""Saving a run's weights: which rank writes which slices, and where.

Owns the choice of writers; the format is the checkpoint folder's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from rankmesh.checkpoint.weights import LocalSlice, write_weights
from rankmesh.comm.exchange import Store, barrier, span
from rankmesh.comm.mesh import Mesh
from rankmesh.errors import MeshError, StepError
from rankmesh.train.run import Run

# Files are waited for outside any collective, so that a slow disk meets no collective's time-out.
_PATIENCE_S = 24 * 3600.0


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the weights after `step` lie."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def store_barrier(store: Store, mesh: Mesh, name: str) -> Callable[[], None]:
    """A barrier of all ranks through the rendezvous store, to be passed any number of times; a
    rank's failure ends it by the lifeline. `name` tells it from others of the same store.
    """
    numbers = itertools.count()

    def wait() -> None:
        absent = barrier(
            store,
            f"{name}/{next(numbers)}",
            rank=mesh.rank,
            world_size=mesh.plan.world_size,
            limit_s=_PATIENCE_S,
        )
        if absent:
            raise MeshError(f"{name}: {span(absent)} did not come within {_PATIENCE_S:g} s")

    return wait


def save_weights(
    run: Run, folder: Path, step: int, wait: Callable[[], None], tokenizer: str | None
) -> None:
    """Write the weights after `step`; every rank calls it.

    Each logical element is written once, by the first of the tp ranks that hold it in the first
    replica; nothing is gathered. Raises StepError for a weight that is not finite: a checkpoint
    can always be trained on.
    """
    axis_ranks = run.mesh.axis_ranks()
    buffers = run.chunk.buffers
    mine = [
        LocalSlice(name, entry.spec.shape, entry.spec.slices(axis_ranks), buffers.param(name))
        for name, entry in buffers.entries.items()
        if buffers.group.index == 0 and entry.spec.is_first_holder(axis_ranks)
    ]
    for held in mine:
        if not bool(torch.isfinite(held.tensor).all()):
            raise StepError(f"step {step}: {held.name} is not finite; the weights are not saved")
    write_weights(
        folder,
        mine,
        spec=run.spec,
        step=step,
        rank=run.mesh.rank,
        barrier=wait,
        tokenizer=tokenizer,
    )
