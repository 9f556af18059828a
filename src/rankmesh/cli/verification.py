"""The proof for a user's own config: the mesh and a single process side by side.

Owns the comparison of a run's slices with the oracle's whole tensors. The oracle computes on its
own; nothing of the mesh enters it but the config, the data and the initial values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rankmesh import models
from rankmesh.data.blend import training_order
from rankmesh.data.loader import Loader, Microbatch
from rankmesh.nn import Transformer
from rankmesh.testing.oracle import Recipe, Trace, WholeBatch, load_values, run_oracle
from rankmesh.topology.batch import BatchPlan
from rankmesh.train.build import Job
from rankmesh.train.run import DTYPES, Run
from rankmesh.train.step import train_step


@dataclass(frozen=True)
class Difference:
    """Largest difference of one quantity, over this rank's elements, relative to the reference's
    largest one.
    """

    quantity: str
    where: str
    relative: float
    limit: float

    @property
    def fine(self) -> bool:
        return self.relative <= self.limit


@dataclass
class Differences:
    """The worst difference of each quantity so far."""

    limit: float
    worst: dict[str, Difference] = field(default_factory=dict)

    def number(self, quantity: str, where: str, ours: float, theirs: float) -> None:
        self._note(quantity, where, abs(ours - theirs) / max(abs(theirs), 1e-30))

    def tensor(self, quantity: str, where: str, ours: Tensor, theirs: Tensor, scale: float) -> None:
        if ours.numel():
            gap = (ours.double() - theirs.double()).abs().max()
            self._note(quantity, where, float(gap) / max(scale, 1e-30))

    def _note(self, quantity: str, where: str, relative: float) -> None:
        # A NaN is the largest difference there is; unlike infinity this number is valid JSON.
        relative = relative if math.isfinite(relative) else sys.float_info.max
        found = Difference(quantity, where, relative, self.limit)
        self.worst[quantity] = _worse(self.worst.get(quantity), found)


def _worse(one: Difference | None, other: Difference) -> Difference:
    return one if one is not None and one.relative >= other.relative else other


# What rounding alone may do in a few steps: fp64 as the project's own proof, fp32 as its smaller
# suite.
LIMITS = {"fp64": 1e-9, "fp32": 1e-4}


def verify(run: Run, job: Job, steps: int) -> list[Difference]:
    """Train `steps` steps on the mesh and on the oracle; every rank returns the worst differences
    of its slices.

    Compared: loss and norm of each step, every gradient of step 1, every weight after the last.
    Memory: the whole model with its optimizer on each rank.
    """
    place = run.mesh.coordinate
    order = training_order(run.config.data.seed, job.train)
    mine = Loader(job.train, order, run.batch, place.dp)
    whole = Loader(
        job.train, order, BatchPlan(run.batch.global_batch, 1, run.batch.global_batch), 0
    )
    expected = _oracle(run, job, [_whole(whole.step(step)) for step in range(steps)])
    found = Differences(LIMITS[run.config.train.dtype])
    for number in range(1, steps + 1):
        result = train_step(run, number, mine.step(number - 1))
        found.number("loss", f"step {number}", result.loss, expected.losses[number - 1])
        found.number(
            "gradient norm", f"step {number}", result.grad_norm, expected.norms[number - 1]
        )
        if number == 1:
            _gradients(run, expected, found)
    _weights(run, expected, found)
    return list(found.worst.values())


def _whole(batches: Sequence[Microbatch]) -> WholeBatch:
    (batch,) = batches
    return WholeBatch(batch.tokens, batch.labels, batch.samples)


def _oracle(run: Run, job: Job, batches: Sequence[WholeBatch]) -> Trace:
    config = run.config
    model = models.build(run.spec, device="cpu", dtype=DTYPES[config.train.dtype])
    load_values(model, _values(run, job, model))
    optimizer = config.optimizer
    recipe = Recipe(
        name=optimizer.name,
        lrs=[run.lr.at(number) for number in range(1, len(batches) + 1)],
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        momentum=optimizer.momentum,
        clip_grad=optimizer.clip_grad,
        seed=config.train.seed,
        loss=run.loss,
        decayed=frozenset(spec.name for spec in run.table if spec.decay),
    )
    return run_oracle(model, batches, recipe)


def _values(run: Run, job: Job, model: Transformer) -> dict[str, Tensor]:
    """Every parameter as one whole tensor, made or read apart from the mesh."""
    source = job.source
    return {
        name: source(run.table[name], tuple(slice(0, size) for size in parameter.shape))
        for name, parameter in model.named_parameters()
    }


def _gradients(run: Run, expected: Trace, found: Differences) -> None:
    """The mesh's gradients are clipped by now: the reference is clipped by torch's rule."""
    limit, norm = run.config.optimizer.clip_grad, expected.norms[0]
    factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
    for one in run.buffers.pieces.values():
        reference = expected.grads[one.name] * factor
        # A gradient that is zero but for rounding is held against the norm, not against itself.
        scale = max(float(reference.abs().max()), 1e-7 * norm * factor)
        ours = one.grad.cpu()
        theirs = reference[one.entry.spec.slices(run.mesh.axis_ranks())].flatten()
        theirs = theirs[one.offset : one.offset + len(ours)]
        found.tensor("gradient", one.name, ours, theirs, scale)


def _weights(run: Run, expected: Trace, found: Differences) -> None:
    for name, entry in run.buffers.entries.items():
        reference = expected.weights[name]
        index = entry.spec.slices(run.mesh.axis_ranks())
        # Weights that start at zero have moved by the learning rate at most: compare with that.
        scale = max(float(reference.abs().max()), run.lr.lr)
        found.tensor("weight", name, run.buffers.param(name).cpu(), reference[index], scale)


def merge(per_rank: Sequence[Sequence[Difference]]) -> list[Difference]:
    """The worst of each quantity over the ranks."""
    worst: dict[str, Difference] = {}
    for difference in (one for rank in per_rank for one in rank):
        worst[difference.quantity] = _worse(worst.get(difference.quantity), difference)
    return list(worst.values())
