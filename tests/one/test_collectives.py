"""The complete ordered list of collectives of a step, from the count to the norm, recorded in one
process.
"""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh.comm.mesh import fake_mesh
from rankmesh.comm.seam import Event
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import kv_replicas
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import assemble, fresh_values
from rankmesh.train.step import train_step
from tests import tiny

T, ROWS = 11, 2
N = T * ROWS


def record(spec: ModelSpec, tp: int, dp: int, rank: int, **train: Any) -> tuple[list[Event], Any]:
    plan = ParallelPlan(tp=tp, dp=dp)
    mesh = fake_mesh(plan, rank, kv_replicas=kv_replicas(spec, plan))
    run = assemble(tiny.config(tp=tp, dp=dp, train=train), spec, mesh, fresh_values(0))
    (batch,) = tiny.batches(steps=1, global_batch=7, seq_len=T, vocab=spec.vocab_size)
    train_step(run, 1, tiny.microbatches(batch, run.batch, mesh.coordinate.dp))
    return mesh.seam.ledger.events, run


def expected_model(spec: ModelSpec, tp: int) -> tuple[list[Any], list[Any]]:
    """Forward and backward of one microbatch: 2 all-reduces a layer each way, embedding, loss,
    head; norms over all heads add two numbers a token each way.
    """
    if tp == 1:
        return [], []
    hidden = ("all_reduce", "tp", N * spec.hidden_size * 8)
    squares = [("all_reduce", "tp", N * 2 * 8)] if spec.qk_norm == "all" else []
    forward = [hidden] + [*squares, hidden, hidden] * spec.num_layers
    forward += [("all_gather", "tp", tp * N * 2 * 8)]
    return forward, [hidden] + [hidden, *squares, hidden] * spec.num_layers


def partial_elements(run: Any, axis: str) -> int:
    """Elements of this rank whose gradients are summed over `axis` once a step."""
    entries = run.buffers.entries.values()
    return sum(entry.stop - entry.start for entry in entries if axis in entry.spec.grad_sum)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_a_step_issues_just_what_theory_allows(family: str, tp: int, dp: int) -> None:
    spec = getattr(tiny, family)()
    for rank in range(tp * dp):
        events, run = record(spec, tp, dp, rank)
        forward, backward = expected_model(spec, tp)
        wanted = [("all_reduce", "dp_cp", 16)] if dp > 1 else []
        last = run.batch.num_microbatches - 1
        for _ in range(last):
            wanted += forward + backward
        wanted += forward
        plain = [(e.op, e.axis, e.payload_bytes) for e in events]
        assert plain[: len(wanted)] == wanted
        rest = plain[len(wanted) :]
        # In the last backward the buckets go out between the layers; apart from them the order is
        # the same.
        buckets = [e for e in rest if e[1] == "dp_cp"]
        assert len(buckets) == (len(run.buffers.buckets) if dp > 1 else 0)
        tail = [("all_reduce", "world", 24)] if tp * dp > 1 else []
        if tp > spec.num_kv_heads:
            tail = [("all_reduce", "tp_rep", partial_elements(run, "tp_rep") * 8), *tail]
        if tp > 1 and spec.qk_norm == "head":
            shared = spec.num_layers * 2 * spec.head_dim
            assert partial_elements(run, "tp") == shared
            tail = [("all_reduce", "tp", shared * 8), *tail]
        assert [e for e in rest if e[1] != "dp_cp"] == backward + tail
        if dp > 1:
            assert sum(e[2] for e in buckets) >= 8 * sum(
                entry.stop - entry.start for entry in run.buffers.entries.values()
            )


def test_buckets_go_out_while_backward_goes_on() -> None:
    """With two or more buckets the first is reduced before the last layer's backward all-reduce."""
    events, run = record(tiny.llama(), 2, 2, 0)
    assert len(run.buffers.buckets) > 2
    axes = [e.axis for e in events if e.phase in ("backward", "gradients")]
    first = axes.index("dp_cp")
    assert "tp" in axes[first:]


def test_only_the_last_microbatch_reduces() -> None:
    events, run = record(tiny.llama(), 1, 2, 0)
    assert run.batch.num_microbatches == 2
    reductions = [e for e in events if e.phase == "gradients"]
    assert len(reductions) == len(run.buffers.buckets)


def test_wire_bytes_follow_the_ring() -> None:
    """All-reduce 2 (P-1)/P S, all-gather (P-1)/P of the full buffer."""
    events, _ = record(tiny.llama(), 2, 2, 0)
    for event in events:
        factor = {"all_reduce": 2, "all_gather": 1}[event.op]
        assert event.wire_bytes == factor * (event.size - 1) * event.payload_bytes // event.size


def test_one_process_issues_nothing() -> None:
    events, _ = record(tiny.llama(), 1, 1, 0)
    assert events == []


def test_an_empty_batch_stops_after_the_count() -> None:
    """Field report L11 (c): no valid label in the whole batch: no step, no hang, loss 0."""
    spec, plan = tiny.llama(), ParallelPlan(tp=2, dp=2)
    mesh = fake_mesh(plan, 0)
    run = assemble(tiny.config(tp=2, dp=2), spec, mesh, fresh_values(0))
    batch = tiny.batches(steps=2, global_batch=7, seq_len=T, vocab=61, mask="all")[1]
    before = run.buffers.params.clone()
    result = train_step(run, 1, tiny.microbatches(batch, run.batch, 0))
    assert (result.loss, result.grad_norm, result.valid) == (0.0, 0.0, 0)
    assert [e.phase for e in mesh.seam.ledger.events] == ["count"]
    assert before.equal(run.buffers.params)
