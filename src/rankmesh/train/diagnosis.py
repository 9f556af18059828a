"""Where a step stopped being finite: which quantity, first on which rank.

Owns the replay of a step that must not be applied. It decides nothing: the step has already been
refused when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh
from rankmesh.optim.norm import agree
from rankmesh.parallel.execute import StageInput, execute
from rankmesh.schedule.actions import Action, Kind
from rankmesh.train.run import Run


class _Kind(IntEnum):
    """What can be found, the cause before its consequence."""

    WEIGHT = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    GRADIENT = 4
    NOTHING = 5


# (kind, place on the way through the stages and back, number of the parameter): the least is the
# first.
_Found = tuple[int, int, int]
_KINDS = {"forward": _Kind.FORWARD, "backward": _Kind.BACKWARD}
_COLLECTIVES = 1 << 16  # more than one action has


def diagnose(run: Run, inputs: Sequence[StageInput]) -> str:
    """Words for what is not finite and where it began; every rank calls it and gets the same.

    After the reductions every rank holds the same NaN. So the step is replayed without those over
    replicas, and what each rank hands to the others, over tp and to other stages, is looked at
    before it spreads.
    The step is deterministic, hence this costs nothing as long as all goes well. Collectives: those
    of the model, one over the world; those of the gradients and the norm where nothing was found.
    """
    names = [spec.name for spec in run.table]
    found = [(int(_Kind.NOTHING), 0, 0), *_weights(run, names), *_replayed(run, inputs, names)]
    kind, rank, what = _first(run.mesh, min(found), len(names))
    if kind == _Kind.NOTHING:
        return _together(run)
    subject = {
        _Kind.WEIGHT: f"the weight {names[what]}",
        _Kind.FORWARD: "a value of the forward pass",
        _Kind.LOSS: "the loss",
        _Kind.BACKWARD: "a value of the backward pass",
        _Kind.GRADIENT: f"the gradient of {names[what]}",
    }[_Kind(kind)]
    return f"{subject} is not finite, first on rank {rank}"


def _weights(run: Run, names: Sequence[str]) -> Iterable[_Found]:
    for number, name in enumerate(names):
        if name in run.buffers.entries and not _finite(run.buffers.param(name)):
            yield _Kind.WEIGHT, 0, number


def _replayed(run: Run, inputs: Sequence[StageInput], names: Sequence[str]) -> list[_Found]:
    """What this rank finds in a replay that sums nothing over replicas."""
    buffers, stages = run.buffers, run.mesh.plan.num_stages
    found: list[_Found] = []
    place = 0

    @contextmanager
    def enter(action: Action) -> Iterator[None]:
        nonlocal place
        forward = action.kind is Kind.F
        place = (action.stage if forward else stages - 1 - action.stage) * _COLLECTIVES
        yield

    def watch(tensor: Tensor, phase: str) -> None:
        nonlocal place
        place += 1
        if phase in _KINDS and not _finite(tensor):
            found.append((_KINDS[phase], place, 0))

    buffers.begin_step(0)
    with run.mesh.seam.watched(watch):
        loss_sum = execute(run.actions, run.parallel, run.hops, inputs, run.loss, enter)
    buffers.settle()
    if not _finite(loss_sum):
        found.append((_Kind.LOSS, 0, 0))
    found += [
        (_Kind.GRADIENT, 0, number)
        for number, name in enumerate(names)
        if name in buffers.entries and not _finite(buffers.grad(name))
    ]
    return found


def _together(run: Run) -> str:
    """No rank holds a value that is not finite; reduce, and see whether it returns."""
    run.buffers.finish()
    nothing = torch.zeros(1, dtype=torch.float64, device=run.mesh.device)
    if not agree(run.owned, nothing, run.mesh).finite:
        return "gradients are finite on every rank, but their sum or its norm overflows"
    return "loss or gradient is not finite, but a replay of the step is: a transient fault"


def _first(mesh: Mesh, found: _Found, num_names: int) -> tuple[int, int, int]:
    """(kind, rank, what) of the first finding of all ranks; one all-reduce of an int64."""
    kind, event, what = found
    size = mesh.plan.world_size
    packed = torch.tensor(
        [((kind * 2**32 + event) * size + mesh.rank) * num_names + what],
        dtype=torch.int64,
        device=mesh.device,
    )
    mesh.seam.all_reduce(packed, mesh.group("world"), "diagnosis", op="min").wait()
    rest, what = divmod(int(packed.item()), num_names)
    rest, rank = divmod(rest, size)
    return rest >> 32, rank, what


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
