"""Owns the expected collectives of a step: lists written by hand, and properties over many shapes.

Imports no torch.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import param_table
from rankmesh.specs.presets import preset
from rankmesh.theory.comm import (
    Bucket,
    Collective,
    StepShape,
    kv_elements,
    sent_by_axis,
    step_collectives,
    wire_bytes,
)
from rankmesh.topology.plan import ParallelPlan

# Two layers, hidden 64, 4 heads of 16, 2 KV heads.
LLAMA = preset("llama-tiny")
H = 64


def shape(**given: object) -> StepShape:
    fields: dict[str, object] = {"tokens": 10, "microbatches": 1, "dtype_bytes": 4, "buckets": ()}
    return StepShape(**{**fields, **given})  # type: ignore[arg-type]


def short(collectives: tuple[Collective, ...]) -> list[str]:
    ops = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    return [
        f"{ops.get(one.op, one.op)} {one.axis} {one.phase} {one.payload_bytes}"
        for one in collectives
    ]


@pytest.mark.parametrize(
    ("op", "size", "payload", "sent"),
    [
        ("all_reduce", 2, 100, 100),
        ("all_reduce", 4, 100, 150),
        ("all_reduce", 3, 8, 10),
        ("all_gather", 4, 100, 75),
        ("reduce_scatter", 4, 100, 75),
        ("all_reduce", 1, 100, 0),
    ],
)
def test_ring_formulas(op: str, size: int, payload: int, sent: int) -> None:
    assert wire_bytes(op, size, payload) == sent


def test_one_process_issues_nothing() -> None:
    assert (
        step_collectives(LLAMA, ParallelPlan(), shape(buckets=(Bucket(9, ("norm.weight",)),))) == ()
    )


def test_tensor_parallel_step_by_hand() -> None:
    """Two microbatches: 2 all-reduces a layer forward and 2 backward, embedding, head, loss,
    norm.
    """
    x = 10 * H * 4
    micro = [f"AR tp forward {x}"] * 5 + [f"AG tp forward {2 * 10 * 2 * 4}"]
    micro += [f"AR tp backward {x}"] * 5
    found = step_collectives(LLAMA, ParallelPlan(tp=2), shape(microbatches=2))
    assert short(found) == [*micro, *micro, "AR world norm 24"]
    assert sent_by_axis(found) == {"tp": 2 * (10 * x + 80), "world": 24}


def test_mesh_step_by_hand() -> None:
    """tp 4 exceeds the 2 KV heads; buckets start between the reductions of the last backward."""
    buckets = (
        Bucket(100, ("head.weight", "norm.weight", "layers.1.mlp.down.weight")),
        Bucket(200, ("layers.1.mlp.gate.weight", "layers.1.mlp_norm.weight")),
        Bucket(300, ("layers.1.attn.o.weight", "layers.1.attn.q.weight")),
        Bucket(400, ("layers.0.mlp.down.weight", "embed.weight")),
    )
    plan = ParallelPlan(tp=4, dp=3)
    found = step_collectives(
        LLAMA, plan, shape(buckets=buckets, dtype_bytes=8, label_smoothing=True, microbatches=2)
    )
    x = 10 * H * 8
    forward = [f"AR tp forward {x}"] * 5 + [f"AG tp forward {4 * 10 * 3 * 8}"]
    back = f"AR tp backward {x}"
    assert short(found) == [
        "AR dp_cp count 16",
        *forward,
        *[back] * 5,
        *forward,
        back,
        "AR dp_cp gradients 800",
        back,
        "AR dp_cp gradients 1600",
        back,
        "AR dp_cp gradients 2400",
        back,
        back,
        "AR dp_cp gradients 3200",
        f"AR tp_rep gradients {8 * 2 * 2 * 16 * H}",
        "AR world norm 24",
    ]
    assert {one.axis: one.size for one in found} == {"dp_cp": 3, "tp": 4, "tp_rep": 2, "world": 12}


def test_data_parallel_step_by_hand() -> None:
    """The wire bytes of data parallelism: 2 (P-1)/P of the gradients, once a step."""
    buckets = tuple(Bucket(1000, (f"layers.{i}.attn.q.weight",)) for i in (1, 0))
    found = step_collectives(LLAMA, ParallelPlan(dp=4), shape(buckets=buckets, microbatches=5))
    assert short(found) == [
        "AR dp_cp count 16",
        "AR dp_cp gradients 4000",
        "AR dp_cp gradients 4000",
        "AR world norm 24",
    ]
    assert sent_by_axis(found) == {"dp_cp": 24 + 2 * 6000, "world": 36}


def test_buckets_start_in_order_when_they_are_complete() -> None:
    """A complete bucket waits for those before it in memory (field report D10), for no other."""
    buckets = (
        Bucket(1, ("layers.1.attn.q.bias",)),
        Bucket(2, ("layers.1.attn.q.weight", "layers.1.mlp.up.bias")),
        Bucket(3, ("positions.weight",)),
        Bucket(4, ("layers.0.attn.q.weight",)),
        Bucket(5, ("embed.weight",)),
    )
    found = step_collectives(LLAMA, ParallelPlan(tp=2, dp=2), shape(buckets=buckets))
    seen = [one.payload_bytes // 4 if one.axis == "dp_cp" else 0 for one in found[1:-1]]
    backward = seen[seen.index(1) :]
    # Two buckets after layer 1's attention; the three others only when the table is done.
    assert backward == [1, 2, 0, 0, 3, 4, 5]


@pytest.mark.parametrize("spec", [LLAMA, preset("gpt2-tiny", num_kv_heads=2)])
def test_partial_gradients_are_those_of_the_table(spec: ModelSpec) -> None:
    """What the closed form sums over tp_rep is what the placement table marks, biases included."""
    table = param_table(spec, ParallelPlan(tp=4))
    marked = [one.local_shape({"tp": 3}) for one in table if one.grad_sum == ("tp_rep",)]
    total = 0
    for sizes in marked:
        elements = 1
        for size in sizes:
            elements *= size
        total += elements
    assert spec.num_layers * kv_elements(spec) == total > 0


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(cp=2),
        ParallelPlan(ep=2, dp=2),
        ParallelPlan(zero=3),
    ],
)
def test_other_plans_are_refused(plan: ParallelPlan) -> None:
    with pytest.raises(PlanError, match="expected collectives cover"):
        step_collectives(LLAMA, plan, shape())


def test_pipeline_step_by_hand() -> None:
    """The second of two stages, tied: messages, its own layer, and the table's sum last."""
    x = 10 * H * 4
    spec = preset("llama-tiny", tie_embeddings=True)
    buckets = (Bucket(100, ("norm.weight",)), Bucket(7, ("embed.weight",)))
    plan = ParallelPlan(pp=2, tp=2, dp=2)
    found = step_collectives(spec, plan, shape(buckets=buckets, microbatches=2), pp_rank=1)
    forward = [*[f"AR tp forward {x}"] * 2, f"AG tp forward {2 * 10 * 2 * 4}"]
    back = f"AR tp backward {x}"
    assert short(found) == [
        "AR dp_cp count 16",
        f"receive pp forward {x}",
        *forward,
        # The next activation is made while this rank runs its first backward.
        f"receive pp forward {x}",
        *[back] * 3,
        f"send pp backward {x}",
        *forward,
        back,
        "AR dp_cp gradients 400",
        "AR dp_cp gradients 28",
        *[back] * 2,
        f"send pp backward {x}",
        f"AR embedding gradients {spec.vocab_size // 2 * H * 4}",
        "AR world norm 24",
    ]
    assert sent_by_axis(found)["pp"] == 2 * x


