"""Checks of checkpoints: what is read is what was written, and only what is whole is taken.

Each raises AssertionError with a message of its own.
"""

from __future__ import annotations

from rankmesh.checkpoint.manifest import MANIFEST
from rankmesh.checkpoint.shelf import complete, retire, shelf, step_folder
from rankmesh.checkpoint.tensorfile import Deferred
from rankmesh.checkpoint.weights import LocalSlice, Weights, write_weights
from rankmesh.errors import CheckpointError
from rankmesh.specs.placement import param_table
from rankmesh.testing.worker import Worker
from rankmesh.topology.plan import ParallelPlan
from tests import checkpoints, runs


def resharded(worker: Worker) -> None:
    """Written by two ranks, read by one and by four: every element is at its place."""
    tensors = checkpoints.whole(checkpoints.SPEC)
    folder = worker.folder / "step-00000007"
    checkpoints.write_with_ranks(folder, 2, tensors)
    weights = Weights(folder)
    for tp in (1, 4):
        for rank in range(tp):
            for param in param_table(checkpoints.SPEC, ParallelPlan(tp=tp)):
                box = param.slices({"tp": rank})
                found = weights.slice(param.name, box)
                expected = tensors[param.name][box]
                assert found.equal(expected), f"checkpoint: {param.name} of rank {rank} of {tp}"


def damaged(worker: Worker) -> None:
    """One bit of the data is another: the piece is refused."""
    folder = worker.folder / "step-00000007"
    checkpoints.write_with_ranks(folder, 1, checkpoints.whole(checkpoints.SPEC))
    entry = Weights(folder).manifest.tensors["norm.weight"]
    (piece,) = entry.pieces
    data = bytearray((folder / piece.file).read_bytes())
    data[piece.bytes[0]] ^= 1
    (folder / piece.file).write_bytes(data)
    try:
        Weights(folder).slice("norm.weight", (slice(0, entry.shape[0]),))
    except CheckpointError:
        return
    raise AssertionError("checkpoint: damaged bytes were read")


def interrupted(worker: Worker) -> None:
    """A save that dies in the middle leaves nothing under a checkpoint's name."""
    spec = checkpoints.SPEC

    def slices() -> list[LocalSlice]:
        held = checkpoints.held(spec, 1, 0, checkpoints.whole(spec))
        last = held[-1]

        def die() -> None:
            raise KeyboardInterrupt

        cut = Deferred(last.shape, last.tensor.dtype, die)  # type: ignore[arg-type]
        return [*held[:-1], LocalSlice(last.name, last.shape, last.slices, cut)]

    folder = worker.folder / "step-00000007"
    try:
        write_weights(folder, slices(), spec=spec, step=7)
    except KeyboardInterrupt:
        assert not folder.exists(), "checkpoint: an interrupted save left its name"
        return
    raise AssertionError("checkpoint: a save lost a tensor")


def resumed(worker: Worker) -> None:
    """Four steps, and twice two: equal losses and weights."""
    config = runs.write_config(worker.folder)
    more = ["data.valid=[]", "optimizer.schedule=cosine", "optimizer.decay_steps=9"]
    straight = runs.go(config, "straight", 4, more)
    for steps in (2, 4):
        broken = runs.go(config, "broken", steps, more)
    losses = [runs.figures(folder, "loss") for folder in (straight, broken)]
    assert losses[0] == losses[1], f"checkpoint: losses are {losses}"
    one, other = (runs.contents(step_folder(folder, 4)) for folder in (straight, broken))
    changed = [name for name in one if one[name] != other[name]]
    assert not changed, f"checkpoint: {changed[0]} differs at the end"


def retired(worker: Worker) -> None:
    """Of five the newest two stay."""
    for step in range(1, 6):
        step_folder(worker.folder, step).mkdir(parents=True)
        (step_folder(worker.folder, step) / MANIFEST).write_text("{}")
    retire(shelf(worker.folder), keep=2, keep_every=0)
    left = [path.name[-1] for path in complete(shelf(worker.folder))]
    assert left == ["4", "5"], f"checkpoint: left are {left}"
