"""Saving a run: when all ranks meet, where the checkpoint goes, and which older ones may then go.

Owns that order. What is saved is state.py's, the format the checkpoint folder's business.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rankmesh.checkpoint.manifest import Training
from rankmesh.checkpoint.shelf import retire, shelf, step_folder
from rankmesh.checkpoint.weights import write_weights
from rankmesh.comm.exchange import Store, barrier, span
from rankmesh.comm.mesh import Mesh
from rankmesh.errors import MeshError, StepError
from rankmesh.train.run import Run
from rankmesh.train.state import local_slices

# Files are waited for outside any collective, so that a slow disk meets no collective's time-out.
_PATIENCE_S = 24 * 3600.0


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


def save_checkpoint(
    run: Run,
    run_dir: Path,
    *,
    step: int,
    training: Training,
    wait: Callable[[], None],
    tokenizer: str | None,
) -> str:
    """Write the state after `step`; every rank calls it.

    Returns a line about it on rank 0, "" elsewhere. Each logical element is written once; nothing
    is gathered. Once it is complete, rank 0 removes the older ones that `checkpoint.keep` and
    `checkpoint.keep_every` do not keep. Raises StepError for a weight that is not finite: a
    checkpoint can always be trained on.
    """
    _check_finite(run, step)
    began = time.perf_counter()
    folder = step_folder(run_dir, step)
    write_weights(
        folder,
        local_slices(run),
        spec=run.spec,
        step=step,
        rank=run.mesh.rank,
        barrier=wait,
        tokenizer=tokenizer,
        training=training,
    )
    if run.mesh.rank != 0:
        return ""
    size = sum(path.stat().st_size for path in folder.iterdir())
    line = f"checkpoint {folder}: {size / 1e6:,.1f} MB in {time.perf_counter() - began:.2f} s"
    return line + _retired(run, shelf(run_dir))


def _retired(run: Run, folder: Path) -> str:
    """Words about the checkpoints that had to go; one that cannot be removed ends no run."""
    keep, keep_every = run.config.checkpoint.keep, run.config.checkpoint.keep_every
    try:
        gone = retire(folder, keep=keep, keep_every=keep_every)
    except OSError as error:
        return f"; an older one cannot be removed: {error}"
    return f"; removed {', '.join(path.name for path in gone)}" if gone else ""


def _check_finite(run: Run, step: int) -> None:
    for name in run.buffers.entries:
        if not bool(torch.isfinite(run.buffers.param(name)).all()):
            raise StepError(f"step {step}: {name} is not finite; the weights are not saved")
