"""The collectives that one training step ought to issue, and the bytes that they send.

Owns the expectation, from shapes alone. It never sees a tensor, a group or the ledger that it is
compared with. Covers dense models over tp x pp x dp.

Letters: N tokens of a microbatch, H hidden, V vocabulary, P ranks of a group, S payload bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rankmesh.errors import PlanError
from rankmesh.schedule import Action, Kind, build_schedule, with_communication
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import stage_layers
from rankmesh.theory.backward import Stage, Work, backward_events
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.split import even


@dataclass(frozen=True)
class Collective:
    """One collective of one rank, or one message between two stages ("send", "receive").

    axis: name of the group; size: its ranks. payload_bytes: the full buffer S. wire_bytes: what
    one rank sends under the ring algorithm; a receiver sends nothing.
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
    """Bytes that one of `size` ranks sends: all-reduce 2 (P-1)/P S, other collectives (P-1)/P S, a
    message S.
    """
    if op in ("send", "receive"):
        return payload_bytes if op == "send" else 0
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}[op]
    return passes * (size - 1) * payload_bytes // size


def step_collectives(
    spec: ModelSpec, plan: ParallelPlan, shape: StepShape, *, pp_rank: int = 0
) -> tuple[Collective, ...]:
    """Every collective and message of one step of a rank (the first along tp), in order; those of
    one-rank groups are not issued.

    1. the count of valid targets and tokens; 2. for each action of the pipeline rank its messages
    where the schedule has them (a receive may start earlier) and the collectives of its stage over
    tp, with the gradient buckets between them, each as soon as the last of its own gradients and
    of those of the buckets before it is complete; 3. the sums of a tied table over both its stages,
    then those over `tp` and over `tp_rep`; 4. the verdict of norm, loss and stop flag. Raises
    PlanError where the plan has more than tp, pp and dp.
    """
    _check(plan)
    layers = stage_layers(spec, plan)
    schedule = build_schedule(plan.schedule, plan.pp, plan.num_chunks, shape.microbatches)
    actions = with_communication(schedule)[pp_rank]
    stages = sorted({action.stage for action in actions})
    buckets = _Buckets(spec, plan, shape, stages)
    found = [_make("all_reduce", "dp_cp", plan.dp, "count", 2 * 8)]
    for action in actions:
        number = action.stage
        stage = Stage(
            spec,
            layers[number],
            first=number == 0,
            last=number == len(layers) - 1,
            again=tuple(plan.recomputed(number, i) for i in range(len(layers[number]))),
        )
        found += _collectives(action, stage, plan, shape, buckets)
    found += buckets.late()
    held = sum(len(layers[stage]) for stage in stages)
    found += _sums(spec, plan, shape, held, stages)
    found.append(_make("all_reduce", "world", plan.world_size, "norm", 3 * 8))
    return tuple(one for one in found if one.size > 1)


def _collectives(
    action: Action, stage: Stage, plan: ParallelPlan, shape: StepShape, buckets: _Buckets
) -> Iterator[Collective]:
    """Those of one action."""
    stream = shape.tokens * stage.spec.hidden_size * shape.dtype_bytes
    if action.kind is Kind.F:
        yield from _forward(stage, plan, shape)
    elif action.kind in _MESSAGES:
        op, phase = _MESSAGES[action.kind]
        yield _make(op, "pp", plan.pp, phase, stream)
    else:
        for event in backward_events(stage, action.kind):
            if event.work is Work.SUM:
                yield _make("all_reduce", "tp", plan.tp, "backward", stream)
            elif event.work is Work.SQUARES:
                yield _make("all_reduce", "tp", plan.tp, "backward", _squares(shape))
            elif event.work is Work.SUM_AGAIN:
                yield _make("all_reduce", "tp", plan.tp, "forward", stream)
            elif event.work is Work.SQUARES_AGAIN:
                yield _make("all_reduce", "tp", plan.tp, "forward", _squares(shape))
            else:
                yield from buckets.deposit(event.name)


_MESSAGES = {
    Kind.SEND_F: ("send", "forward"),
    Kind.RECV_F: ("receive", "forward"),
    Kind.SEND_B: ("send", "backward"),
    Kind.RECV_B: ("receive", "backward"),
}


