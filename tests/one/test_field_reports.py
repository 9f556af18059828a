"""Faults that users of such systems have met, tried in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rankmesh import models, nn
from rankmesh.comm.mesh import Mesh, fake_mesh, single_mesh
from rankmesh.data.loader import Microbatch
from rankmesh.errors import StepError
from rankmesh.nn.rotary import rotate
from rankmesh.parallel.apply import Chunk, Parallel, parallelize
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import Run, assemble, fresh_values
from rankmesh.train.step import train_step
from tests import tiny
from tests.one.test_linear import parallel_of

KINDS = {"norm": "decay_norms", "bias": "decay_biases", "embedding": "decay_embeddings"}
FAMILIES = {
    "llama": tiny.llama,
    "llama tied": lambda: tiny.llama(tie_embeddings=True),
    "gpt2": tiny.gpt2,
    "gpt2 untied": lambda: tiny.gpt2(tie_embeddings=False),
}


def run_of(spec: ModelSpec, mesh: Mesh | None = None, **changes: Any) -> Run:
    mesh = mesh or single_mesh()
    return assemble(tiny.config(**changes), spec, mesh, fresh_values(5))


def batches_of(run: Run, steps: int) -> Iterator[list[Microbatch]]:
    for batch in tiny.batches(steps=steps, global_batch=7, seq_len=11, vocab=run.spec.vocab_size):
        yield tiny.microbatches(batch, run.batch, 0)


@pytest.mark.parametrize("asked", ["", *KINDS])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_decay_meets_matrices_alone(family: str, tp: int, asked: str) -> None:
    """Field report D12: gradients zero, rate 0.1, decay 0.5, one AdamW step.

    Matrices shrink by exactly 5%; norms, biases and embeddings (a tied one too) stay as they are,
    unless the config asks for their kind.
    """
    spec = FAMILIES[family]()
    optimizer = {"name": "adamw", "lr": 0.1, "weight_decay": 0.5}
    optimizer |= {KINDS[asked]: True} if asked else {}
    run = run_of(spec, fake_mesh(ParallelPlan(tp=tp), tp - 1), tp=tp, optimizer=optimizer)
    buffers = run.buffers
    buffers.params.add_(0.25)  # biases start at zero, which no factor moves
    before = buffers.params.clone()
    run.optimizer.step(0.1)
    kinds = {part.name: part.kind for part in parts(spec)}
    assert set(kinds) == set(buffers.entries)
    for name, entry in buffers.entries.items():
        shrinks = kinds[name] in ("matrix", "residual", asked)
        old = before[entry.start : entry.stop].view(entry.shape)
        expected = old * (1 - 0.1 * 0.5) if shrinks else old
        assert torch.equal(buffers.param(name), expected), name


def phase_error(phases: tuple[Tensor, Tensor], head_dim: int, length: int) -> float:
    """Largest difference of cos and sin from fp64."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * 10000.0**-exponent
    exact = (angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))
    pairs = zip(phases, exact, strict=True)
    return max(float((ours.double() - theirs).abs().max()) for ours, theirs in pairs)


def bf16_parallel(spec: ModelSpec) -> Parallel:
    return parallelize(
        [Chunk(0, models.build(spec))],
        run_of(spec).table,
        single_mesh(),
        fresh_values(0),
        dtype=torch.bfloat16,
        bucket_bytes=1 << 20,
    )


def test_rotary_phases_of_a_bf16_model() -> None:
    """Field report N02: positions to 8191; bf16 cannot tell 256 from 257, the phases must.

    For a model built in bf16, one cast as a whole, and one split over a mesh.
    """
    spec = tiny.llama(num_heads=2, num_kv_heads=1, head_dim=16, max_seq_len=8192)
    layout = nn.Layout.plain(1, 8192)
    cast = models.build(spec, device="cpu").to(torch.bfloat16)
    for model in (
        models.build(spec, device="cpu", dtype=torch.bfloat16),
        cast.to("cpu", torch.bfloat16),
        bf16_parallel(spec).chunks[0].model,
    ):
        assert next(model.parameters()).dtype == torch.bfloat16
        rotary = model.layers["0"].rotary
        assert rotary is not None
        phases = rotary.phases(layout, torch.bfloat16)
        assert phases[0].dtype == phases[1].dtype == torch.float32
        assert phase_error(phases, 16, 8192) < 1e-6
    x = torch.ones(8192, 2, 16, dtype=torch.bfloat16)
    assert rotate(x, phases).dtype == torch.bfloat16
    assert not torch.equal(rotate(x, phases)[256], rotate(x, phases)[257])


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_constant_is_cast(family: str) -> None:
    """Field report N05: a model has no buffer that a cast could reach; gradients stay fp32."""
    parallel = bf16_parallel(FAMILIES[family]())
    assert list(parallel.chunks[0].model.buffers()) == []
    assert parallel.buffers.params.dtype == torch.bfloat16
    assert parallel.buffers.grads.dtype == torch.float32
    assert parallel_of(tiny.llama(), single_mesh()).buffers.grads.dtype == torch.float64


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("weight", "the weight layers.0.attn.q.weight is not finite, first on rank 0"),
        ("loss", "the loss is not finite, first on rank 0"),
        ("gradient", "the gradient of layers.1.mlp.down.weight is not finite, first on rank 0"),
    ],
)
def test_what_is_not_finite_is_named(
    spoil: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report L15, on one rank: the cause before its consequence, and no update."""
    run = run_of(tiny.llama(), train={"dtype": "fp32"})
    (batch,) = batches_of(run, 1)
    buffers = run.buffers
    if spoil == "weight":
        buffers.param("layers.0.attn.q.weight")[0, 0] = math.inf
    elif spoil == "loss":
        buffers.param("head.weight").fill_(3e38)
    else:
        slot = next(s for s in buffers.slots if "layers.1.mlp.down.weight" in s.names)
        plain = slot._deposited

        def deposited() -> None:
            slot.grad[0, 0] = math.nan
            plain()

        monkeypatch.setattr(slot, "_deposited", deposited)
    before = buffers.params.clone()
    with pytest.raises(StepError, match=f"^step 1: {says}; the weights keep their last values$"):
        train_step(run, 1, batch)
    assert torch.equal(buffers.params, before)
    assert all(not bool(state.any()) for state in run.optimizer.state().values())


def test_microbatches_are_those_of_the_schedule() -> None:
    """A step that is fed more or fewer than it was planned for says so."""
    run = run_of(tiny.llama())
    (batch,) = batches_of(run, 1)
    with pytest.raises(ValueError, match="3 microbatches for a schedule of 4"):
        train_step(run, 1, batch[:3])
