"""The collectives that one training step ought to issue, and the bytes that they send.

Owns the expectation, from shapes alone. It never sees a tensor, a group or the ledger that it is
compared with. Covers dense models over tp x dp.

Letters: N tokens of a microbatch, H hidden, V vocabulary, P ranks of a group, S payload bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rankmesh.errors import PlanError
from rankmesh.specs.model import ModelSpec
from rankmesh.topology.plan import ParallelPlan


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    axis: name of the group; size: its ranks. payload_bytes: the full buffer S. wire_bytes: what
    one rank sends under the ring algorithm.
    """

    op: str
    axis: str
    size: int
    phase: str
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that one collective reduces: its elements, alignment included, and its parameters'
    names.
    """

    elements: int
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step's collectives depend on beside model and plan.

    tokens: N of one microbatch of one replica, padding rows included. microbatches: of one replica.
    dtype_bytes: of activations; gradients and the loss have at least 4. buckets: every trainable
    parameter is in one of them. label_smoothing: whether the loss uses it.
    """

    tokens: int
    microbatches: int
    dtype_bytes: int
    buckets: tuple[Bucket, ...]
    label_smoothing: bool = False

    @property
    def wide_bytes(self) -> int:
        """Bytes of a gradient or loss element: fp32, or fp64 for models in fp64."""
        return max(4, self.dtype_bytes)


def wire_bytes(op: str, size: int, payload_bytes: int) -> int:
    """Bytes that one of `size` ranks sends: all-reduce 2 (P-1)/P S, the others (P-1)/P S."""
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}[op]
    return passes * (size - 1) * payload_bytes // size