def _sums(
    spec: ModelSpec, plan: ParallelPlan, shape: StepShape, layers: int, stages: Sequence[int]
) -> Iterator[Collective]:
    """After the buckets: gradients of which a rank has only a part."""
    ends = {0, plan.num_stages - 1}
    if spec.tie_embeddings and len(ends & set(stages)) == 1 and len(ends) == 2:
        rows = even(spec.vocab_size, plan.tp)[1]
        payload = shape.wide_bytes * rows * spec.hidden_size
        yield _make("all_reduce", "embedding", 2, "gradients", payload)
    if spec.qk_norm == "head":
        partial = shape.wide_bytes * layers * 2 * spec.head_dim
        yield _make("all_reduce", "tp", plan.tp, "gradients", partial)
    replicas = max(1, plan.tp // spec.num_kv_heads)
    partial = shape.wide_bytes * layers * kv_elements(spec)
    yield _make("all_reduce", "tp_rep", replicas, "gradients", partial)


def sent_by_axis(collectives: Iterable[Collective]) -> dict[str, int]:
    """Wire bytes of one rank by axis: `comm_bytes` of metrics.jsonl."""
    total: Counter[str] = Counter()
    for one in collectives:
        total[one.axis] += one.wire_bytes
    return dict(total)


def kv_elements(spec: ModelSpec) -> int:
    """Elements of k and v of a layer on a rank where tp exceeds the KV heads: one head."""
    normed = spec.head_dim if spec.qk_norm == "all" else 0
    return 2 * spec.head_dim * (spec.hidden_size + spec.qkv_bias) + normed


def _forward(stage: Stage, plan: ParallelPlan, shape: StepShape) -> Iterator[Collective]:
    """Embedding 1, each layer 2 (attention output, MLP output), cross entropy 1; before a layer's,
    the mean squares of queries and keys where their norms are over all heads.
    """
    stream = shape.tokens * stage.spec.hidden_size * shape.dtype_bytes
    if stage.first:
        yield _make("all_reduce", "tp", plan.tp, "forward", stream)
    for _ in stage.layers:
        if stage.spec.qk_norm == "all":
            yield _make("all_reduce", "tp", plan.tp, "forward", _squares(shape))
        yield _make("all_reduce", "tp", plan.tp, "forward", stream)
        yield _make("all_reduce", "tp", plan.tp, "forward", stream)
    if stage.last:
        # Of each token: log of the sum of exponentials, logit of the target, for smoothing the sum.
        columns = 3 if shape.label_smoothing else 2
        gathered = plan.tp * shape.tokens * columns * shape.wide_bytes
        yield _make("all_gather", "tp", plan.tp, "forward", gathered)


def _squares(shape: StepShape) -> int:
    """Bytes of two numbers a token."""
    return shape.tokens * 2 * shape.wide_bytes


class _Buckets:
    """Which buckets are complete: a parameter is after its last deposit of the step.

    Buckets start in their order: one that is complete early waits for those before it.
    """

    def __init__(
        self, spec: ModelSpec, plan: ParallelPlan, shape: StepShape, stages: Sequence[int]
    ) -> None:
        self._plan, self._shape = plan, shape
        self._missing = [set(bucket.names) for bucket in shape.buckets]
        self._left = Counter(
            {name: shape.microbatches for bucket in shape.buckets for name in bucket.names}
        )
        if spec.tie_embeddings and {0, plan.num_stages - 1} <= set(stages):
            self._left["embed.weight"] *= 2  # as table and as head
        self._started = 0

    def deposit(self, name: str) -> Iterator[Collective]:
        """One more gradient of `name`; the reductions that start with it."""
        self._left[name] -= 1
        if self._left[name] == 0:
            for names in self._missing:
                names.discard(name)
        while self._started < len(self._missing) and not self._missing[self._started]:
            yield self._start()

    def late(self) -> Iterator[Collective]:
        """The reductions of buckets that never were complete."""
        while self._started < len(self._missing):
            yield self._start()

    def _start(self) -> Collective:
        payload = self._shape.buckets[self._started].elements * self._shape.wide_bytes
        self._started += 1
        return _make("all_reduce", "dp_cp", self._plan.dp, "gradients", payload)


def _make(op: str, axis: str, size: int, phase: str, payload: int) -> Collective:
    return Collective(op, axis, size, phase, payload, wire_bytes(op, size, payload))


def _check(plan: ParallelPlan) -> None:
    for axis in ("cp", "ep", "etp"):
        if plan.size(axis) > 1:
            raise PlanError(
                f"{axis} {plan.size(axis)}: expected collectives cover tp, pp and dp only"
            )
    if plan.zero or plan.sequence_parallel:
        raise PlanError("expected collectives cover neither zero nor sequence_parallel")
