"""Where a step stopped being finite: which quantity, first on which rank.

Owns the replay of a step that must not be applied. It decides nothing: the step has already been
refused when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh
from rankmesh.optim.norm import agree
from rankmesh.parallel.execute import StageInput, execute
from rankmesh.train.run import Run


class _Kind(IntEnum):
    """What can be found, the cause before its consequence."""

    WEIGHT = 0
    PASS = 1
    LOSS = 2
    GRADIENT = 3
    NOTHING = 4


# (kind, number of the collective, number of the parameter or phase): the least is the first.
_Found = tuple[int, int, int]
_PHASES = ("forward", "backward")


def diagnose(run: Run, inputs: Sequence[StageInput]) -> str:
    """Words for what is not finite and where it began; every rank calls it and gets the same.

    After the reductions every rank holds the same NaN. So the step is replayed without those over
    replicas, and what each rank contributes to those over tp is looked at before they spread it.
    The step is deterministic, hence this costs nothing as long as all goes well. Collectives: those
    of the model, one over the world; those of the gradients and the norm where nothing was found.
    """
    names = list(run.chunk.buffers.entries)
    found = [(int(_Kind.NOTHING), 0, 0), *_weights(run, names), *_replayed(run, inputs, names)]
    kind, rank, what = _first(run.mesh, min(found), len(names))
    if kind == _Kind.NOTHING:
        return _together(run)
    subject = {
        _Kind.WEIGHT: f"the weight {names[what]}",
        _Kind.PASS: f"a value of the {_PHASES[what % len(_PHASES)]} pass",
        _Kind.LOSS: "the loss",
        _Kind.GRADIENT: f"the gradient of {names[what]}",
    }[_Kind(kind)]
    return f"{subject} is not finite, first on rank {rank}"


def _weights(run: Run, names: Sequence[str]) -> Iterable[_Found]:
    for number, name in enumerate(names):
        if not _finite(run.chunk.buffers.param(name)):
            yield _Kind.WEIGHT, 0, number


def _replayed(run: Run, inputs: Sequence[StageInput], names: Sequence[str]) -> list[_Found]:
    """What this rank finds in a replay that sums nothing over replicas."""
    buffers = run.chunk.buffers
    found: list[_Found] = []
    seen = 0

    def watch(tensor: Tensor, phase: str) -> None:
        nonlocal seen
        seen += 1
        # One is enough: what follows from it is no news.
        if not found and not _finite(tensor):
            found.append((_Kind.PASS, seen, _PHASES.index(phase)))

    buffers.begin_step()
    with run.mesh.seam.watched(watch):
        loss_sum = execute(run.actions, run.chunk, inputs, run.loss, reduce=False)
    buffers.settle()
    if not _finite(loss_sum):
        found.append((_Kind.LOSS, 0, 0))
    found += [
        (_Kind.GRADIENT, 0, number)
        for number, name in enumerate(names)
        if not _finite(buffers.grad(name))
    ]
    return found


def _together(run: Run) -> str:
    """No rank holds a value that is not finite; reduce, and see whether it returns."""
    run.chunk.buffers.finish()
    nothing = torch.zeros(1, dtype=torch.float64, device=run.mesh.device)
    if not agree(run.owned, nothing, run.mesh).finite:
        return "gradients are finite on every rank, but their sum or its norm overflows"
    return "loss or gradient is not finite, but a replay of the step is: a transient fault"


def _first(mesh: Mesh, found: _Found, num_names: int) -> tuple[int, int, int]:
    """(kind, rank, what) of the first finding of all ranks; one all-reduce of an int64."""
    kind, event, what = found
    choices = max(num_names, len(_PHASES))
    size = mesh.plan.world_size
    packed = torch.tensor(
        [((kind * 2**32 + event) * size + mesh.rank) * choices + what],
        dtype=torch.int64,
        device=mesh.device,
    )
    mesh.seam.all_reduce(packed, mesh.group("world"), "diagnosis", op="min").wait()
    rest, what = divmod(int(packed.item()), choices)
    rest, rank = divmod(rest, size)
    return rest >> 32, rank, what


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