def step_collectives(
    spec: ModelSpec, plan: ParallelPlan, shape: StepShape
) -> tuple[Collective, ...]:
    """Every collective of one step of one rank, in order; those of one-rank groups are not issued.

    1. the count of valid targets and tokens; 2. for each microbatch those of forward and backward
    over tp, with the gradient buckets between them in the last backward, each as soon as its own
    gradients and those of the buckets before it are complete; 3. the sums over `tp` and over
    `tp_rep`; 4. the verdict of norm, loss and stop flag. Raises PlanError where the plan has more
    than tp and dp.
    """
    _check(plan)
    found = [_make("all_reduce", "dp_cp", plan.dp, "count", 2 * 8)]
    for number in range(shape.microbatches):
        found += _forward(spec, plan, shape)
        last = number == shape.microbatches - 1
        found += _backward(spec, plan, shape, shape.buckets if last else ())
    if spec.qk_norm == "head":
        partial = shape.wide_bytes * spec.num_layers * 2 * spec.head_dim
        found.append(_make("all_reduce", "tp", plan.tp, "gradients", partial))
    replicas = max(1, plan.tp // spec.num_kv_heads)
    partial = shape.wide_bytes * kv_elements(spec)
    found.append(_make("all_reduce", "tp_rep", replicas, "gradients", partial))
    found.append(_make("all_reduce", "world", plan.world_size, "norm", 3 * 8))
    return tuple(one for one in found if one.size > 1)


def sent_by_axis(collectives: Iterable[Collective]) -> dict[str, int]:
    """Wire bytes of one rank by axis: `comm_bytes` of metrics.jsonl."""
    total: Counter[str] = Counter()
    for one in collectives:
        total[one.axis] += one.wire_bytes
    return dict(total)


def kv_elements(spec: ModelSpec) -> int:
    """Elements of k and v on a rank where tp exceeds the KV heads: one head of each layer."""
    normed = spec.head_dim if spec.qk_norm == "all" else 0
    layer = 2 * spec.head_dim * (spec.hidden_size + spec.qkv_bias) + normed
    return spec.num_layers * layer


def _forward(spec: ModelSpec, plan: ParallelPlan, shape: StepShape) -> Iterator[Collective]:
    """Embedding 1, each layer 2 (attention output, MLP output), cross entropy 1; before a layer's,
    the mean squares of queries and keys where their norms are over all heads.
    """
    stream = shape.tokens * spec.hidden_size * shape.dtype_bytes
    yield _make("all_reduce", "tp", plan.tp, "forward", stream)
    for _ in range(spec.num_layers):
        if spec.qk_norm == "all":
            yield _make("all_reduce", "tp", plan.tp, "forward", _squares(shape))
        yield _make("all_reduce", "tp", plan.tp, "forward", stream)
        yield _make("all_reduce", "tp", plan.tp, "forward", stream)
    # Of each token: log of the sum of exponentials, logit of the target, for smoothing the sum.
    columns = 3 if shape.label_smoothing else 2
    gathered = plan.tp * shape.tokens * columns * shape.wide_bytes
    yield _make("all_gather", "tp", plan.tp, "forward", gathered)


def _backward(
    spec: ModelSpec, plan: ParallelPlan, shape: StepShape, buckets: Sequence[Bucket]
) -> Iterator[Collective]:
    """Head 1, each layer 2 (MLP input, attention input), before the latter the mean squares;
    buckets where they are complete.

    Buckets start in their order: one that is complete early waits for those before it.
    """
    stream = shape.tokens * spec.hidden_size * shape.dtype_bytes
    missing = [set(bucket.names) for bucket in buckets]
    started = 0
    for event in _backward_events(spec):
        if event is _INPUT_SUM:
            yield _make("all_reduce", "tp", plan.tp, "backward", stream)
        if event is _SQUARES:
            yield _make("all_reduce", "tp", plan.tp, "backward", _squares(shape))
        for names in missing:
            names.discard(event)
        while started < len(buckets) and not missing[started]:
            payload = buckets[started].elements * shape.wide_bytes
            yield _make("all_reduce", "dp_cp", plan.dp, "gradients", payload)
            started += 1


_INPUT_SUM = "sum of an input gradient over tp"
_SQUARES = "gradient of the mean squares over tp"


def _squares(shape: StepShape) -> int:
    """Bytes of two numbers a token."""
    return shape.tokens * 2 * shape.wide_bytes


def _backward_events(spec: ModelSpec) -> Iterator[str]:
    """A backward pass in order: each sum over tp, and each parameter whose gradient is complete.

    A column product (head, gate up, q k v) starts its sum before its weight gradient; a row product
    (down, o) has none; a norm follows the column product that it feeds, and one after the branch
    precedes it. The table is last, also where it is the head as well. Names that a spec does not
    have do no harm.
    """
    yield _INPUT_SUM
    yield "head.weight"
    yield from _norm("norm")
    for layer in reversed(range(spec.num_layers)):
        name = f"layers.{layer}"
        yield from _norm(f"{name}.mlp_post_norm")
        yield from _product(f"{name}.mlp", "down")
        yield _INPUT_SUM
        yield from _product(f"{name}.mlp", "gate", "up")
        yield from _norm(f"{name}.mlp_norm")
        yield from _norm(f"{name}.attn_post_norm")
        yield from _product(f"{name}.attn", "o")
        yield f"{name}.attn.qk_norm.k.weight"
        yield f"{name}.attn.qk_norm.q.weight"
        if spec.qk_norm == "all":
            yield _SQUARES
        yield _INPUT_SUM
        yield from _product(f"{name}.attn", "q", "k", "v")
        yield from _norm(f"{name}.attn_norm")
    yield "positions.weight"
    yield "embed.weight"


def _product(name: str, *outputs: str) -> Iterator[str]:
    """Weights first, then biases."""
    for kind in ("weight", "bias"):
        yield from (f"{name}.{output}.{kind}" for output in outputs)


def _norm(name: str) -> Iterator[str]:
    yield f"{name}.bias"
    yield f"{name}.weight"


def _make(op: str, axis: str, size: int, phase: str, payload: int) -> Collective:
    return Collective(op, axis, size, phase, payload, wire_bytes(op, size, payload))


def _check(plan: ParallelPlan) -> None:
    for axis in ("cp", "pp", "ep", "etp"):
        if plan.size(axis) > 1:
            raise PlanError(f"{axis} {plan.size(axis)}: expected collectives cover tp and dp only")
    if plan.zero or plan.sequence_parallel:
        raise PlanError("expected collectives cover neither zero nor sequence_parallel")
