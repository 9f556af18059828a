"""The proof that a mesh computes what one process computes; runs inside worker processes.

Each rank trains its part of the mesh and, apart from it, the whole model with the oracle, and
compares its own slices: losses, norms, every gradient of the first step and every weight after the
last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankmesh import models
from rankmesh.config.resolve import parallel_plan
from rankmesh.specs.placement import kv_replicas, param_table
from rankmesh.testing.oracle import Recipe, Trace, load_values, run_oracle
from rankmesh.testing.worker import Worker
from rankmesh.topology.params import ParamTable
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import DTYPES, Run, assemble, fresh_values
from rankmesh.train.step import train_step
from tests import tiny

# Softmax does not change when all keys move by a constant, so without rotary phases the key bias
# has no effect.
ZERO_IN_EXACT_ARITHMETIC = ("attn.k.bias",)


def whole_values(table: ParamTable, seed: int) -> dict[str, Tensor]:
    """Initial values of every parameter, each made as one whole tensor."""
    return {
        spec.name: models.initial_values(
            spec.init, spec.name, spec.shape, tuple(slice(0, n) for n in spec.shape), seed
        )
        for spec in table
    }


def case(
    worker: Worker,
    *,
    family: str,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    parallel: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    mask: str = "some",
    seq_len: int = 11,
    rtol: float = 1e-9,
    atol: float = 1e-12,
    skew: float = 1.0,
    rates: list[float] | None = None,
) -> dict[str, float]:
    """Raises AssertionError naming the first tensor that differs; returns the largest relative
    differences.

    skew: factor on the oracle's learning rate; anything but 1 must fail. rates: the learning rates
    of the steps, worked out by hand, where the schedule is not constant. parallel: further keys of
    that section.
    """
    spec = getattr(tiny, family)(**(model or {}))
    config = tiny.config(tp=tp, dp=dp, pp=pp, parallel=parallel, train=train, optimizer=optimizer)
    plan = parallel_plan(config.parallel, worker.world_size)
    mesh = worker.mesh(
        plan, kv_replicas=kv_replicas(spec, plan), tied_embeddings=spec.tie_embeddings
    )
    run = assemble(config, spec, mesh, fresh_values(config.train.seed))
    batches = tiny.batches(
        steps=config.train.steps,
        global_batch=config.train.global_batch_size,
        seq_len=seq_len,
        vocab=spec.vocab_size,
        mask=mask,
    )
    rates = rates or [config.optimizer.lr] * len(batches)
    expected, start = oracle_trace(run, batches, [rate * skew for rate in rates])
    check = Comparison(run, rtol, atol)
    check.starts(start)
    for number, batch in enumerate(batches, start=1):
        result = train_step(run, number, tiny.microbatches(batch, run.batch, mesh.coordinate.dp))
        check.number(f"loss of step {number}", result.loss, expected.losses[number - 1])
        check.number(f"norm of step {number}", result.grad_norm, expected.norms[number - 1])
        check.number(f"rate of step {number}", result.lr, rates[number - 1])
        check.number(f"targets of step {number}", result.valid, int((batch.labels >= 0).sum()))
        check.number(f"tokens of step {number}", result.tokens, batch.tokens.numel())
        if number == 1:
            check.gradients(expected)
    check.weights(expected, start)
    return check.largest


def oracle_trace(
    run: Run, batches: list[Any], rates: list[float]
) -> tuple[Trace, dict[str, Tensor]]:
    """What the oracle gets from the same start, and that start; `rates` has one entry a step."""
    config, optimizer = run.config, run.config.optimizer
    whole = models.build(
        run.spec, device="cpu", dtype=torch.promote_types(DTYPES[config.train.dtype], torch.float32)
    )
    start = whole_values(param_table(run.spec, ParallelPlan()), config.train.seed)
    load_values(whole, start)
    recipe = Recipe(
        name=optimizer.name,
        lrs=rates,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        momentum=optimizer.momentum,
        clip_grad=optimizer.clip_grad,
        seed=config.train.seed,
        loss=run.loss,
    )
    return run_oracle(whole, batches, recipe), start


class Comparison:
    """Compares a run's slices with whole tensors of the oracle."""

    def __init__(self, run: Run, rtol: float, atol: float) -> None:
        self.run, self.rtol, self.atol = run, rtol, atol
        self.largest: dict[str, float] = {}

    def number(self, what: str, ours: float, theirs: float) -> None:
        difference = abs(ours - theirs)
        assert difference <= self.rtol * abs(theirs) + self.atol, f"{what}: {ours} against {theirs}"
        self._note(what.split(" of ")[0], difference / (abs(theirs) or 1.0))

    def starts(self, start: dict[str, Tensor]) -> None:
        """Before any step the mesh holds the oracle's values, bit for bit."""
        for name in self.run.buffers.entries:
            ours, theirs = self.run.buffers.param(name), self._slice(name, start[name])
            assert torch.equal(ours, theirs.to(ours.dtype)), f"{name} starts from other values"

    def gradients(self, expected: Trace) -> None:
        clip = self.run.config.optimizer.clip_grad
        factor = min(1.0, clip / (expected.norms[0] + 1e-6)) if clip else 1.0
        for one in self.run.buffers.pieces.values():
            name = one.name
            reference = expected.grads[name] * factor
            zero = name.endswith(ZERO_IN_EXACT_ARITHMETIC) and self.run.spec.positions == "learned"
            assert zero or bool(reference.any()), f"the reference gradient of {name} is all zero"
            scale = max(expected.norms[0] * factor, 1.0) if zero else float(reference.abs().max())
            ours = one.grad
            theirs = self._slice(name, reference).flatten()[one.offset :][: len(ours)]
            self._differ("gradient", name, ours, theirs, scale)

    def weights(self, expected: Trace, start: dict[str, Tensor]) -> None:
        for name in self.run.buffers.entries:
            reference = expected.weights[name]
            zero = name.endswith(ZERO_IN_EXACT_ARITHMETIC) and self.run.spec.positions == "learned"
            scale = 1.0 if zero else float(reference.abs().max())
            self.tensor("weight", name, self.run.buffers.param(name), reference, scale)
            moved = float((reference - start[name]).abs().max())
            # In 16 bits rounding moves as much.
            assert zero or self.rtol > 1e-3 or moved > 100 * (self.rtol * scale + self.atol), (
                f"{name} hardly moved: {moved}"
            )

    def tensor(self, what: str, name: str, ours: Tensor, theirs: Tensor, scale: float) -> None:
        self._differ(what, name, ours, self._slice(name, theirs), scale)

    def _differ(self, what: str, name: str, ours: Tensor, theirs: Tensor, scale: float) -> None:
        assert ours.shape == theirs.shape, (
            f"{what} {name}: shape {ours.shape} against {theirs.shape}"
        )
        difference = (
            float((ours.to(torch.float64) - theirs.to(torch.float64)).abs().max())
            if ours.numel()
            else 0.0
        )
        assert difference <= self.rtol * scale + self.atol, (
            f"{what} of {name} on rank {self.run.mesh.rank}: differs by {difference} of {scale}"
        )
        self._note(what, difference / (scale or 1.0))

    def _slice(self, name: str, whole: Tensor) -> Tensor:
        entry = self.run.buffers.entries[name]
        return whole[entry.spec.slices(self.run.mesh.axis_ranks())]

    def _note(self, what: str, value: float) -> None:
        self.largest[what] = max(self.largest.get(what, 0.0), value)
