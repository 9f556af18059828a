"""Recomputation in one process: the same bits, each deposit once, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.recompute import MODES as MODES_SHOWN
from benchmarks.recompute import Side, measure, spec_of
from rankmesh.comm.mesh import fake_mesh
from rankmesh.config.resolve import parallel_plan
from rankmesh.nn import Layout
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import kv_replicas
from rankmesh.theory.activations import ActivationShape, layer_bytes
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import Run, assemble, fresh_values
from rankmesh.train.step import train_step
from tests import tiny

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
MODES: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 1},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_modules": ("norm", "activation")},
    {"recompute": "selective", "recompute_modules": ("attention", "mlp", "norm")},
    {"recompute": "selective", "recompute_modules": ("core", "norm", "mlp"), "recompute_layers": 2},
]


def step_gradients(
    spec: ModelSpec,
    parallel: dict[str, Any],
    *,
    dtype: str = "fp32",
    tp: int = 1,
    steps: int = 2,
) -> tuple[Run, dict[str, Tensor], list[float]]:
    """The run, its gradients after the last step, and the losses."""
    config = tiny.config(tp=tp, parallel=parallel, train={"dtype": dtype, "global_batch_size": 5})
    plan = parallel_plan(config.parallel, tp)
    mesh = fake_mesh(plan, 0, kv_replicas=kv_replicas(spec, plan))
    run = assemble(config, spec, mesh, fresh_values(3))
    losses = []
    made = tiny.batches(steps=steps, global_batch=5, seq_len=9, vocab=spec.vocab_size)
    for number, batch in enumerate(made, start=1):
        losses.append(train_step(run, number, tiny.microbatches(batch, run.batch, 0)).loss)
    return run, {name: run.buffers.grad(name).clone() for name in run.buffers.entries}, losses


def same_bits(spec: ModelSpec, mode: dict[str, Any], **options: Any) -> None:
    """Gradients and losses with and without recomputation are equal, bit for bit."""
    shape = options.pop("shape", {})
    _, plain, losses = step_gradients(spec, shape, **options)
    _, again, others = step_gradients(spec, shape | mode, **options)
    assert losses == others
    for name, gradient in plain.items():
        assert bool(gradient.any()) or "k.bias" in name
        assert torch.equal(gradient, again[name]), name


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_the_same_bits_in_every_schedule(
    mode: dict[str, Any], schedule: str, chunks: int, dtype: str
) -> None:
    """Field report R01: dropout on, several microbatches in a row, two steps."""
    for family in ("llama", "gpt2"):
        spec = getattr(tiny, family)(num_layers=5, **DROPOUT)
        same_bits(spec, mode, dtype=dtype, shape={"schedule": schedule, "num_chunks": chunks})


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_the_same_bits_in_every_family(family: str, mode: dict[str, Any]) -> None:
    """On the fused path and, with dropout, on the explicit one."""
    for changes in ({}, DROPOUT):
        same_bits(getattr(tiny, family)(num_layers=3, **changes), mode, steps=1)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    modules=st.sets(
        st.sampled_from(["core", "norm", "activation", "attention", "mlp"]), min_size=1
    ),
    layers=st.none() | st.integers(0, 4),
    family=st.sampled_from(tiny.FAMILIES),
    schedule=st.sampled_from(SCHEDULES),
)
def test_the_same_bits_for_any_modules(
    modules: set[str], layers: int | None, family: str, schedule: tuple[str, int]
) -> None:
    """Any set of modules of which none holds another, in any number of layers."""
    if "attention" in modules:
        modules.discard("core")
    if "mlp" in modules:
        modules.discard("activation")
    mode = {
        "recompute": "selective",
        "recompute_modules": tuple(sorted(modules)),
        "recompute_layers": layers,
    }
    name, chunks = schedule
    spec = getattr(tiny, family)(num_layers=2 * chunks, **DROPOUT)
    same_bits(spec, mode, steps=1, shape={"schedule": name, "num_chunks": chunks})


def peak_bytes(side: Side) -> int:
    """The most that the allocator holds at once in a step, beside what is there before it."""
    side.step()
    side.x.grad = None
    with torch.profiler.profile(profile_memory=True) as profile:
        side.step()
    live = peak = 0
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        live += event.self_cpu_memory_usage
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_live_memory_falls(family: str) -> None:
    """A step of six layers holds at most their inputs and one layer's activations at a time."""
    spec = spec_of(family, hidden=128, layers=6, length=64)
    shape = ActivationShape(batch=2, length=64, dtype_bytes=4)
    plan = ParallelPlan(recompute="full")
    layer, stream = layer_bytes(spec, ParallelPlan(), shape), layer_bytes(spec, plan, shape)
    plain, full = (peak_bytes(Side(spec, p, 2, 64)) for p in (ParallelPlan(), plan))
    assert plain >= 6 * layer
    # In backward some tensors of a layer live beside what is saved: gradients, masks' indices.
    assert 6 * stream < full < 6 * stream + 2 * layer < plain / 2
    modes = {"recompute": "selective", "recompute_modules": ("core", "norm", "activation")}
    some = peak_bytes(Side(spec, ParallelPlan(**modes), 2, 64))
    assert full < some < plain


def test_the_table_of_the_documentation() -> None:
    """Prediction and allocator agree in every mode, to less than a stream and the indices."""
    for family in ("llama", "gpt2"):
        spec = spec_of(family, hidden=128, layers=2, length=32)
        rows, _ = measure(spec, 2, 32, rounds=1)
        assert [row["mode"] for row in rows] == list(MODES_SHOWN)
        for row in rows:
            assert abs(row["held"] - row["predicted"]) < 2 * 32 * 128 * 4


def test_another_second_pass_is_an_error() -> None:
    """One that saves other tensors, or fewer, than the first."""
    spec = tiny.llama(num_layers=1)
    parallel = assemble(
        tiny.config(parallel={"recompute": "full"}),
        spec,
        fake_mesh(ParallelPlan(recompute="full"), 0),
        fresh_values(3),
    ).parallel
    block = next(parallel.chunks[0].model.blocks())
    layout = Layout.plain(1, 8)
    for changed, says in (
        (lambda x, phases, layout: (x, ()), "recomputed 0 tensors of"),
        (lambda x, phases, layout: (x[:4].exp(), ()), "where the first pass saved"),
    ):
        x = torch.randn(8, 24, dtype=torch.float64, requires_grad=True)
        plain = block._branches
        calls: list[int] = []

        def twice(
            *args: Any, changed: Any = changed, plain: Any = plain, calls: Any = calls
        ) -> Any:
            calls.append(1)
            return plain(*args) if len(calls) == 1 else changed(*args)

        block._branches = twice
        out, _ = block(x, block.rotary.phases(layout, x.dtype), layout)
        block._branches = plain
        with pytest.raises(RuntimeError, match=says):
            out.sum().backward()


def test_evaluation_drops_nothing() -> None:
    """Without gradients a layer is computed once, as it stands."""
    spec = tiny.gpt2(num_layers=2)
    run, _, _ = step_gradients(spec, {"recompute": "full"}, steps=1)
    plain, _, _ = step_gradients(spec, {}, steps=1)
    tokens = torch.randint(0, spec.vocab_size, (8,))
    with torch.no_grad():
        ours, theirs = (
            r.parallel.chunks[0].model(tokens, Layout.plain(1, 8))[0] for r in (run, plain)
        )
    assert torch.equal(ours, theirs)