def test_sequence_parallel_step_by_hand() -> None:
    """2 all-gathers and 2 reduce-scatters a layer forward, 2 and 2 backward with 2 more gathers of
    what was kept as slices: 1.25 times the wire bytes of plain tp.
    """
    x = 10 * H * 4
    gather, scatter = f"AG tp forward {x}", f"RS tp forward {x}"
    again, back = f"AG tp backward {x}", f"RS tp backward {x}"
    layer = [gather, scatter] * 2
    plan = ParallelPlan(tp=2, sequence_parallel=True)
    found = step_collectives(LLAMA, plan, shape())
    assert short(found) == [
        scatter,
        *layer * 2,
        gather,
        f"AG tp forward {2 * 10 * 2 * 4}",
        back,
        again,
        *[again, back, again] * 4,
        again,
        f"AR tp gradients {5 * H * 4}",
        "AR world norm 24",
    ]
    plain = step_collectives(LLAMA, ParallelPlan(tp=2), shape())
    ours, theirs = (
        sum(one.wire_bytes for one in step if one.payload_bytes == x) for step in (found, plain)
    )
    # 5 all-reduces forward and 5 backward, each two passes, against 10 + 10 single ones and 5.
    assert ours == theirs * 25 // 20


@given(
    tp=st.sampled_from((1, 2, 4)),
    dp=st.integers(1, 5),
    layers=st.integers(1, 6),
    microbatches=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_counts(tp: int, dp: int, layers: int, microbatches: int, cuts: list[int]) -> None:
    """Numbers of collectives by axis, wherever buckets are cut; they start in the last backward."""
    spec = preset("llama-tiny", num_layers=layers)
    names = [one.name for one in param_table(spec, ParallelPlan())][::-1]
    edges = sorted({0, len(names), *(cut % len(names) for cut in cuts)})
    pieces = zip(edges, edges[1:], strict=False)
    buckets = tuple(Bucket(high - low, tuple(names[low:high])) for low, high in pieces)
    given = shape(buckets=buckets, microbatches=microbatches)
    found = step_collectives(spec, ParallelPlan(tp=tp, dp=dp), given)
    axes = [one.axis for one in found]
    assert axes.count("tp") == (tp > 1) * microbatches * (4 * layers + 3)
    assert axes.count("dp_cp") == (dp > 1) * (1 + len(buckets))
    assert axes.count("tp_rep") == (tp > 2)
    assert axes.count("world") == (tp * dp > 1)
    sent = [one.payload_bytes for one in found if one.phase == "gradients" and one.axis == "dp_cp"]
    assert sorted(sent) == sorted(4 * bucket.elements for bucket in buckets) * (dp > 1)
    assert all(one.wire_bytes == wire_bytes(one.op, one.size, one.payload_bytes) for one in found)
    forwards = [i for i, one in enumerate(found) if one.phase == "forward"]
    buckets_at = [i for i, one in enumerate(found) if one.phase == "gradients"]
    assert not forwards or not buckets_at or max(forwards) < min(buckets_at)
